//! Addresses that the dialer connects to or refuses.

use std::net::{IpAddr, UdpSocket};
use std::sync::{Arc, Mutex};

use policy::reason::Reason;
use testkit::origin::{OriginReply, OriginServer};
use testkit::resolver::{DnsReply as Answer, RecordData, Resolver, record};

use super::*;

/// A DNS server that answers every query with the same addresses and records the queried names.
struct FixedDnsServer {
    address: SocketAddr,
    queried: Arc<Mutex<Vec<String>>>,
}

impl FixedDnsServer {
    fn with_addresses(addresses: &[&str]) -> Self {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let address = socket.local_addr().unwrap();
        let queried = Arc::<Mutex<Vec<String>>>::default();
        let recorded = Arc::clone(&queried);
        let addresses: Vec<IpAddr> = addresses.iter().map(|ip| ip.parse().unwrap()).collect();
        std::thread::spawn(move || {
            let mut query = [0; 1500];
            while let Ok((length, from)) = socket.recv_from(&mut query) {
                let (name, answer) = answer(&query[..length], &addresses);
                recorded.lock().unwrap().push(name);
                socket.send_to(&answer, from).unwrap();
            }
        });
        Self { address, queried }
    }

    fn queries(&self) -> Vec<String> {
        self.queried.lock().unwrap().clone()
    }

    fn dialer(&self, more: &str) -> Dialer {
        let lines = format!("dns: {{upstreams: ['{}']}}\n{more}", self.address);
        Dialer::new(&Operator::new().settings(&lines)).unwrap()
    }
}

/// Builds the response to a DNS query (RFC 1035): the question, and each address of the queried
/// type. Returns it with the queried name.
fn answer(query: &[u8], addresses: &[IpAddr]) -> (String, Vec<u8>) {
    let (mut name, mut at) = (String::new(), 12);
    while query[at] != 0 {
        let end = at + 1 + usize::from(query[at]);
        name.push_str(std::str::from_utf8(&query[at + 1..end]).unwrap());
        name.push('.');
        at = end;
    }
    let kind = u16::from_be_bytes([query[at + 1], query[at + 2]]);
    let question = &query[12..at + 5];
    let records: Vec<Vec<u8>> = addresses
        .iter()
        .filter_map(|ip| match (kind, ip) {
            (1, IpAddr::V4(ip)) => Some(ip.octets().to_vec()),
            (28, IpAddr::V6(ip)) => Some(ip.octets().to_vec()),
            _ => None,
        })
        .collect();
    let mut answer = query[..2].to_vec();
    answer.extend([
        0x81,
        0x80,
        0,
        1,
        0,
        u8::try_from(records.len()).unwrap(),
        0,
        0,
        0,
        0,
    ]);
    answer.extend(question);
    for record in records {
        answer.extend([0xc0, 12]);
        answer.extend(kind.to_be_bytes());
        answer.extend([0, 1, 0, 0, 0, 60, 0, u8::try_from(record.len()).unwrap()]);
        answer.extend(record);
    }
    (name.to_lowercase(), answer)
}

fn assert_refused(error: &DialError, class: &str) {
    assert_eq!(error.reason(), Reason::AddressClass, "{error:?}");
    assert!(!error.counts_as_failure());
    assert!(error.evidence().contains(class), "{}", error.evidence());
}

#[tokio::test]
async fn name_with_a_private_address_is_refused() {
    for private in [
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.0.1",
        "169.254.169.254",
        "169.254.0.9",
        "100.64.0.1",
        "0.0.0.0",
        "198.18.0.1",
        "224.0.0.1",
        "240.0.0.1",
        "::1",
        "::",
        "fd00::1",
        "fe80::1",
        "ff02::1",
        "::ffff:10.0.0.1",
        "64:ff9b::a00:1",
        "2002:a00:1::",
    ] {
        // One address that may be dialled and another that may not, in either order.
        for addresses in [["192.0.2.1", private], [private, "2001:db8::1"]] {
            let names = FixedDnsServer::with_addresses(&addresses);
            let dialer = names.dialer("");
            let error = fetch(&dialer, "s", &http("rebind.example"), "/")
                .await
                .unwrap_err();
            let class = policy::host::classify(private.parse().unwrap()).as_str();
            assert_refused(&error, class);
            let shown: IpAddr = private.parse().unwrap();
            assert!(
                error.evidence().contains(&shown.to_string()),
                "{}",
                error.evidence()
            );
            assert_eq!(
                error.to_string(),
                "rebind.example resolves to an address that is never dialled",
            );
            let error = dialer
                .connect(&sandbox("one"), &host("rebind.example"), 443)
                .await
                .unwrap_err();
            assert_refused(&error, class);
            let error = dialer
                .open(&sandbox("one"), &https("rebind.example"))
                .await
                .err()
                .unwrap();
            assert_refused(&error, class);
        }
    }
}

#[tokio::test]
async fn private_address_literal_is_refused_without_a_dns_query() {
    let names = FixedDnsServer::with_addresses(&["192.0.2.1"]);
    let dialer = names.dialer("");
    for (literal, class) in [
        ("127.0.0.1", "loopback"),
        ("0x7f.1", "loopback"),
        ("169.254.169.254", "cloud metadata"),
        ("[::1]", "loopback"),
        ("[::ffff:192.168.0.1]", "private"),
        ("[fd00::1]", "unique local"),
    ] {
        let error = fetch(&dialer, "s", &http(literal), "/").await.unwrap_err();
        assert_refused(&error, class);
    }
    assert_eq!(names.queries(), Vec::<String>::new());
}

#[tokio::test]
async fn fixed_address_is_dialled_without_a_dns_query() {
    let names = FixedDnsServer::with_addresses(&["192.0.2.1"]);
    let origin = OriginServer::http(|_| OriginReply::text("fine"));
    let dialer = names.dialer(&format!(
        "resolve: {{fixed.example: '{}'}}",
        origin.address()
    ));
    assert_eq!(
        fetch(&dialer, "s", &http("fixed.example"), "/")
            .await
            .unwrap(),
        "fine"
    );
    let (_stream, peer) = dialer
        .connect(&sandbox("one"), &host("fixed.example"), 443)
        .await
        .unwrap();
    assert_eq!(peer, origin.address());
    assert_eq!(names.queries(), Vec::<String>::new());
}

#[tokio::test]
async fn private_address_exception_covers_one_host_and_range() {
    let names = FixedDnsServer::with_addresses(&["127.0.0.1"]);
    let origin = OriginServer::http(|_| OriginReply::text("fine"));
    let dialer = names.dialer("allow_private: [{host: in.example, cidr: 127.0.0.0/30}]");
    let route = |name| Route {
        port: origin.address().port(),
        ..http(name)
    };
    assert_eq!(
        fetch(&dialer, "s", &route("in.example"), "/")
            .await
            .unwrap(),
        "fine"
    );
    for other in ["out.example", "below.in.example", "127.0.0.1"] {
        let error = fetch(&dialer, "s", &route(other), "/").await.unwrap_err();
        assert_refused(&error, "loopback");
    }
    let wide = FixedDnsServer::with_addresses(&["127.0.0.1", "127.0.0.9"]);
    let dialer = wide.dialer("allow_private: [{host: in.example, cidr: 127.0.0.0/30}]");
    let error = fetch(&dialer, "s", &route("in.example"), "/")
        .await
        .unwrap_err();
    assert_refused(&error, "127.0.0.9");
}

#[tokio::test]
async fn reload_without_the_exception_closes_idle_connections() {
    let names = FixedDnsServer::with_addresses(&["127.0.0.1"]);
    let origin = OriginServer::http(|_| OriginReply::text("fine"));
    let operator = Operator::new();
    let without_exception = format!("dns: {{upstreams: ['{}']}}", names.address);
    let with_exception =
        format!("{without_exception}\nallow_private: [{{host: in.example, cidr: 127.0.0.1}}]");
    let dialer = Dialer::new(&operator.settings(&with_exception)).unwrap();
    let route = Route {
        port: origin.address().port(),
        ..http("in.example")
    };
    fetch(&dialer, "s", &route, "/").await.unwrap();
    assert_eq!(dialer.idle(), 1);
    dialer
        .reload(&operator.settings(&without_exception))
        .unwrap();
    assert_eq!(dialer.idle(), 0);
    assert_refused(
        &fetch(&dialer, "s", &route, "/").await.unwrap_err(),
        "loopback",
    );
}

#[tokio::test]
async fn gates_own_listeners_are_refused_despite_an_exception() {
    let names = FixedDnsServer::with_addresses(&["127.0.0.1"]);
    let own = OriginServer::http(|_| OriginReply::text("mine"));
    let port = own.address().port();
    let lines = format!(
        "allow_private: [{{host: in.example, cidr: 127.0.0.1}}, {{host: 0.0.0.0, cidr: 0.0.0.0}}]\n\
         resolve: {{fixed.example: '{}'}}",
        own.address()
    );
    for listener in [own.address(), SocketAddr::new([0, 0, 0, 0].into(), port)] {
        let dialer = names.dialer(&lines);
        let route = |name| Route { port, ..http(name) };
        assert_eq!(
            fetch(&dialer, "s", &route("in.example"), "/")
                .await
                .unwrap(),
            "mine"
        );
        dialer.set_own_addresses([listener]);
        for name in ["in.example", "fixed.example", "0.0.0.0"] {
            let error = fetch(&dialer, "s", &route(name), "/").await.unwrap_err();
            assert_refused(&error, "the gate's own address");
        }
    }
}

#[tokio::test]
async fn dns_query_has_the_decided_name() {
    let names = FixedDnsServer::with_addresses(&[]);
    let dialer = names.dialer("");
    let error = fetch(&dialer, "s", &http("nowhere.example"), "/")
        .await
        .unwrap_err();
    assert!(matches!(error, DialError::NoSuchName { .. }), "{error:?}");
    assert_eq!(error.reason(), Reason::ConnectFailed);
    let mut queried = names.queries();
    queried.sort();
    queried.dedup();
    assert_eq!(queried, ["nowhere.example."]);
}

#[tokio::test]
async fn silent_resolver_times_out_without_showing_its_address() {
    let silent = UdpSocket::bind("127.0.0.1:0").unwrap();
    let lines = format!(
        "dns: {{upstreams: ['{}']}}\ntimeouts: {{connect: 150ms}}",
        silent.local_addr().unwrap()
    );
    let dialer = Dialer::new(&Operator::new().settings(&lines)).unwrap();
    let error = fetch(&dialer, "s", &http("slow.example"), "/")
        .await
        .unwrap_err();
    assert!(matches!(error, DialError::TimedOut { .. }), "{error:?}");
    assert!(!error.to_string().contains("127.0.0.1"), "{error}");
}

/// A dialer that uses `resolver`, with one allowed name and one denied wildcard.
fn dialer_using(resolver: &Resolver) -> Dialer {
    let lines = format!(
        "dns: {{upstreams: ['{}']}}\n\
         domains: [cdn.example, {{host: '*.denied.example', deny: [{{}}]}}]\n",
        resolver.address()
    );
    Dialer::new(&Operator::new().settings(&lines)).unwrap()
}

#[tokio::test]
async fn alias_of_a_denied_name_is_refused() {
    let resolver = Resolver::start();
    let private_record = |name: &str| record(name, RecordData::A([10, 0, 0, 1].into()));
    let alias = |from: &str, to: &str| record(from, RecordData::Cname(to.to_owned()));
    resolver.set_reply(
        "cdn.example",
        1,
        Answer::Records(vec![
            alias("cdn.example", "edge.elsewhere.example"),
            private_record("edge.elsewhere.example"),
        ]),
    );
    let dialer = dialer_using(&resolver);
    let dial = async || {
        let (sandbox_id, name) = (sandbox("one"), host("cdn.example"));
        dialer.connect(&sandbox_id, &name, 443).await.unwrap_err()
    };
    // The dialer follows the alias and checks the address behind the alias.
    assert_refused(&dial().await, "private");

    resolver.set_reply(
        "cdn.example",
        1,
        Answer::Records(vec![
            alias("cdn.example", "a.elsewhere.example"),
            alias("a.elsewhere.example", "x.denied.example"),
            record("x.denied.example", RecordData::A([203, 0, 113, 7].into())),
        ]),
    );
    dialer.forget(&sandbox("one"));
    let error = dial().await;
    assert_eq!(error.reason(), Reason::HostDenied, "{error:?}");
    assert!(!error.counts_as_failure());
    assert!(error.evidence().contains("allowlist:*.denied.example"));
    assert!(!error.to_string().contains("denied.example"), "{error}");
}

#[tokio::test]
async fn resolver_cache_is_not_shared_between_sandboxes() {
    let resolver = Resolver::start();
    let private_record = record("cdn.example", RecordData::A([10, 0, 0, 1].into()));
    resolver.set_reply("cdn.example", 1, Answer::Records(vec![private_record]));
    let dialer = dialer_using(&resolver);
    let sends_query = async |sandbox_name: &str| {
        let before = resolver.queries().len();
        let (sandbox_id, name) = (sandbox(sandbox_name), host("cdn.example"));
        let error = dialer.connect(&sandbox_id, &name, 443).await.unwrap_err();
        assert_refused(&error, "private");
        resolver.queries().len() > before
    };
    assert!(sends_query("one").await);
    assert!(!sends_query("one").await, "the answer is cached");
    assert!(
        sends_query("two").await,
        "the cache belongs to the first sandbox"
    );
    dialer.forget(&sandbox("one"));
    assert!(sends_query("one").await, "the cache was cleared");
    assert!(!sends_query("two").await);
}

#[tokio::test]
async fn system_resolvers_are_read_again_on_reload() {
    let operator = Operator::new();
    let lines = "dns: {upstreams: [system], resolv_conf: resolv.conf}";
    let file = operator.directory.path().join("resolv.conf");
    let servers = || egress::resolvers::read(&operator.settings(lines).egress.dns);
    assert!(servers().unwrap_err().contains("resolv.conf"));
    std::fs::write(&file, "search a.example\nnameserver 192.0.2.1\n").unwrap();
    assert_eq!(servers().unwrap(), ["192.0.2.1:53".parse().unwrap()]);
    std::fs::write(&file, "nameserver 192.0.2.2\nnameserver 2001:db8::1\n").unwrap();
    let two_servers = ["192.0.2.2:53", "[2001:db8::1]:53"].map(|server| server.parse().unwrap());
    assert_eq!(servers().unwrap(), two_servers);
    std::fs::write(&file, "# nothing\n").unwrap();
    assert!(servers().is_err());
}
