//! A small blocking HTTP client for Unix sockets: a test can send thousands of requests without
//! starting a curl process for each.

use std::io::{self, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;

/// A response.
#[derive(Debug)]
pub struct HttpResponse {
    /// The status.
    pub status: u16,
    /// The head, line by line.
    pub head: Vec<String>,
    /// The body.
    pub body: Vec<u8>,
}

impl HttpResponse {
    /// The body as JSON; `Null` if it is not JSON.
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

/// Sends one request on a new connection.
pub fn send(socket: &Path, method: &str, path: &str, body: &[u8]) -> io::Result<HttpResponse> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    let length = body.len();
    let mut request = format!(
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n"
    )
    .into_bytes();
    request.extend_from_slice(body);
    stream.write_all(&request)?;
    read_response(BufReader::new(stream))
}

/// Reads one response, and no byte after it.
pub fn read_response(mut stream: impl Read) -> io::Result<HttpResponse> {
    let mut answer = read_head(&mut stream)?;
    let has_no_body = matches!(answer.status, 100..=199 | 204 | 304);
    let chunked = answer
        .header("transfer-encoding")
        .is_some_and(|coding| coding.eq_ignore_ascii_case("chunked"));
    let length = answer
        .header("content-length")
        .and_then(|text| text.parse().ok());
    match length {
        _ if has_no_body => {}
        _ if chunked => answer.body = read_chunks(&mut stream)?,
        Some(length) => {
            answer.body = vec![0; length];
            stream.read_exact(&mut answer.body)?;
        }
        None => {
            // A reset connection also ends the body.
            if let Err(error) = stream.read_to_end(&mut answer.body)
                && error.kind() != io::ErrorKind::UnexpectedEof
                && error.kind() != io::ErrorKind::ConnectionReset
            {
                return Err(error);
            }
        }
    }
    Ok(answer)
}

/// Reads the head of a response, and no byte after it.
pub fn read_head(mut stream: impl Read) -> io::Result<HttpResponse> {
    let mut head = Vec::new();
    loop {
        let line = read_line(&mut stream)?;
        if line.is_empty() {
            break;
        }
        head.push(line);
    }
    let status = head
        .first()
        .and_then(|line| line.split(' ').nth(1)?.parse().ok())
        .ok_or_else(|| broken("the answer has no status"))?;
    Ok(HttpResponse {
        status,
        head,
        body: Vec::new(),
    })
}

/// The next chunk of a body; `None` after the last, whose trailers are left unread.
pub fn read_chunk(mut stream: impl Read) -> io::Result<Option<Vec<u8>>> {
    let line = read_line(&mut stream)?;
    let length = line.split(';').next().unwrap_or_default().trim();
    let length = usize::from_str_radix(length, 16).map_err(|_| broken("a chunk has no length"))?;
    if length == 0 {
        return Ok(None);
    }
    let mut chunk = vec![0; length];
    stream.read_exact(&mut chunk)?;
    read_line(&mut stream)?;
    Ok(Some(chunk))
}

fn read_chunks(mut stream: impl Read) -> io::Result<Vec<u8>> {
    let mut body = Vec::new();
    while let Some(chunk) = read_chunk(&mut stream)? {
        body.extend(chunk);
    }
    while !read_line(&mut stream)?.is_empty() {}
    Ok(body)
}

/// A line without its end.
pub fn read_line(mut stream: impl Read) -> io::Result<String> {
    let mut line = Vec::new();
    loop {
        let mut byte = [0];
        if stream.read(&mut byte)? == 0 {
            return Err(broken("the answer ended in its head"));
        }
        let [byte] = byte;
        if byte == b'\n' {
            break;
        }
        line.push(byte);
    }
    Ok(String::from_utf8_lossy(&line).trim_end().to_owned())
}

fn broken(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, what.to_owned())
}
