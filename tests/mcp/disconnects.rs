//! Clients that disconnect suddenly leave no server, no descriptor and no memory behind.

use std::io::{BufReader, Read};
use std::net::TcpStream;

use serde_json::json;
use testkit::gate::GateProcess;
use testkit::{http, wait};

use crate::bridge::{Bridge, initialize, request};
use crate::hostile::memory;

/// Resets a connection without a TCP shutdown.
fn reset(stream: TcpStream) {
    let socket = nix::sys::socket::sockopt::Linger;
    let immediate = nix::libc::linger {
        l_onoff: 1,
        l_linger: 0,
    };
    nix::sys::socket::setsockopt(&stream, socket, &immediate).unwrap();
    drop(stream);
}

/// Runs one client and disconnects it at the moment `moment % 7`.
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
        // During the creation of its session.
        0 => reset(bridge.send("POST", "/mcp/fixture", &[], &initialize())),
        // With an idle session.
        1 => drop(bridge.session("fixture")),
        // During a call.
        2 => reset(bridge.session("fixture").send(&call("hang"))),
        // During the response to a call.
        3 => {
            let session = bridge.session("fixture");
            let meta = json!({"progressToken": 1});
            let arguments = json!({"steps": 1000, "ms": 1});
            let params = json!({"name": "progress", "arguments": arguments, "_meta": meta});
            let mut stream = session.send(&request(1, "tools/call", &params));
            http::read_head(&mut stream).unwrap();
            http::read_chunk(&mut stream).unwrap();
            reset(stream);
        }
        // With an open event stream.
        4 => {
            let session = bridge.session("fixture");
            let mut stream = bridge.send("GET", &session.path, &session.headers(), "");
            http::read_head(&mut stream).unwrap();
            reset(stream);
        }
        // Over HTTP with SSE.
        5 => {
            let mut stream = bridge.send("GET", "/sse", &[], "");
            http::read_head(&mut stream).unwrap();
            http::read_chunk(&mut stream).unwrap();
            reset(stream);
        }
        // During a call of revision 2026-07-28, which has no session.
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
            reset(stream);
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

/// Waits until at most `max` descriptors are open: pipes close shortly after their servers.
fn wait_for_descriptors(gate: &GateProcess<'_>, max: usize) {
    let closed = || (descriptors(gate) <= max).then_some(());
    wait::until_or(closed, || {
        format!("{} descriptors to become {max}", descriptors(gate))
    });
}

#[test]
fn disconnected_clients_leave_no_server_descriptor_or_memory() {
    let clients = std::env::var("PALISADE_DISCONNECTS");
    let clients: usize = clients.map_or(300, |count| count.parse().unwrap());
    let bridge = Bridge::with_fixture().server("session_idle: 2s");
    let gate = bridge.start();
    let max = descriptors(&gate) + 8;
    // A warm-up, so that pools and threads exist.
    disconnect(&bridge, 100);
    wait_for_descriptors(&gate, max);
    let warm = memory(gate.pid());
    disconnect(&bridge, clients);
    wait_for_descriptors(&gate, max);
    // The limit leaves slack for the allocator, but not for growth with the number of clients. The
    // allocator returns unused memory only while it is used again.
    let reached = wait::until_or(
        || {
            drop(bridge.session("fixture"));
            let now = memory(gate.pid());
            (now < warm + 16 * 1024 * 1024).then_some(now)
        },
        || format!("{} bytes to shrink to about {warm}", memory(gate.pid())),
    );
    println!("{clients} disconnects: {warm} → {reached} bytes");
    bridge
        .session("fixture")
        .text("test_simple_text", &json!({}));
}
