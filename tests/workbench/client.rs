//! The workbench client: it waits for the workbench, reconnects, and never runs a call twice.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use testkit::wait;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use workbench::client::address::WorkbenchAddress;
use workbench::client::{WorkbenchClient, WorkbenchClientError};
use workbench::request::{
    BashRequest, EditRequest, FindRequest, GrepRequest, LsRequest, ReadFileRequest, ReadResult,
    WriteRequest,
};
use workbench::tools::bash::{CommandEvent, CommandStream, OutputChunk};

use crate::processes::wait_for;
use crate::server::{self, ALL_SOCKET_KINDS, Server, SocketKind};

fn address(server: &Server) -> WorkbenchAddress {
    match &server.address {
        server::ServerAddress::Unix(path) => WorkbenchAddress::Unix(path.clone()),
        server::ServerAddress::Tcp(address) => {
            WorkbenchAddress::Tcp(address.ip().to_string(), address.port())
        }
    }
}

fn client(server: &Server) -> WorkbenchClient {
    WorkbenchClient::new(address(server), Duration::from_secs(10), None).unwrap()
}

fn command(args: impl Into<String>) -> BashRequest {
    BashRequest {
        command: args.into(),
        timeout_seconds: None,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_tool_can_be_called() {
    for kind in ALL_SOCKET_KINDS {
        let server = Server::start(kind);
        let client = client(&server);
        client.wait_until_ready().await.unwrap();
        let (path, content) = ("a/b.txt".to_owned(), "one\ntwo\n".to_owned());
        let write = WriteRequest {
            path: path.clone(),
            content,
        };
        assert_eq!(client.write(&write).await.unwrap().bytes, 8);
        let edit = EditRequest {
            path: path.clone(),
            old_text: "two".to_owned(),
            new_text: "zwei".to_owned(),
        };
        assert!(client.edit(&edit).await.unwrap().diff.contains("+2 zwei"));
        let error = client.edit(&edit).await.unwrap_err().to_string();
        assert!(
            error.starts_with("Could not find the exact text in a/b.txt."),
            "{error}"
        );
        let read = ReadFileRequest {
            path,
            offset: Some(2),
            limit: Some(1),
        };
        let read = client.read_file(&read).await.unwrap();
        assert!(matches!(read, ReadResult::Text { content, .. } if content == "zwei"));
        let ls = client.ls(&LsRequest::default()).await.unwrap();
        assert_eq!(ls.output, "a/");
        let find = FindRequest {
            pattern: "*.txt".to_owned(),
            path: None,
            limit: None,
        };
        assert_eq!(client.find(&find).await.unwrap().files, ["a/b.txt"]);
        let grep = GrepRequest {
            pattern: "ZW".to_owned(),
            path: None,
            glob: None,
            ignore_case: true,
            literal: false,
            context: None,
            limit: None,
        };
        assert_eq!(client.grep(&grep).await.unwrap().content, "a/b.txt:2: zwei");
        let result = client.run(&command("cat a/b.txt; exit 3")).await.unwrap();
        assert_eq!(
            (result.output.as_str(), result.exit_code),
            ("one\nzwei\n", 3)
        );
        let much = client.run(&command("seq 100000")).await.unwrap();
        let cut = much.truncation.unwrap();
        assert_eq!((cut.total_lines, cut.output_lines), (100_001, 2000));
        assert!(much.output.ends_with("99999\n100000\n"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn dropping_the_output_stream_kills_the_command() {
    let server = Server::start(SocketKind::Unix);
    let client = client(&server);
    let mut output = client
        .bash(&command("printf 'a\\xff'; exec sleep 3001"))
        .await
        .unwrap();
    let first = output.next().await.unwrap();
    assert_eq!(
        first,
        CommandEvent::Output(CommandStream::Stdout, OutputChunk::Bytes(b"a\xff".to_vec()))
    );
    wait_for(&server.mark, "sleep 3001");
    drop(output);
    let own = server.child.id().cast_signed();
    wait::eventually("the command to end", || {
        let left = crate::processes::marked(&server.mark);
        left.iter().all(|(pid, _)| *pid == own).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_server_is_reported_after_the_timeout() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let started = Instant::now();
    let client = WorkbenchClient::new(
        WorkbenchAddress::Unix(path.clone()),
        Duration::from_millis(500),
        None,
    );
    let error = client.unwrap().run(&command("true")).await.unwrap_err();
    let sentence = format!(
        "Timed out waiting for coding sidecar at unix:{}",
        path.display()
    );
    assert_eq!(error.to_string(), sentence);
    let took = started.elapsed();
    assert!(
        took >= Duration::from_millis(400) && took < Duration::from_secs(5),
        "{took:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_token_is_reported_immediately() {
    let server = Server::start_with(SocketKind::Unix, &[], |command| {
        command
            .env("SIDECAR_AUTH_TOKEN", "right")
            .env("SIDECAR_REQUIRE_AUTH", "1");
    });
    for token in [None, Some("wrong")] {
        let client =
            WorkbenchClient::new(address(&server), Duration::from_secs(60), token).unwrap();
        let error = client.run(&command("true")).await.unwrap_err();
        assert!(
            matches!(error, WorkbenchClientError::Unauthorized(_)),
            "{error}"
        );
    }
    let client =
        WorkbenchClient::new(address(&server), Duration::from_secs(60), Some("right")).unwrap();
    assert!(client.run(&command("true")).await.unwrap().ok);
}

/// A server that answers one health check, and whose accept queue is full afterwards: further
/// connections are neither accepted nor refused.
async fn answer_health_then_hang(listener: TcpListener) {
    let address = listener.local_addr().unwrap();
    let (mut first, _) = listener.accept().await.unwrap();
    let mut requested = [0; 1024];
    assert!(first.read(&mut requested).await.unwrap() > 0);
    let mut queue = Vec::new();
    // The queue is full when a connection attempt has to wait.
    while let Ok(stream) =
        tokio::time::timeout(Duration::from_millis(200), TcpStream::connect(address)).await
    {
        queue.push(stream.unwrap());
    }
    let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 11\r\n\r\n{\"ok\":true}";
    first.write_all(answer).await.unwrap();
    std::future::pending::<()>().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unresponsive_port_times_out() {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(1).unwrap();
    let port = listener.local_addr().unwrap().port();
    let hanging = tokio::spawn(answer_health_then_hang(listener));
    let at = WorkbenchAddress::Tcp("127.0.0.1".to_owned(), port);
    let client = WorkbenchClient::new(at, Duration::from_millis(500), None).unwrap();
    // Without the client's own timeout, the kernel's timeout of two minutes would apply.
    let run = tokio::time::timeout(wait::LIMIT, async { client.run(&command("true")).await });
    let error = run.await.unwrap().unwrap_err();
    assert!(
        matches!(error, WorkbenchClientError::TimedOut(_)),
        "{error}"
    );
    hanging.abort();
}

fn start_at(root: &Path, socket: &Path) -> Server {
    let args = [
        "--socket-path",
        socket.to_str().unwrap(),
        "--workspace-root",
        root.to_str().unwrap(),
    ];
    Server::start_with(SocketKind::Unix, &args, |_| {})
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_continue_after_a_workbench_restart_and_run_once() {
    const CALLERS: u32 = 4;
    const RESTARTS: u32 = 12;
    let dir = tempfile::Builder::new().prefix("wb").tempdir().unwrap();
    let (root, socket) = (dir.path().join("root"), dir.path().join("s"));
    std::fs::create_dir(&root).unwrap();
    let mut server = start_at(&root, &socket);
    let wait = Duration::from_secs(30);
    let client =
        Arc::new(WorkbenchClient::new(WorkbenchAddress::Unix(socket.clone()), wait, None).unwrap());
    let stop = Arc::new(AtomicBool::new(false));
    let answered = Arc::new(AtomicU32::new(0));
    let callers: Vec<_> = (0..CALLERS)
        .map(|caller| {
            let (client, stop) = (Arc::clone(&client), Arc::clone(&stop));
            let answered = Arc::clone(&answered);
            tokio::spawn(async move {
                let (mut done, mut unknown) = (Vec::new(), Vec::new());
                for number in 0.. {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    let call = format!("{caller}-{number}");
                    // Appending a line with one write is atomic.
                    match client.run(&command(format!("echo {call} >> log"))).await {
                        Ok(result) if result.ok => {
                            answered.fetch_add(1, Ordering::Relaxed);
                            done.push(call);
                        }
                        Ok(_)
                        | Err(
                            WorkbenchClientError::ConnectionLost { .. }
                            | WorkbenchClientError::Refused(_),
                        ) => {
                            unknown.push(call);
                        }
                        Err(other) => panic!("{other}"),
                    }
                }
                (done, unknown)
            })
        })
        .collect();
    for round in 0..RESTARTS {
        let before = answered.load(Ordering::Relaxed);
        wait::eventually("calls to be answered", || {
            (answered.load(Ordering::Relaxed) > before + CALLERS).then_some(())
        })
        .await;
        let killed = round % 2 == 0;
        server.signal(if killed {
            Signal::SIGKILL
        } else {
            Signal::SIGTERM
        });
        server.wait();
        server = start_at(&root, &socket);
    }
    let before = answered.load(Ordering::Relaxed);
    wait::eventually("calls to be answered at the end", || {
        (answered.load(Ordering::Relaxed) > before + CALLERS).then_some(())
    })
    .await;
    stop.store(true, Ordering::Relaxed);
    let mut times: HashMap<String, u32> = HashMap::new();
    let (mut done, mut unknown) = (Vec::new(), Vec::new());
    for caller in callers {
        let (caller_done, caller_unknown) = caller.await.unwrap();
        done.extend(caller_done);
        unknown.extend(caller_unknown);
    }
    for line in std::fs::read_to_string(root.join("log")).unwrap().lines() {
        *times.entry(line.to_owned()).or_default() += 1;
    }
    println!(
        "{} answered, {} with unknown outcome",
        done.len(),
        unknown.len()
    );
    assert!(times.values().all(|times| *times == 1), "{times:?}");
    assert!(done.iter().all(|call| times.contains_key(call)));
    // At each restart, the outcome of at most two calls per caller is unknown: a call in flight and
    // a queued call.
    assert!(unknown.len() <= usize::try_from(2 * CALLERS * RESTARTS).unwrap());
}
