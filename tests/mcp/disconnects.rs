//! Clients that disconnect suddenly leave no server, no descriptor and no memory behind.

use std::io::{BufReader, Read};
use std::net::TcpStream;

use serde_json::json;
use testkit::gate::GateProcess;
use testkit::{http, wait};

use crate::bridge::{Bridge, initialize, request};
use crate::hostile::memory;

/// Resets a connection, as a machine without power does.
fn cut(stream: TcpStream) {
    let socket = nix::sys::socket::sockopt::Linger;
    let now = nix::libc::linger {
        l_onoff: 1,
        l_linger: 0,
    };
    nix::sys::socket::setsockopt(&stream, socket, &now).unwrap();
    drop(stream);
}

/// One client, disconnected at one of several moments.
fn client(bridge: &Bridge, moment: usize) {
    let call = |name: &str| {
        let arguments = json!({"steps": 1000, "ms": 10});
        request(
            1,
            "tools/call",
            &json!({"name": name, "arguments": arguments}),
        )
    };
    match moment % 7 {
        // While its session is created.
        0 => cut(bridge.send("POST", "/mcp/fixture", &[], &initialize())),
        // With a session, and nothing open.
        1 => drop(bridge.session("fixture")),
        // In a call.
        2 => cut(bridge.session("fixture").send(&call("hang"))),
        // In a call that has begun to answer.
        3 => {
            let session = bridge.session("fixture");
            let meta = json!({"progressToken": 1});
            let arguments = json!({"steps": 1000, "ms": 1});
            let params = json!({"name": "progress", "arguments": arguments, "_meta": meta});
            let mut stream = session.send(&request(1, "tools/call", &params));
            http::read_head(&mut stream).unwrap();
            http::read_chunk(&mut stream).unwrap();
            cut(stream);
        }
        // With an open event stream.
        4 => {
            let session = bridge.session("fixture");
            let mut stream = bridge.send("GET", &session.path, &session.headers(), "");
            http::read_head(&mut stream).unwrap();
            cut(stream);
        }
        // Over the older transport.
        5 => {
            let mut stream = bridge.send("GET", "/sse", &[], "");
            http::read_head(&mut stream).unwrap();
            http::read_chunk(&mut stream).unwrap();
            cut(stream);
        }
        // In a call of the newest revision, which has only the connection.
        _ => {
            let meta = json!({
                "io.modelcontextprotocol/protocolVersion": "2026-07-28",
                "io.modelcontextprotocol/clientCapabilities": {},
                "progressToken": 1,
            });
            let arguments = json!({"steps": 1000, "ms": 1});
            let params = json!({"name": "progress", "arguments": arguments, "_meta": meta});
            let headers = [
                ("MCP-Protocol-Version", "2026-07-28"),
                ("Mcp-Method", "tools/call"),
                ("Mcp-Name", "progress"),
            ];
            let body = request(1, "tools/call", &params);
            let mut stream = bridge.send("POST", "/mcp/fixture", &headers, &body);
            http::read_head(&mut stream).unwrap();
            let mut byte = [0];
            BufReader::new(&stream).read_exact(&mut byte).unwrap();
            cut(stream);
        }
    }
}

fn descriptors(gate: &GateProcess<'_>) -> usize {
    let open = std::fs::read_dir(format!("/proc/{}/fd", gate.pid()));
    open.unwrap().count()
}

/// Runs clients on four threads, then waits for their end.
fn disconnect(bridge: &Bridge, clients: usize) {
    std::thread::scope(|scope| {
        for thread in 0..4 {
            scope.spawn(move || {
                for number in (thread..clients).step_by(4) {
                    client(bridge, number);
                }
            });
        }
    });
    wait::until("the servers to end", || {
        bridge.servers().is_empty().then_some(())
    });
}

/// Waits until at most `most` descriptors are open: pipes close shortly after their servers.
fn settled(gate: &GateProcess<'_>, most: usize) {
    let closed = || (descriptors(gate) <= most).then_some(());
    wait::until_or(closed, || {
        format!("{} descriptors to become {most}", descriptors(gate))
    });
}

#[test]
fn a_client_that_is_suddenly_gone_leaves_nothing_behind() {
    let clients = std::env::var("PALISADE_DISCONNECTS");
    let clients: usize = clients.map_or(300, |count| count.parse().unwrap());
    let bridge = Bridge::with_fixture().server("session_idle: 2s");
    let gate = bridge.start();
    let most = descriptors(&gate) + 8;
    // A warm-up, so that pools and threads exist.
    disconnect(&bridge, 100);
    settled(&gate, most);
    let warm = memory(gate.pid());
    disconnect(&bridge, clients);
    settled(&gate, most);
    // Some slack for the allocator, but not for growth with the number of clients. The allocator
    // returns unused memory later, when it is used again.
    let least = wait::until_or(
        || {
            drop(bridge.session("fixture"));
            let now = memory(gate.pid());
            (now < warm + 16 * 1024 * 1024).then_some(now)
        },
        || format!("{} bytes to become {warm} again", memory(gate.pid())),
    );
    println!("{clients} disconnects: {warm} → {least} bytes");
    bridge
        .session("fixture")
        .text("test_simple_text", &json!({}));
}
