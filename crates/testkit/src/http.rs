//! A small blocking HTTP client for Unix sockets, so that a test can ask thousands of
//! times without starting curl thousands of times.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;

/// What came back.
#[derive(Debug)]
pub struct Answer {
    /// The status.
    pub status: u16,
    /// The head, line by line.
    pub head: Vec<String>,
    /// The body.
    pub body: Vec<u8>,
}

impl Answer {
    /// The body as JSON; `Null` when it is none.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or(Value::Null)
    }

    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// A header's value.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.iter().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }
}

/// Asks once, on a connection of its own.
pub fn ask(socket: &Path, method: &str, path: &str, body: &[u8]) -> io::Result<Answer> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    let length = body.len();
    let mut request = format!(
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n"
    )
    .into_bytes();
    request.extend_from_slice(body);
    stream.write_all(&request)?;
    read_answer(stream)
}

fn read_answer(stream: UnixStream) -> io::Result<Answer> {
    let broken = |what: &str| io::Error::new(io::ErrorKind::UnexpectedEof, what.to_owned());
    let mut reader = BufReader::new(stream);
    let mut head = Vec::new();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 {
            return Err(broken("the answer ended in its head"));
        }
        let line = line.trim_end();
        if line.is_empty() {
            break;
        }
        head.push(line.to_owned());
    }
    let status = head
        .first()
        .and_then(|line| line.split(' ').nth(1)?.parse().ok())
        .ok_or_else(|| broken("the answer has no status"))?;
    let mut answer = Answer {
        status,
        head,
        body: Vec::new(),
    };
    match answer
        .header("content-length")
        .and_then(|text| text.parse().ok())
    {
        Some(length) => {
            answer.body = vec![0; length];
            reader.read_exact(&mut answer.body)?;
        }
        None => {
            reader.read_to_end(&mut answer.body)?;
        }
    }
    Ok(answer)
}
