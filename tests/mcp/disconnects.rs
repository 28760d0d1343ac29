//! Clients that are suddenly gone leave nothing behind: no server, no descriptor, no memory.

use std::io::{BufReader, Read};
use std::net::TcpStream;

use serde_json::json;
use testkit::gate::Gate;
use testkit::{http, wait};

use crate::bridge::{Bridge, request};
use crate::hostile::memory;

/// Ends a connection with a reset, as a machine that lost its power does, sooner or later.
fn cut(stream: TcpStream) {
    let socket = nix::sys::socket::sockopt::Linger;
    let now = nix::libc::linger {
        l_onoff: 1,
        l_linger: 0,
    };
    nix::sys::socket::setsockopt(&stream, socket, &now).unwrap();
    drop(stream);
}

/// One client, cut off at one of the moments where that may happen.
fn client(bridge: &Bridge, moment: usize) {
    let initialize = request(
        0,
        "initialize",
        &json!({
            "protocolVersion": "2025-11-25",
            "capabilities": {},
            "clientInfo": {"name": "test", "version": "1"},
        }),
    );
    let call = |name: &str| {
        let arguments = json!({"steps": 1000, "ms": 10});
        request(
            1,
            "tools/call",
            &json!({"name": name, "arguments": arguments}),
        )
    };
    match moment % 7 {
        // While its session is being made.
        0 => cut(bridge.send("POST", "/mcp/fixture", &[], &initialize)),
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
        // With a standing stream.
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
        // In a call of the newest revision, where the connection is all there is.
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

fn descriptors(gate: &Gate<'_>) -> usize {
    let open = std::fs::read_dir(format!("/proc/{}/fd", gate.pid()));
    open.unwrap().count()
}

/// Clients of four threads, and then quiet: what is left?
fn disconnect(bridge: &Bridge, gate: &Gate<'_>, clients: usize) -> (usize, u64) {
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
    (descriptors(gate), memory(gate.pid()))
}

#[test]
fn a_client_that_is_suddenly_gone_leaves_nothing_behind() {
    let clients = std::env::var("PALISADE_DISCONNECTS");
    let clients: usize = clients.map_or(300, |count| count.parse().unwrap());
    let bridge = Bridge::with_fixture().server("session_idle: 1s");
    let gate = bridge.start();
    // Once round, so that pools are filled and threads are there.
    let (open, warm) = disconnect(&bridge, &gate, 100);
    let (still_open, after) = disconnect(&bridge, &gate, clients);
    println!("{clients} disconnects: {open} → {still_open} descriptors, {warm} → {after} bytes");
    assert!(
        still_open <= open + 4,
        "{open} descriptors became {still_open}"
    );
    // Some slack for the allocator; not for anything that grows with the count.
    assert!(
        after < warm + 16 * 1024 * 1024,
        "{warm} bytes became {after}"
    );
    bridge
        .session("fixture")
        .text("test_simple_text", &json!({}));
}
