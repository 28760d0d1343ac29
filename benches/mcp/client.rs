//! Clients for the benchmark: stdio pipes, and HTTP on a persistent connection.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// A client that calls a tool and waits for the result.
pub trait Caller {
    fn call(&mut self);
}

/// Direct stdio pipes to the server.
pub struct Pipes {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    id: u64,
}

/// The notification after a successful initialize.
const INITIALIZED: &str = r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#;

fn initialize_request() -> String {
    let params = serde_json::json!({
        "protocolVersion": "2025-11-25",
        "capabilities": {},
        "clientInfo": {"name": "bench", "version": "1"},
    });
    format!(r#"{{"jsonrpc":"2.0","id":0,"method":"initialize","params":{params}}}"#)
}

fn call_request(id: u64, meta: &str) -> String {
    format!(
        r#"{{"jsonrpc":"2.0","id":{id},"method":"tools/call","params":{{"name":"echo_raw","arguments":{{"n":{id},"text":"a small argument"}}{meta}}}}}"#
    )
}

impl Pipes {
    pub fn start(fixture: &Path) -> Self {
        let mut child = Command::new(fixture)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let mut pipes = Self {
            child,
            input,
            output,
            id: 0,
        };
        pipes.write_line(&initialize_request());
        pipes.read_line();
        pipes.write_line(INITIALIZED);
        pipes
    }

    fn write_line(&mut self, line: &str) {
        self.input
            .write_all(format!("{line}\n").as_bytes())
            .unwrap();
    }

    fn read_line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line
    }
}

impl Caller for Pipes {
    fn call(&mut self) {
        self.id += 1;
        self.write_line(&call_request(self.id, ""));
        check(&self.read_line(), self.id);
    }
}

impl Drop for Pipes {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The protocol revision.
#[derive(Clone, Copy, PartialEq)]
pub enum Era {
    /// Up to 2025-11-25: initialize and a session.
    Sessions,
    /// 2026-07-28: every request is self-contained.
    Stateless,
}

/// A client of Streamable HTTP on one connection.
pub struct Session {
    http: Http,
    path: &'static str,
    head: String,
    meta: String,
    id: u64,
}

impl Session {
    pub fn open(at: SocketAddr, path: &'static str, era: Era) -> Self {
        let mut session = Self {
            http: Http::connect(at),
            path,
            head: "Accept: application/json, text/event-stream\r\n".to_owned(),
            meta: String::new(),
            id: 0,
        };
        if era == Era::Stateless {
            session.head += "MCP-Protocol-Version: 2026-07-28\r\nMcp-Method: tools/call\r\nMcp-Name: echo_raw\r\n";
            session.meta = r#","_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientCapabilities":{}}"#.to_owned();
            return session;
        }
        let answer = session.post(&initialize_request());
        assert_eq!(answer.status, 200, "{}", answer.body);
        let id = answer.header("mcp-session-id");
        session.head += "MCP-Protocol-Version: 2025-11-25\r\n";
        if let Some(id) = id {
            write!(session.head, "Mcp-Session-Id: {id}\r\n").unwrap();
        }
        let answer = session.post(INITIALIZED);
        assert_eq!(answer.status, 202, "{}", answer.body);
        session
    }

    fn post(&mut self, body: &str) -> Answer {
        self.http.post(self.path, &self.head, body)
    }
}

impl Caller for Session {
    fn call(&mut self) {
        self.id += 1;
        let body = call_request(self.id, &self.meta);
        let answer = self.post(&body);
        assert_eq!(answer.status, 200, "{}", answer.body);
        check(&answer.body, self.id);
    }
}

/// Asserts that the response belongs to the call and is a result.
fn check(answer: &str, id: u64) {
    let is_result =
        answer.contains(&format!("\"id\":{id}")) && answer.contains("structuredContent");
    assert!(is_result, "no answer to {id}: {answer}");
}

/// A persistent connection.
pub struct Http {
    at: SocketAddr,
    stream: BufReader<TcpStream>,
}

/// A response.
pub struct Answer {
    pub status: u16,
    head: String,
    pub body: String,
}

impl Answer {
    fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }
}

impl Http {
    pub fn connect(at: SocketAddr) -> Self {
        let stream = TcpStream::connect(at).unwrap();
        stream.set_nodelay(true).unwrap();
        Self {
            at,
            stream: BufReader::new(stream),
        }
    }

    /// Posts, and reads the whole response.
    pub fn post(&mut self, path: &str, head: &str, body: &str) -> Answer {
        let request = format!(
            "POST {path} HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\n{head}Content-Length: {}\r\n\r\n{body}",
            self.at,
            body.len()
        );
        let mut head = self.send(&request);
        if head.is_empty() {
            // The server closed the connection while other clients were measured.
            *self = Self::connect(self.at);
            head = self.send(&request);
        }
        assert!(head.ends_with("\r\n\r\n"), "cut off: {head}");
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let mut answer = Answer {
            status,
            head,
            body: String::new(),
        };
        let mut body = Vec::new();
        if let Some(length) = answer.header("content-length") {
            body.resize(length.parse().unwrap(), 0);
            self.stream.read_exact(&mut body).unwrap();
        } else if answer.header("transfer-encoding").is_some() {
            self.read_chunks(&mut body);
        }
        if answer
            .header("connection")
            .is_some_and(|value| value.eq_ignore_ascii_case("close"))
        {
            *self = Self::connect(self.at);
        }
        answer.body = String::from_utf8(body).unwrap();
        answer
    }

    /// Sends a request and reads the head of the response; empty if the connection is closed.
    fn send(&mut self, request: &str) -> String {
        let mut head = String::new();
        if self.stream.get_mut().write_all(request.as_bytes()).is_err() {
            return head;
        }
        while !head.ends_with("\r\n\r\n") {
            match self.stream.read_line(&mut head) {
                Ok(0) | Err(_) => break,
                Ok(_) => {}
            }
        }
        head
    }

    /// Reads a chunked body.
    fn read_chunks(&mut self, body: &mut Vec<u8>) {
        loop {
            let mut line = String::new();
            self.stream.read_line(&mut line).unwrap();
            let length = usize::from_str_radix(line.trim(), 16).unwrap();
            let start = body.len();
            body.resize(start + length + 2, 0);
            self.stream.read_exact(&mut body[start..]).unwrap();
            body.truncate(start + length);
            if length == 0 {
                return;
            }
        }
    }
}
