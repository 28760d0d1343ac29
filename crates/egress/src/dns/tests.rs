use std::net::Ipv4Addr;

use hickory_proto::op::{Message, MessageType};
use hickory_proto::rr::RecordType;
use hickory_proto::rr::rdata::A;
use proptest::prelude::*;

use super::*;

const UDP: QueryContext = QueryContext {
    transport: Transport::Udp,
    mode: DnsMode::Synthetic,
    gate: None,
};

const TCP: QueryContext = QueryContext {
    transport: Transport::Tcp,
    ..UDP
};

fn server() -> NameServer {
    server_with(Settings::default())
}

fn server_with(settings: Settings) -> NameServer {
    let snapshot = PolicySnapshot::without_bundles(Arc::new(settings));
    let policy = NamePolicy::from(Arc::new(snapshot));
    NameServer::new(
        Box::new(move |_| policy.clone()),
        Questions::default(),
        DnsLimits::default(),
        DnsMetrics::default(),
    )
}

fn client(sandbox: &str) -> QueryClient {
    QueryClient::Known(SandboxId::parse(sandbox).unwrap())
}

/// Builds a query: header, question, and an OPT record if `size` is given.
fn query(name: &str, kind: u16, size: Option<u16>) -> Vec<u8> {
    let mut bytes = b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0".to_vec();
    bytes[11] = u8::from(size.is_some());
    for label in name.split('.').filter(|label| !label.is_empty()) {
        bytes.push(u8::try_from(label.len()).unwrap());
        bytes.extend(label.as_bytes());
    }
    bytes.push(0);
    bytes.extend(kind.to_be_bytes());
    bytes.extend([0, 1]);
    if let Some(size) = size {
        bytes.extend([0, 0, 41]);
        bytes.extend(size.to_be_bytes());
        bytes.extend([0, 0, 0, 0, 0, 0]);
    }
    bytes
}

/// Answers a query. The answer must be ready at once, because these tests have no upstream.
fn answer_without_waiting(
    server: &NameServer,
    client: &QueryClient,
    query: &[u8],
    context: &QueryContext,
) -> Option<DnsResponse> {
    let mut answer = std::pin::pin!(server.answer(client, query, context));
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    match answer.as_mut().poll(&mut context) {
        std::task::Poll::Ready(answered) => answered,
        std::task::Poll::Pending => panic!("the answer is pending"),
    }
}

fn look_up(server: &NameServer, name: &str, kind: u16) -> (Message, Option<AuditEvent>) {
    let answered =
        answer_without_waiting(server, &client("one"), &query(name, kind, None), &UDP).unwrap();
    let message = Message::from_vec(&answered.bytes).unwrap();
    assert_eq!(message.metadata.id, 0x1234);
    assert_eq!(message.metadata.message_type, MessageType::Response);
    (message, answered.event)
}

fn address(message: &Message) -> IpAddr {
    match message.answers.as_slice() {
        [one] => match &one.data {
            RData::A(a) => a.0.into(),
            RData::AAAA(aaaa) => aaaa.0.into(),
            other => panic!("{other:?}"),
        },
        other => panic!("{other:?}"),
    }
}

#[test]
fn valid_name_gets_synthetic_address_that_maps_back() {
    let server = server();
    let one = SandboxId::parse("one").unwrap();
    for name in [
        "example.com",
        "_x.a.test",
        "xn--bcher-kva.example",
        "single",
    ] {
        for kind in [1, 28] {
            let (message, event) = look_up(&server, name, kind);
            let ip = address(&message);
            assert_eq!(ip.is_ipv4(), kind == 1);
            assert_eq!(server.synthetic_name(&one, ip), Host::parse(name).ok());
            assert_eq!(message.answers[0].ttl, 5);
            assert_eq!(event, None, "synthetic answers have no record");
            assert_eq!(
                address(&look_up(&server, name, kind).0),
                ip,
                "the address is stable"
            );
        }
    }
    let (message, _) = look_up(&server, "example.com", 1);
    let two = SandboxId::parse("two").unwrap();
    assert_eq!(server.synthetic_name(&two, address(&message)), None);
    server.forget(&one);
    assert_eq!(server.synthetic_name(&one, address(&message)), None);
}

#[test]
fn answer_repeats_question_in_original_case() {
    let server = server();
    let bytes_sent = query("wWw.ExAmPlE.cOm", 1, None);
    let answered = answer_without_waiting(&server, &client("one"), &bytes_sent, &UDP).unwrap();
    assert_eq!(answered.bytes[12..bytes_sent.len()], bytes_sent[12..]);
    let upper = Message::from_vec(&answered.bytes).unwrap();
    let (lower, _) = look_up(&server, "www.example.com", 1);
    assert_eq!(address(&upper), address(&lower));
}

#[test]
fn gate_and_localhost_have_fixed_addresses() {
    let server = server();
    let one = SandboxId::parse("one").unwrap();
    let (four, _) = look_up(&server, "Palisade.Internal", 1);
    assert_eq!(address(&four).to_string(), "198.18.0.1");
    assert_eq!(
        server.synthetic_name(&one, address(&four)),
        Host::parse(GATE_HOST).ok()
    );
    let (six, _) = look_up(&server, "palisade.internal", 28);
    assert_eq!(address(&six).to_string(), "2001:2::1");
    for name in ["localhost", "app.localhost"] {
        assert!(address(&look_up(&server, name, 1).0).is_loopback());
        assert!(address(&look_up(&server, name, 28).0).is_loopback());
    }
    let shared = QueryContext {
        mode: DnsMode::Forward,
        gate: Some("192.0.2.7".parse().unwrap()),
        ..UDP
    };
    let answered =
        answer_without_waiting(&server, &client("one"), &query(GATE_HOST, 1, None), &shared)
            .unwrap();
    let message = Message::from_vec(&answered.bytes).unwrap();
    assert_eq!(address(&message).to_string(), "192.0.2.7");
}

#[test]
fn ptr_query_resolves_assigned_addresses_and_refuses_others() {
    let server = server();
    let (message, _) = look_up(&server, "example.com", 1);
    let four = Name::from(address(&message)).to_ascii();
    let (message, _) = look_up(&server, "example.com", 28);
    let six = Name::from(address(&message)).to_ascii();
    for (reverse, name) in [
        (four.as_str(), "example.com."),
        (&six, "example.com."),
        ("1.0.18.198.in-addr.arpa", "palisade.internal."),
    ] {
        let (message, event) = look_up(&server, reverse, 12);
        match &message.answers[0].data {
            RData::PTR(ptr) => assert_eq!(ptr.0.to_ascii(), name),
            other => panic!("{other:?}"),
        }
        assert_eq!(event, None);
    }
    let (message, _) = look_up(&server, "9.9.18.198.in-addr.arpa", 12);
    assert_eq!(message.metadata.response_code, ResponseCode::NXDomain);
    for foreign in [
        "1.2.0.192.in-addr.arpa",
        "18.198.in-addr.arpa",
        "001.0.18.198.in-addr.arpa",
        "1.1.0.18.198.in-addr.arpa",
        "b.d.0.1.0.0.2.ip6.arpa",
        "example.com",
    ] {
        let (message, event) = look_up(&server, foreign, 12);
        assert_eq!(
            message.metadata.response_code,
            ResponseCode::Refused,
            "{foreign}"
        );
        assert_eq!(event.unwrap().reason, Some(Reason::DnsType));
    }
}

#[test]
fn https_records_are_empty_and_other_types_refused() {
    let server = server();
    for kind in [64, 65] {
        let (message, event) = look_up(&server, "example.com", kind);
        assert_eq!(message.metadata.response_code, ResponseCode::NoError);
        assert_eq!((message.answers.len(), message.authorities.len()), (0, 1));
        assert_eq!(event, None);
    }
    // MX, TXT, SRV, NS, SOA, CNAME, ANY, AXFR, OPT, none, unassigned.
    for kind in [15, 16, 33, 2, 6, 5, 255, 252, 41, 0, 65_280] {
        let (message, event) = look_up(&server, "example.com", kind);
        assert_eq!(
            message.metadata.response_code,
            ResponseCode::Refused,
            "{kind}"
        );
        let event = event.unwrap();
        assert_eq!(event.verdict, Some(VerdictKind::Deny));
        assert_eq!(event.reason, Some(Reason::DnsType));
        assert_eq!(event.host.as_deref(), Some("example.com"));
    }
    let (_, event) = look_up(&server, "example.com", 65_280);
    assert_eq!(event.unwrap().method.as_deref(), Some("TYPE65280"));
    let refused = QueryOutcome::Refused;
    assert_eq!(server.metrics.count_of(refused, Some(RecordType::TXT)), 1);
    let other = server.metrics.count_of(refused, Some(RecordType::AXFR));
    assert_eq!(
        other, 5,
        "types without their own label share the label 'other'"
    );
}

#[test]
fn listed_type_is_empty_in_synthetic_mode_and_any_refused() {
    let mut settings = Settings::default();
    settings.egress.dns.extra_types = ["TXT", "ANY", "AXFR", "TYPE99"].map(String::from).to_vec();
    let server = server_with(settings);
    for (kind, code) in [
        (16, ResponseCode::NoError),
        (99, ResponseCode::NoError),
        (255, ResponseCode::Refused),
        (252, ResponseCode::Refused),
    ] {
        let (message, _) = look_up(&server, "example.com", kind);
        assert_eq!(message.metadata.response_code, code, "{kind}");
        assert!(message.answers.is_empty());
    }
}

#[test]
fn unknown_client_is_refused_for_any_query() {
    let server = server();
    let denial = Denial::new(Reason::IdentityExpired, "identity");
    let unknown = QueryClient::Unknown(denial);
    let good = query("example.com", 1, None);
    for bytes in [good.clone(), good[..20].to_vec()] {
        let answered = answer_without_waiting(&server, &unknown, &bytes, &UDP).unwrap();
        let message = Message::from_vec(&answered.bytes).unwrap();
        assert_eq!(message.metadata.response_code, ResponseCode::Refused);
        let event = answered.event.unwrap();
        assert_eq!(event.reason, Some(Reason::IdentityExpired));
        assert_eq!(event.sandbox, None);
    }
}

#[test]
fn invalid_host_names_are_refused() {
    let server = server();
    for (name, code, reason) in [
        ("a b.test", ResponseCode::Refused, Reason::BadName),
        ("-a.test", ResponseCode::Refused, Reason::BadName),
        ("a\0.test", ResponseCode::Refused, Reason::BadName),
        ("bücher.test", ResponseCode::Refused, Reason::BadName),
        ("xn--a.test", ResponseCode::Refused, Reason::BadName),
        ("", ResponseCode::Refused, Reason::BadName),
        ("127.0.0.1", ResponseCode::NXDomain, Reason::IpLiteral),
        ("0x7f.1", ResponseCode::NXDomain, Reason::IpLiteral),
        ("a.b.1.2.3.4", ResponseCode::Refused, Reason::BadName),
    ] {
        let (message, event) = look_up(&server, name, 1);
        assert_eq!(message.metadata.response_code, code, "{name:?}");
        let event = event.unwrap();
        assert_eq!(event.reason, Some(reason), "{name:?}");
        let host = event.host.unwrap();
        assert!(host.bytes().all(|b| b.is_ascii_graphic()), "{host:?}");
    }
    // One label that contains a dot must not be read as two.
    let mut dotted = query("evil-allowed.test", 1, None);
    dotted[12 + 5] = b'.';
    let answered = answer_without_waiting(&server, &client("one"), &dotted, &UDP).unwrap();
    assert_eq!(answered.event.unwrap().reason, Some(Reason::BadName));
}

#[test]
fn malformed_query_gets_header_only_answer_or_none() {
    let server = server();
    let one = client("one");
    let good = query("example.com", 1, Some(1232));
    let with = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[at] = byte;
        bytes
    };
    assert_eq!(answer_without_waiting(&server, &one, b"", &UDP), None);
    assert_eq!(
        answer_without_waiting(&server, &one, &good[..11], &UDP),
        None
    );
    assert_eq!(
        answer_without_waiting(&server, &one, &with(2, 0x81), &UDP),
        None,
        "an answer"
    );

    let mut pointer_loop = good[..12].to_vec();
    pointer_loop.extend([0xc0, 12, 0, 1, 0, 1]);
    pointer_loop[11] = 0;
    let mut two_opts = good.clone();
    two_opts[11] = 2;
    two_opts.extend(good[good.len() - 11..].to_vec());
    for (bytes, code) in [
        (with(2, 0x28), ResponseCode::NotImp), // UPDATE
        (with(2, 0x10), ResponseCode::NotImp), // STATUS
        (with(5, 0), ResponseCode::FormErr),   // no question
        (with(5, 2), ResponseCode::FormErr),   // two questions
        (with(4, 255), ResponseCode::FormErr), // thousands of questions
        (with(7, 1), ResponseCode::FormErr),   // an answer record
        (with(9, 1), ResponseCode::FormErr),   // an authority record
        (with(11, 9), ResponseCode::FormErr),  // fewer records than announced
        (with(12, 0xc0), ResponseCode::FormErr),
        (with(12, 0x40), ResponseCode::FormErr),
        (pointer_loop, ResponseCode::FormErr),
        (two_opts, ResponseCode::FormErr),
        (good[..20].to_vec(), ResponseCode::FormErr),
        (good[..12].to_vec(), ResponseCode::FormErr),
    ] {
        let answered = answer_without_waiting(&server, &one, &bytes, &UDP).unwrap();
        assert_eq!(answered.bytes.len(), 12, "{bytes:02x?}");
        assert_eq!(answered.bytes[..2], [0x12, 0x34]);
        assert_eq!(answered.bytes[2] & 0xf8, 0x80 | (bytes[2] & 0x78));
        assert_eq!(answered.bytes[3] & 0xf, code.low(), "{bytes:02x?}");
        assert_eq!(answered.event.unwrap().reason, Some(Reason::Framing));
    }
    let version_one = with(good.len() - 5, 1);
    let answered = answer_without_waiting(&server, &one, &version_one, &UDP).unwrap();
    let message = Message::from_vec(&answered.bytes).unwrap();
    // The library has two names for response code 16 (BADVERS and BADSIG).
    assert_eq!(u16::from(message.metadata.response_code), 16);
    assert_eq!(message.edns.unwrap().version(), 0);
    // Class CHAOS, as in `version.bind`.
    let chaos = with(good.len() - 12, 3);
    let answered = answer_without_waiting(&server, &one, &chaos, &UDP).unwrap();
    let message = Message::from_vec(&answered.bytes).unwrap();
    assert_eq!(message.metadata.response_code, ResponseCode::Refused);
}

#[test]
fn refusal_reason_is_sent_to_edns_clients_only() {
    let server = server();
    let bytes_sent = query("example.com", 255, Some(4096));
    let answered = answer_without_waiting(&server, &client("one"), &bytes_sent, &UDP).unwrap();
    let text = String::from_utf8_lossy(&answered.bytes);
    assert!(text.contains("dns_type"), "{text:?}");
    let message = Message::from_vec(&answered.bytes).unwrap();
    assert_eq!(message.edns.unwrap().max_payload(), 1232);
    let plain = answer_without_waiting(
        &server,
        &client("one"),
        &query("example.com", 255, None),
        &UDP,
    )
    .unwrap();
    assert_eq!(Message::from_vec(&plain.bytes).unwrap().edns, None);
}

#[test]
fn answer_is_truncated_over_udp_and_complete_over_tcp() {
    let many = || {
        let records = (0..200).map(|n| RData::A(A(Ipv4Addr::new(192, 0, 2, n))));
        Reply::with(records.collect(), 60)
    };
    for (size, transport, max_size, complete) in [
        (None, Transport::Udp, 512, false),
        (Some(0), Transport::Udp, 512, false),
        (Some(65_535), Transport::Udp, 1232, false),
        (None, Transport::Tcp, 65_535, true),
    ] {
        let parsed = message::parse(&query("example.com", 1, size))
            .unwrap()
            .unwrap();
        let bytes = parsed.write(&many(), transport);
        assert!(bytes.len() <= max_size, "{}", bytes.len());
        let message = Message::from_vec(&bytes).unwrap();
        assert_eq!(message.metadata.truncation, !complete, "{size:?}");
        assert_eq!(message.answers.len(), if complete { 200 } else { 0 });
        assert_eq!(message.queries.len(), 1);
    }
    let records = (0..28).map(|n| RData::A(A(Ipv4Addr::new(192, 0, 2, n))));
    let fits = Reply::with(records.collect(), 60);
    let parsed = message::parse(&query("example.com", 1, None))
        .unwrap()
        .unwrap();
    let bytes = parsed.write(&fits, Transport::Udp);
    let message = Message::from_vec(&bytes).unwrap();
    assert_eq!(
        (message.metadata.truncation, message.answers.len()),
        (false, 28)
    );
    assert!(
        bytes.len() > 470,
        "the answer is close to the limit: {}",
        bytes.len()
    );
}

#[test]
fn denied_name_is_nxdomain_for_every_type_in_forward_mode() {
    let server = server();
    let context = QueryContext {
        mode: DnsMode::Forward,
        ..UDP
    };
    for kind in [1, 28, 65] {
        let bytes_sent = query("secret.evil.test", kind, None);
        let answered =
            answer_without_waiting(&server, &client("one"), &bytes_sent, &context).unwrap();
        let message = Message::from_vec(&answered.bytes).unwrap();
        assert_eq!(message.metadata.response_code, ResponseCode::NXDomain);
        assert_eq!(message.authorities.len(), 1);
        let event = answered.event.unwrap();
        assert_eq!(event.kind, Kind::Dns);
        assert_eq!(event.verdict, Some(VerdictKind::Deny));
        assert_eq!(event.reason, Some(Reason::HostDenied));
        assert_eq!(event.host.as_deref(), Some("secret.evil.test"));
        assert_eq!(event.sandbox, SandboxId::parse("one").ok());
    }
}

#[test]
fn reverse_name_is_parsed_only_when_complete() {
    for ip in ["192.0.2.1", "2001:db8::1", "::", "255.255.255.255"] {
        let ip: IpAddr = ip.parse().unwrap();
        assert_eq!(address_of_reverse_name(&Name::from(ip)), Some(ip));
    }
    for text in [
        "in-addr.arpa",
        "1.2.3.in-addr.arpa",
        "1.2.3.256.in-addr.arpa",
        "ip6.arpa",
    ] {
        assert_eq!(
            address_of_reverse_name(&wire_name(text).unwrap()),
            None,
            "{text}"
        );
    }
}

/// A valid query with a few changed bytes.
fn mutated_query() -> impl Strategy<Value = Vec<u8>> {
    let name = proptest::collection::vec("[a-zA-Z0-9_.-]{1,63}", 0..5);
    (
        name,
        any::<u16>(),
        any::<Option<u16>>(),
        any::<Vec<(u16, u8)>>(),
    )
        .prop_map(|(labels, kind, size, changes)| {
            let mut bytes = query(&labels.join("."), kind % 300, size);
            for (at, byte) in changes.into_iter().take(3) {
                let at = usize::from(at) % bytes.len();
                bytes[at] = byte;
            }
            bytes
        })
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic_wait_or_exceed_answer_size(
        bytes in prop_oneof![
            mutated_query(),
            proptest::collection::vec(any::<u8>(), 0..600),
        ],
    ) {
        let server = server();
        for context in [UDP, TCP, QueryContext { mode: DnsMode::Forward, ..UDP }] {
            let answered = answer_without_waiting(&server, &client("one"), &bytes, &context);
            let Some(answered) = answered else {
                prop_assert!(bytes.len() < 12 || bytes[2] & 0x80 != 0);
                continue;
            };
            prop_assert!(answered.bytes.len() <= 1232);
            let has_edns = Message::from_vec(&bytes).is_ok_and(|query| query.edns.is_some());
            if !has_edns && context.transport == Transport::Udp {
                prop_assert!(answered.bytes.len() <= 512);
            }
            prop_assert_eq!(&answered.bytes[..2], &bytes[..2]);
            prop_assert!(answered.bytes[2] & 0x80 != 0, "the answer bit is set");
            prop_assert!(Message::from_vec(&answered.bytes).is_ok());
        }
        fuzz_check(&bytes);
    }
}
