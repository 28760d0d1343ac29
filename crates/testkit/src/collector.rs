//! An OTLP collector that records every request it receives.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};

/// One request that arrived.
#[derive(Clone, Debug)]
pub struct CollectorRequest {
    /// The path of the request.
    pub path: String,
    /// The head, line by line.
    pub head: Vec<String>,
    /// The body.
    pub body: Vec<u8>,
}

/// A server on loopback that answers 200 and records every request.
#[derive(Debug)]
pub struct Collector {
    address: SocketAddr,
    received: Arc<Mutex<Vec<CollectorRequest>>>,
}

impl Collector {
    /// Starts on a free port.
    #[expect(clippy::expect_used, reason = "a test without a port cannot continue")]
    pub fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let received = Arc::new(Mutex::new(Vec::new()));
        let keep = Arc::clone(&received);
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let keep = Arc::clone(&keep);
                std::thread::spawn(move || while serve(&stream, &keep).is_some() {});
            }
        });
        Self { address, received }
    }

    /// The address of the collector.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// All requests so far.
    pub fn received(&self) -> Vec<CollectorRequest> {
        self.received
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

fn serve(mut stream: &TcpStream, keep: &Mutex<Vec<CollectorRequest>>) -> Option<()> {
    let mut reader = BufReader::new(stream);
    let mut head = Vec::new();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).ok()? == 0 {
            return None;
        }
        let line = line.trim_end().to_owned();
        if line.is_empty() {
            break;
        }
        head.push(line);
    }
    let length = head.iter().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length")
            .then(|| value.trim().parse().ok())?
    });
    let mut body = vec![0; length.unwrap_or(0)];
    reader.read_exact(&mut body).ok()?;
    let path = head.first()?.split(' ').nth(1)?.to_owned();
    keep.lock()
        .unwrap_or_else(PoisonError::into_inner)
        .push(CollectorRequest { path, head, body });
    stream
        .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        .ok()
}
