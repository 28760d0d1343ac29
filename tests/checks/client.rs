//! Test clients: containers of a shared network, which have loopback addresses, and a sandbox,
//! whose network namespace the test enters.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream, UdpSocket};

use testkit::http::{self, HttpResponse};
use testkit::inside::{self, NetNamespace};
use testkit::wait;
use tokio::net::TcpSocket;

/// A bidirectional connection, with TLS or without.
pub(crate) trait Stream: Read + Write {}

impl<IO: Read + Write> Stream for IO {}

/// A client, and how its requests reach the gate.
pub(crate) enum Client {
    /// Sends requests in absolute form, without TLS, from this address to this proxy.
    Proxy(Ipv4Addr, SocketAddr),
    /// Sends requests with TLS in a tunnel, from this address to this proxy.
    Tunnel(Ipv4Addr, SocketAddr),
    /// Sends requests with TLS to the transparent listeners of a sandbox.
    Sandbox(NetNamespace),
}

impl Client {
    /// Connects to the gate.
    pub(crate) fn connect_to_gate(&self, port: u16) -> TcpStream {
        match self {
            Client::Proxy(ip, proxy) | Client::Tunnel(ip, proxy) => connect_from(*ip, *proxy),
            Client::Sandbox(namespace) => namespace.port(port),
        }
    }

    /// Connects to the gate, and opens a tunnel where the client uses one.
    pub(crate) fn connect(&self, authority: &str) -> TcpStream {
        let (host, port) = split_authority(authority, 443);
        let mut stream = self.connect_to_gate(port);
        if let Client::Tunnel(..) = self {
            let head = open_tunnel(&mut stream, &format!("{host}:{port}"));
            assert_eq!(head.status, 200, "CONNECT {authority}: {head:?}");
        }
        stream
    }

    /// Opens a connection for requests to `authority`.
    pub(crate) fn open(&self, authority: &str) -> Connection {
        let stream = self.connect(authority);
        let (stream, target_prefix): (Box<dyn Stream>, String) = match self {
            Client::Proxy(..) => (Box::new(stream), format!("http://{authority}")),
            Client::Tunnel(..) | Client::Sandbox(_) => {
                (Box::new(start_tls(stream, authority)), String::new())
            }
        };
        Connection {
            stream,
            target_prefix,
            authority: authority.to_owned(),
        }
    }

    /// Sends one GET on a new connection.
    #[track_caller]
    pub(crate) fn get(&self, authority: &str, path: &str) -> HttpResponse {
        self.open(authority).get(path, "")
    }

    /// Sends a GET over TLS that the gate must not terminate. Returns `None` if the gate closes the
    /// connection instead.
    pub(crate) fn get_unread(&self, authority: &str) -> Option<HttpResponse> {
        get_unread_on(self.connect(authority), authority)
    }
}

/// Sends a GET over TLS on an open connection. Returns `None` if the gate closes the connection.
pub(crate) fn get_unread_on(stream: TcpStream, authority: &str) -> Option<HttpResponse> {
    let mut tls = start_tls(stream, authority);
    let head = format!("GET / HTTP/1.1\r\nHost: {authority}\r\nConnection: close\r\n\r\n");
    tls.write_all(head.as_bytes()).ok()?;
    http::read_response(tls).ok()
}

/// A connection for requests to one host.
pub(crate) struct Connection {
    stream: Box<dyn Stream>,
    /// Prefix of every request target: scheme and authority for a proxy, otherwise empty.
    target_prefix: String,
    authority: String,
}

impl Connection {
    /// Sends a GET with additional header lines, each with its CRLF, and reads the response.
    #[track_caller]
    pub(crate) fn get(&mut self, path: &str, headers: &str) -> HttpResponse {
        self.send_head("GET", path, headers).unwrap();
        self.read().unwrap()
    }

    /// Sends the head of a request with additional header lines.
    pub(crate) fn send_head(&mut self, method: &str, path: &str, headers: &str) -> io::Result<()> {
        let Self {
            target_prefix,
            authority,
            ..
        } = &*self;
        let head = format!("{method} {target_prefix}{path} HTTP/1.1\r\nHost: {authority}\r\n");
        self.write(format!("{head}{headers}\r\n").as_bytes())
    }

    /// Sends bytes.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)?;
        self.stream.flush()
    }

    /// Reads one response.
    pub(crate) fn read(&mut self) -> io::Result<HttpResponse> {
        http::read_response(&mut self.stream)
    }
}

/// Sends a CONNECT request and reads the head of the response.
pub(crate) fn open_tunnel(stream: &mut TcpStream, authority: &str) -> HttpResponse {
    let head = format!("CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n");
    stream.write_all(head.as_bytes()).unwrap();
    http::read_head(stream).unwrap()
}

fn start_tls(stream: TcpStream, authority: &str) -> inside::Tls<TcpStream> {
    inside::tls(
        stream,
        Some(split_authority(authority, 443).0),
        &["http/1.1"],
    )
}

/// Connects from a loopback address.
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

/// The host and the port of an authority, or the default port.
fn split_authority(authority: &str, default: u16) -> (&str, u16) {
    match authority.split_once(':') {
        Some((host, port)) => (host, port.parse().unwrap()),
        None => (authority, default),
    }
}

/// A client of the gate's DNS server, over UDP and TCP.
pub(crate) struct DnsClient {
    datagrams: UdpSocket,
    stream: TcpStream,
}

/// The response codes of RFC 1035, section 4.1.1.
pub(crate) const NO_ERROR: u8 = 0;
pub(crate) const NAME_ERROR: u8 = 3;
pub(crate) const REFUSED: u8 = 5;

impl DnsClient {
    /// Connects to the DNS server from a container of a shared network.
    pub(crate) fn in_container(ip: Ipv4Addr, to: SocketAddr) -> Self {
        let datagrams = UdpSocket::bind((ip, 0)).unwrap();
        datagrams.connect(to).unwrap();
        Self::new(datagrams, connect_from(ip, to))
    }

    /// Connects to the DNS server from the network namespace of a sandbox.
    pub(crate) fn in_sandbox(namespace: &NetNamespace) -> Self {
        let to = SocketAddr::from(([192, 0, 0, 1], 53));
        let datagrams = namespace.within(|| {
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
            socket.connect(to).map(|()| socket)
        });
        Self::new(datagrams.unwrap(), namespace.connect(to).unwrap())
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
        let udp_result = self.receive().unwrap();
        let query = build_query(name);
        let length = u16::try_from(query.len()).unwrap().to_be_bytes();
        self.stream
            .write_all(&[&length[..], &query].concat())
            .unwrap();
        let mut length = [0; 2];
        self.stream.read_exact(&mut length).unwrap();
        let mut answer = vec![0; u16::from_be_bytes(length).into()];
        self.stream.read_exact(&mut answer).unwrap();
        assert_eq!(parse_answer(&answer), udp_result, "{name}: TCP and UDP");
        udp_result
    }

    /// Sends a query over UDP.
    pub(crate) fn send(&self, name: &str) {
        self.datagrams.send(&build_query(name)).unwrap();
    }

    /// Receives an answer over UDP: the response code and the number of records.
    pub(crate) fn receive(&self) -> io::Result<(u8, u8)> {
        let mut buffer = [0; 1500];
        let length = self.datagrams.recv(&mut buffer)?;
        Ok(parse_answer(&buffer[..length]))
    }
}

/// A query for the IPv4 address of a name (RFC 1035, section 4.1).
fn build_query(name: &str) -> Vec<u8> {
    let mut bytes = b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0".to_vec();
    for label in name.split('.') {
        bytes.push(u8::try_from(label.len()).unwrap());
        bytes.extend(label.as_bytes());
    }
    bytes.extend([0, 0, 1, 0, 1]);
    bytes
}

/// The response code and the number of records of an answer.
fn parse_answer(answer: &[u8]) -> (u8, u8) {
    (answer[3] & 0xf, answer[7])
}
