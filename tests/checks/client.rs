//! Clients that send bytes: containers of a shared network, which loopback plays, and a
//! sandbox, whose network the test enters.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream, UdpSocket};

use testkit::http::{self, HttpResponse};
use testkit::inside::{self, NetNamespace};
use testkit::wait;
use tokio::net::TcpSocket;

/// A connection in either direction, with TLS or without.
pub(crate) trait Stream: Read + Write {}

impl<IO: Read + Write> Stream for IO {}

/// A client, and how its requests get to the gate.
pub(crate) enum Client {
    /// From this address to this proxy, in absolute form, without TLS.
    Proxy(Ipv4Addr, SocketAddr),
    /// From this address to this proxy, in a tunnel, with TLS.
    Tunnel(Ipv4Addr, SocketAddr),
    /// To the transparent listeners of a sandbox, with TLS.
    Sandbox(NetNamespace),
}

impl Client {
    /// Connects to the gate.
    pub(crate) fn connect_to_gate(&self, port: u16) -> TcpStream {
        match self {
            Client::Proxy(ip, proxy) | Client::Tunnel(ip, proxy) => connect_from(*ip, *proxy),
            Client::Sandbox(inside) => inside.port(port),
        }
    }

    /// Connects to the gate, and opens a tunnel where the client uses one.
    pub(crate) fn connect(&self, authority: &str) -> TcpStream {
        let (host, port) = split(authority, 443);
        let mut stream = self.connect_to_gate(port);
        if let Client::Tunnel(..) = self {
            let head = open_tunnel(&mut stream, &format!("{host}:{port}"));
            assert_eq!(head.status, 200, "CONNECT {authority}: {head:?}");
        }
        stream
    }

    /// Connects for requests to `authority`.
    pub(crate) fn open(&self, authority: &str) -> Connection {
        let stream = self.connect(authority);
        let (stream, prefix): (Box<dyn Stream>, String) = match self {
            Client::Proxy(..) => (Box::new(stream), format!("http://{authority}")),
            Client::Tunnel(..) | Client::Sandbox(_) => {
                (Box::new(begin_tls(stream, authority)), String::new())
            }
        };
        Connection {
            stream,
            prefix,
            authority: authority.to_owned(),
        }
    }

    /// Sends one request on a connection of its own.
    #[track_caller]
    pub(crate) fn get(&self, authority: &str, path: &str) -> HttpResponse {
        self.open(authority).get(path, "")
    }

    /// Sends a request through TLS that nothing between here and the host ends; none where the
    /// gate closes the connection instead.
    pub(crate) fn get_unread(&self, authority: &str) -> Option<HttpResponse> {
        get_unread_on(self.connect(authority), authority)
    }
}

/// The same on a connection that is open.
pub(crate) fn get_unread_on(stream: TcpStream, authority: &str) -> Option<HttpResponse> {
    let mut tls = begin_tls(stream, authority);
    let head = format!("GET / HTTP/1.1\r\nHost: {authority}\r\nConnection: close\r\n\r\n");
    tls.write_all(head.as_bytes()).ok()?;
    http::read_response(tls).ok()
}

/// A connection for requests to one host.
pub(crate) struct Connection {
    stream: Box<dyn Stream>,
    /// What the target of a request begins with.
    prefix: String,
    authority: String,
}

impl Connection {
    /// Sends a request with more headers, each with its line end, and reads the answer.
    #[track_caller]
    pub(crate) fn get(&mut self, path: &str, headers: &str) -> HttpResponse {
        self.begin("GET", path, headers).unwrap();
        self.read().unwrap()
    }

    /// Sends the head of a request.
    pub(crate) fn begin(&mut self, method: &str, path: &str, headers: &str) -> io::Result<()> {
        let Self {
            prefix, authority, ..
        } = &*self;
        let head = format!("{method} {prefix}{path} HTTP/1.1\r\nHost: {authority}\r\n");
        self.write(format!("{head}{headers}\r\n").as_bytes())
    }

    /// Sends bytes.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)?;
        self.stream.flush()
    }

    /// Reads one answer.
    pub(crate) fn read(&mut self) -> io::Result<HttpResponse> {
        http::read_response(&mut self.stream)
    }
}

/// Asks for a tunnel, and reads the head of the answer.
pub(crate) fn open_tunnel(stream: &mut TcpStream, authority: &str) -> HttpResponse {
    let head = format!("CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n");
    stream.write_all(head.as_bytes()).unwrap();
    http::read_head(stream).unwrap()
}

fn begin_tls(stream: TcpStream, authority: &str) -> inside::Tls<TcpStream> {
    inside::tls(stream, Some(split(authority, 443).0), &["http/1.1"])
}

/// Connects from an address of the loopback.
pub(crate) fn connect_from(ip: Ipv4Addr, to: SocketAddr) -> TcpStream {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()
        .unwrap();
    let stream = runtime.block_on(async {
        let socket = TcpSocket::new_v4()?;
        socket.bind((ip, 0).into())?;
        socket.connect(to).await?.into_std()
    });
    let stream = stream.unwrap();
    stream.set_nonblocking(false).unwrap();
    stream.set_read_timeout(Some(wait::LIMIT)).unwrap();
    stream
}

/// The host and the port of an authority.
fn split(authority: &str, default: u16) -> (&str, u16) {
    match authority.split_once(':') {
        Some((host, port)) => (host, port.parse().unwrap()),
        None => (authority, default),
    }
}

/// A client of the gate's DNS.
pub(crate) struct NameClient {
    datagrams: UdpSocket,
    stream: TcpStream,
}

/// The response codes of RFC 1035, section 4.1.1.
pub(crate) const NO_ERROR: u8 = 0;
pub(crate) const NO_NAME: u8 = 3;
pub(crate) const REFUSED: u8 = 5;

impl NameClient {
    /// A container of a shared network.
    pub(crate) fn from(ip: Ipv4Addr, to: SocketAddr) -> Self {
        let datagrams = UdpSocket::bind((ip, 0)).unwrap();
        datagrams.connect(to).unwrap();
        Self::new(datagrams, connect_from(ip, to))
    }

    /// A sandbox.
    pub(crate) fn inside(inside: &NetNamespace) -> Self {
        let to = SocketAddr::from(([192, 0, 0, 1], 53));
        let datagrams = inside.within(|| {
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
            socket.connect(to).map(|()| socket)
        });
        Self::new(datagrams.unwrap(), inside.connect(to).unwrap())
    }

    fn new(datagrams: UdpSocket, stream: TcpStream) -> Self {
        datagrams.set_read_timeout(Some(wait::LIMIT)).unwrap();
        Self { datagrams, stream }
    }

    /// Queries the IPv4 address of a name over UDP, and over TCP with the same result: the
    /// response code and the number of records.
    #[track_caller]
    pub(crate) fn query(&mut self, name: &str) -> (u8, u8) {
        self.send(name);
        let over_udp = self.receive().unwrap();
        let query = message(name);
        let length = u16::try_from(query.len()).unwrap().to_be_bytes();
        self.stream
            .write_all(&[&length[..], &query].concat())
            .unwrap();
        let mut length = [0; 2];
        self.stream.read_exact(&mut length).unwrap();
        let mut answer = vec![0; u16::from_be_bytes(length).into()];
        self.stream.read_exact(&mut answer).unwrap();
        assert_eq!(result(&answer), over_udp, "{name}: TCP and UDP");
        over_udp
    }

    /// Sends a query in a datagram.
    pub(crate) fn send(&self, name: &str) {
        self.datagrams.send(&message(name)).unwrap();
    }

    /// Receives an answer in a datagram.
    pub(crate) fn receive(&self) -> io::Result<(u8, u8)> {
        let mut buffer = [0; 1500];
        let length = self.datagrams.recv(&mut buffer)?;
        Ok(result(&buffer[..length]))
    }
}

/// A query for the IPv4 address of a name (RFC 1035, section 4.1).
fn message(name: &str) -> Vec<u8> {
    let mut bytes = b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0".to_vec();
    for label in name.split('.') {
        bytes.push(u8::try_from(label.len()).unwrap());
        bytes.extend(label.as_bytes());
    }
    bytes.extend([0, 0, 1, 0, 1]);
    bytes
}

/// The response code and the number of records of an answer.
fn result(answer: &[u8]) -> (u8, u8) {
    (answer[3] & 0xf, answer[7])
}
