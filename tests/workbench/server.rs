//! Fixture: a workbench as a real process, on both kinds of socket, and an HTTP
//! client.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tempfile::TempDir;
use testkit::http::{HttpResponse, read_response};
use testkit::wait;

use crate::PALISADE;
use crate::processes::{self, MARK, marked};

/// The address of a workbench.
#[derive(Clone, Debug)]
pub(crate) enum ServerAddress {
    Unix(PathBuf),
    Tcp(SocketAddr),
}

/// The kind of socket.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SocketKind {
    Unix,
    Tcp,
}

/// Both kinds of socket, for tests that run with each of them.
pub(crate) const ALL_SOCKET_KINDS: [SocketKind; 2] = [SocketKind::Unix, SocketKind::Tcp];

/// A byte stream in both directions.
pub(crate) trait ByteStream: Read + Write + Send {}
impl<T: Read + Write + Send> ByteStream for T {}

impl ServerAddress {
    pub(crate) fn connect(&self) -> Box<dyn ByteStream> {
        let timeout = Some(Duration::from_secs(60));
        match self {
            ServerAddress::Unix(path) => {
                let stream = UnixStream::connect(path).unwrap();
                stream.set_read_timeout(timeout).unwrap();
                Box::new(stream)
            }
            ServerAddress::Tcp(address) => {
                let stream = TcpStream::connect(address).unwrap();
                stream.set_read_timeout(timeout).unwrap();
                Box::new(stream)
            }
        }
    }

    /// Sends a request and returns the stream for the response.
    pub(crate) fn send(
        &self,
        method: &str,
        path: &str,
        head: &str,
        body: &[u8],
    ) -> Box<dyn ByteStream> {
        let mut stream = self.connect();
        let length = body.len();
        let mut request = format!(
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{head}\
             Content-Length: {length}\r\n\r\n"
        )
        .into_bytes();
        request.extend_from_slice(body);
        stream.write_all(&request).unwrap();
        stream
    }

    pub(crate) fn request(
        &self,
        method: &str,
        path: &str,
        head: &str,
        body: &[u8],
    ) -> HttpResponse {
        read_response(BufReader::new(self.send(method, path, head, body))).unwrap()
    }
}

/// A running workbench.
pub(crate) struct Server {
    pub(crate) child: Child,
    pub(crate) address: ServerAddress,
    pub(crate) mark: String,
    dir: TempDir,
}

impl Server {
    pub(crate) fn start(kind: SocketKind) -> Self {
        Self::start_with(kind, &[], |_| {})
    }

    /// Starts the workbench as a child of another program.
    pub(crate) fn start_under(args: &[&str]) -> Self {
        Self::start_as(args, SocketKind::Unix, &[], |_| {})
    }

    pub(crate) fn start_with(
        kind: SocketKind,
        options: &[&str],
        prepare: impl FnOnce(&mut Command),
    ) -> Self {
        Self::start_as(&[], kind, options, prepare)
    }

    fn start_as(
        wrapper: &[&str],
        kind: SocketKind,
        options: &[&str],
        prepare: impl FnOnce(&mut Command),
    ) -> Self {
        let dir = tempfile::Builder::new().prefix("wb").tempdir().unwrap();
        std::fs::create_dir(dir.path().join("root")).unwrap();
        let socket = dir.path().join("run/w.sock");
        let mark = processes::mark();
        let arguments = [wrapper, &[PALISADE, "--json", "workbench"]].concat();
        let mut command = Command::new(arguments[0]);
        command
            .args(&arguments[1..])
            .args(options)
            .env("WORKSPACE_ROOT", dir.path().join("root"))
            .env(MARK, &mark)
            .stdout(Stdio::piped());
        match kind {
            SocketKind::Unix => command.env("SOCKET_PATH", &socket),
            SocketKind::Tcp => command.env("TCP_HOST", "127.0.0.1").env("TCP_PORT", "0"),
        };
        prepare(&mut command);
        let mut child = command.spawn().unwrap();
        let mut printed = String::new();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        while !printed.ends_with("}\n") {
            let length = output.read_line(&mut printed).unwrap();
            assert!(length > 0, "the workbench ended: {printed}");
        }
        let printed: Value = serde_json::from_str(&printed).unwrap();
        let address = match kind {
            SocketKind::Unix => ServerAddress::Unix(socket),
            SocketKind::Tcp => {
                ServerAddress::Tcp(printed["addresses"][0].as_str().unwrap().parse().unwrap())
            }
        };
        Self {
            child,
            address,
            mark,
            dir,
        }
    }

    /// The workspace.
    pub(crate) fn root(&self) -> PathBuf {
        self.dir.path().join("root")
    }

    /// The directory that contains the workspace and the socket's directory.
    pub(crate) fn parent_dir(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn write(&self, path: &str, content: impl AsRef<[u8]>) {
        let path = self.root().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    }

    pub(crate) fn read(&self, path: &str) -> Vec<u8> {
        std::fs::read(self.root().join(path)).unwrap()
    }

    /// Calls a tool, and returns the status and the response.
    pub(crate) fn call(&self, tool: &str, body: &Value) -> (u16, Value) {
        let answer = self.post(tool, body.to_string().as_bytes());
        (answer.status, answer.json())
    }

    pub(crate) fn post(&self, tool: &str, body: &[u8]) -> HttpResponse {
        let head = "Content-Type: application/json\r\n";
        self.address
            .request("POST", &format!("/{tool}"), head, body)
    }

    /// Calls a tool, which must succeed.
    pub(crate) fn result(&self, tool: &str, body: &Value) -> Value {
        let (status, answer) = self.call(tool, body);
        assert_eq!(
            (status, &answer["ok"]),
            (200, &Value::Bool(true)),
            "{answer}"
        );
        answer["result"].clone()
    }

    /// Calls a tool, which must fail, and returns its message.
    pub(crate) fn error_message(&self, tool: &str, body: &Value) -> String {
        let (status, answer) = self.call(tool, body);
        assert_eq!(
            (status, &answer["ok"]),
            (400, &Value::Bool(false)),
            "{answer}"
        );
        answer["error"].as_str().unwrap().to_owned()
    }

    /// Starts a command, and returns the stream of its output.
    pub(crate) fn bash(&self, body: &Value) -> Box<dyn ByteStream> {
        let head = "Content-Type: application/json\r\n";
        let body = body.to_string();
        self.address.send("POST", "/bash", head, body.as_bytes())
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id().cast_signed()), signal).unwrap();
    }

    pub(crate) fn wait(&mut self) -> Option<i32> {
        wait::until("the workbench to end", || self.child.try_wait().unwrap()).code()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        for (pid, _) in marked(&self.mark) {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
}

/// The lines of a command's response.
pub(crate) fn lines(answer: &HttpResponse) -> Vec<Value> {
    let text = answer.text();
    let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
    lines.collect()
}
