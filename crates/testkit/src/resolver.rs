//! A DNS resolver on loopback, over UDP and TCP: answers with the replies of the test and records
//! every query. Messages are encoded by hand: with the gate's DNS library, a bug of the library
//! could remain undetected.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// One query that arrived.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DnsQuery {
    /// The name, in its original letter case.
    pub name: String,
    /// The number of the record type.
    pub kind: u16,
    /// Whether the query came over TCP.
    pub tcp: bool,
    /// The whole message.
    pub message: Vec<u8>,
}

/// The reply for a name and type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DnsReply {
    /// These records.
    Records(Vec<DnsRecord>),
    /// Truncated over UDP; these records over TCP.
    Cut(Vec<DnsRecord>),
    /// The name exists without records of the type.
    Nothing,
    /// The name does not exist.
    NoName,
    /// SERVFAIL.
    Failure,
    /// No reply.
    Silence,
    /// An invalid message with the right id.
    Garbage,
}

/// One record of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DnsRecord {
    /// The name of the record.
    pub name: String,
    /// Time to live in seconds.
    pub ttl: u32,
    /// The data.
    pub data: RecordData,
}

/// The data of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecordData {
    /// An IPv4 address.
    A(Ipv4Addr),
    /// An IPv6 address.
    Aaaa(Ipv6Addr),
    /// Another name.
    Cname(String),
    /// A text of at most 255 bytes.
    Txt(String),
}

/// A record of `name` with a TTL of a minute.
pub fn record(name: &str, data: RecordData) -> DnsRecord {
    DnsRecord {
        name: name.to_owned(),
        ttl: 60,
        data,
    }
}

/// A resolver on loopback. Names without a reply get NXDOMAIN.
#[derive(Clone, Debug)]
pub struct Resolver {
    address: SocketAddr,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    zone: HashMap<(String, u16), DnsReply>,
    queries: Vec<DnsQuery>,
}

impl Resolver {
    /// Starts on a port that is free for UDP and TCP.
    #[expect(clippy::expect_used, reason = "a test without a port cannot continue")]
    pub fn start() -> Self {
        let (listener, socket) = (0..100)
            .find_map(|_| {
                let listener = TcpListener::bind("127.0.0.1:0").ok()?;
                let socket = UdpSocket::bind(listener.local_addr().ok()?).ok()?;
                Some((listener, socket))
            })
            .expect("a port");
        let address = socket.local_addr().expect("an address");
        let own = Self {
            address,
            state: Arc::default(),
        };
        let datagrams = own.clone();
        std::thread::spawn(move || datagrams.serve_datagrams(&socket));
        let streams = own.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let own = streams.clone();
                std::thread::spawn(move || own.serve_stream(stream));
            }
        });
        own
    }

    /// The address of the resolver.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Sets the reply for `name` and the record type `kind`.
    pub fn set_reply(&self, name: &str, kind: u16, reply: DnsReply) {
        self.state()
            .zone
            .insert((name.to_ascii_lowercase(), kind), reply);
    }

    /// All queries so far, without identical retransmissions.
    pub fn queries(&self) -> Vec<DnsQuery> {
        let mut queries = Vec::new();
        for query in &self.state().queries {
            if !queries.contains(query) {
                queries.push(query.clone());
            }
        }
        queries
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve_datagrams(&self, socket: &UdpSocket) {
        let mut buffer = [0; 4096];
        while let Ok((length, from)) = socket.recv_from(&mut buffer) {
            let query = buffer.get(..length).unwrap_or_default();
            if let Some(answer) = self.answer(query, false) {
                // A client that has gone must not stop the server.
                let _ = socket.send_to(&answer, from);
            }
        }
    }

    fn serve_stream(&self, mut stream: TcpStream) -> Option<()> {
        loop {
            let mut length = [0; 2];
            stream.read_exact(&mut length).ok()?;
            let mut query = vec![0; u16::from_be_bytes(length).into()];
            stream.read_exact(&mut query).ok()?;
            if let Some(answer) = self.answer(&query, true) {
                let length = u16::try_from(answer.len()).ok()?;
                stream.write_all(&length.to_be_bytes()).ok()?;
                stream.write_all(&answer).ok()?;
            }
        }
    }

    fn answer(&self, query: &[u8], tcp: bool) -> Option<Vec<u8>> {
        let (name, end) = read_name(query, 12)?;
        let question = query.get(12..end + 4)?;
        let kind = u16::from_be_bytes(*query.get(end..)?.first_chunk()?);
        let reply = {
            let mut state = self.state();
            let reply = state.zone.get(&(name.to_ascii_lowercase(), kind)).cloned();
            state.queries.push(DnsQuery {
                name,
                kind,
                tcp,
                message: query.to_vec(),
            });
            reply.unwrap_or(DnsReply::NoName)
        };
        let id: [u8; 2] = *query.first_chunk()?;
        let (flags, records, soa): (u16, &[DnsRecord], bool) = match &reply {
            DnsReply::Records(records) => (0x8180, records, false),
            DnsReply::Cut(_) if !tcp => (0x8380, &[], false),
            DnsReply::Cut(records) => (0x8180, records, false),
            DnsReply::Nothing => (0x8180, &[], true),
            DnsReply::NoName => (0x8183, &[], true),
            DnsReply::Failure => (0x8182, &[], false),
            DnsReply::Silence => return None,
            DnsReply::Garbage => {
                let mut garbage = id.to_vec();
                garbage.extend([0xff; 30]);
                return Some(garbage);
            }
        };
        let mut answer = id.to_vec();
        let counts = [1, u16::try_from(records.len()).ok()?, u16::from(soa), 0];
        answer.extend(flags.to_be_bytes());
        answer.extend(counts.iter().flat_map(|count: &u16| count.to_be_bytes()));
        answer.extend(question);
        for record in records {
            write_record(&mut answer, record)?;
        }
        if soa {
            // An SOA record of the root with a negative TTL of an hour.
            answer.extend([0, 0, 6, 0, 1, 0, 0, 0x0e, 0x10, 0, 22, 0, 0]);
            answer.extend([0, 0, 0, 1, 0, 0, 0, 60, 0, 0, 0, 60, 0, 0, 0, 60]);
            answer.extend([0, 0, 0x0e, 0x10]);
        }
        Some(answer)
    }
}

/// An uncompressed name, and the offset of its end.
fn read_name(message: &[u8], mut at: usize) -> Option<(String, usize)> {
    let mut labels = Vec::new();
    loop {
        let length = usize::from(*message.get(at)?);
        at += 1;
        if length == 0 {
            return Some((labels.join("."), at));
        }
        let label = message.get(at..at + length)?;
        labels.push(String::from_utf8_lossy(label).into_owned());
        at += length;
    }
}

fn write_name(to: &mut Vec<u8>, name: &str) -> Option<()> {
    for label in name.split('.').filter(|label| !label.is_empty()) {
        to.push(u8::try_from(label.len()).ok().filter(|n| *n < 64)?);
        to.extend(label.as_bytes());
    }
    to.push(0);
    Some(())
}

fn write_record(to: &mut Vec<u8>, record: &DnsRecord) -> Option<()> {
    let mut data = Vec::new();
    let kind: u16 = match &record.data {
        RecordData::A(ip) => {
            data.extend(ip.octets());
            1
        }
        RecordData::Aaaa(ip) => {
            data.extend(ip.octets());
            28
        }
        RecordData::Cname(name) => {
            write_name(&mut data, name)?;
            5
        }
        RecordData::Txt(text) => {
            data.push(u8::try_from(text.len()).ok()?);
            data.extend(text.as_bytes());
            16
        }
    };
    write_name(to, &record.name)?;
    to.extend(kind.to_be_bytes());
    to.extend([0, 1]);
    to.extend(record.ttl.to_be_bytes());
    to.extend(u16::try_from(data.len()).ok()?.to_be_bytes());
    to.extend(data);
    Some(())
}
