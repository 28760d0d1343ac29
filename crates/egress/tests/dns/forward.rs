//! Queries that the gate forwards to its upstream resolver.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use egress::dns::{LabelLimits, QueryOutcome, Transport};
use hickory_proto::op::ResponseCode;
use hickory_proto::rr::RecordType;
use policy::reason::Reason;
use policy::verdict::VerdictKind;
use testkit::resolver::{DnsRecord, DnsReply, RecordData, record};

use super::fixture::{A, AAAA, DnsFixture, TIMEOUT, TXT, settings};

const PUBLIC: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 7);

fn a_record(name: &str) -> DnsRecord {
    record(name, RecordData::A(PUBLIC))
}

fn cname_record(name: &str, to: &str) -> DnsRecord {
    record(name, RecordData::Cname(to.to_owned()))
}

fn with_short_deadline(limits: &mut egress::dns::DnsLimits) {
    limits.deadline = Duration::from_secs(2);
}

#[tokio::test]
async fn allowed_name_is_forwarded_without_client_options() {
    let fixture = DnsFixture::new();
    fixture.resolver.set_reply(
        "allowed.test",
        A,
        DnsReply::Records(vec![a_record("allowed.test")]),
    );
    let answer = fixture.resolve("ALLOWED.tEst", A).await;
    assert_eq!(answer.code, ResponseCode::NoError);
    assert_eq!(answer.addresses, [IpAddr::from(PUBLIC)]);
    assert_eq!(answer.ttl, Some(60));
    let event = answer.event.unwrap();
    assert_eq!(event.verdict, Some(VerdictKind::Allow));
    assert_eq!(event.host.as_deref(), Some("allowed.test"));
    assert_eq!(event.method.as_deref(), Some("A"));
    assert_eq!(event.rule.unwrap().as_str(), "allowlist:allowed.test");

    let queries = fixture.resolver.queries();
    assert_eq!(queries.len(), 1);
    assert_eq!(queries[0].name, "allowed.test", "lower case");
    let text = String::from_utf8_lossy(&queries[0].message).into_owned();
    assert!(!text.contains("tellthem"), "no cookie: {text:?}");
    assert!(
        !queries[0].message.windows(3).any(|w| w == [192, 0, 2]),
        "no subnet"
    );
}

#[tokio::test]
async fn denied_name_is_not_forwarded() {
    let fixture = DnsFixture::new();
    for name in ["evil.test", "secret.allowed.test", "wild.test", "127.0.0.1"] {
        let answer = fixture.resolve(name, A).await;
        assert_eq!(answer.code, ResponseCode::NXDomain, "{name}");
        assert_eq!(answer.event.unwrap().verdict, Some(VerdictKind::Deny));
    }
    assert_eq!(fixture.resolver.queries(), []);
}

#[tokio::test]
async fn https_queries_are_answered_locally_and_listed_types_forwarded() {
    let fixture = DnsFixture::new();
    let text = record("allowed.test", RecordData::Txt("v=spf1".to_owned()));
    fixture
        .resolver
        .set_reply("allowed.test", TXT, DnsReply::Records(vec![text]));
    let answer = fixture.resolve("allowed.test", 65).await;
    assert_eq!((answer.code, answer.event), (ResponseCode::NoError, None));
    assert_eq!(fixture.resolver.queries(), []);
    assert_eq!(
        fixture.resolve("allowed.test", 15).await.code,
        ResponseCode::Refused
    );
    assert_eq!(fixture.resolve("allowed.test", TXT).await.texts, ["v=spf1"]);
}

#[tokio::test]
async fn aliases_are_flattened_in_the_response() {
    let fixture = DnsFixture::new();
    // The alias targets are not on the allowlist; the owner of the allowed host chose them.
    let chain = vec![
        cname_record("allowed.test", "a.edge.example"),
        cname_record("a.edge.example", "node.cdn.example"),
    ];
    let whole = [chain.clone(), vec![a_record("node.cdn.example")]].concat();
    fixture
        .resolver
        .set_reply("allowed.test", A, DnsReply::Records(whole));
    let answer = fixture.resolve("allowed.test", A).await;
    assert_eq!(answer.addresses, [IpAddr::from(PUBLIC)]);
    let event = answer.event.unwrap();
    assert_eq!(event.rule.unwrap().as_str(), "allowlist:allowed.test");

    // The resolver returns only the aliases, so the gate itself queries the last one.
    let six = "2001:db8::7".parse().unwrap();
    fixture
        .resolver
        .set_reply("allowed.test", AAAA, DnsReply::Records(chain));
    let last = record("node.cdn.example", RecordData::Aaaa(six));
    fixture
        .resolver
        .set_reply("node.cdn.example", AAAA, DnsReply::Records(vec![last]));
    let answer = fixture.resolve("allowed.test", AAAA).await;
    assert_eq!(answer.addresses, [IpAddr::from(six)]);
    let queries = fixture.resolver.queries();
    assert_eq!(queries.last().unwrap().name, "node.cdn.example");

    // An alias target that is not on the allowlist may not be queried directly.
    let answer = fixture.resolve("node.cdn.example", AAAA).await;
    assert_eq!(answer.code, ResponseCode::NXDomain);
}

#[tokio::test]
async fn alias_of_a_denied_name_is_nxdomain() {
    let fixture = DnsFixture::new();
    let alias_of = |to: &str| vec![cname_record("allowed.test", to)];
    for (kind, reply) in [
        (
            A,
            [alias_of("evil.wild.test"), vec![a_record("evil.wild.test")]].concat(),
        ),
        (AAAA, alias_of("evil.wild.test")),
    ] {
        fixture
            .resolver
            .set_reply("allowed.test", kind, DnsReply::Records(reply));
        let answer = fixture.resolve("allowed.test", kind).await;
        assert_eq!(answer.code, ResponseCode::NXDomain);
        let event = answer.event.unwrap();
        assert_eq!(event.reason, Some(Reason::HostDenied));
        assert_eq!(event.rule.unwrap().as_str(), "allowlist:evil.wild.test");
    }
    let answer = fixture.resolve("evil.wild.test", A).await;
    assert_eq!(answer.code, ResponseCode::NXDomain);
    let queries = fixture.resolver.queries();
    assert!(
        queries.iter().all(|query| query.name == "allowed.test"),
        "{queries:?}"
    );
}

#[tokio::test]
async fn private_address_behind_an_alias_is_removed() {
    let exceptions = "  allow_private: [{host: edge.example, cidr: 10.1.0.0/16}]\n";
    let fixture = DnsFixture::with(exceptions, |_| {});
    let private_record = record("edge.example", RecordData::A([10, 1, 2, 3].into()));
    let reply = vec![cname_record("allowed.test", "edge.example"), private_record];
    fixture
        .resolver
        .set_reply("allowed.test", A, DnsReply::Records(reply));
    let answer = fixture.resolve("allowed.test", A).await;
    assert!(
        answer.addresses.is_empty(),
        "the exception belongs to another name"
    );
    assert_eq!(answer.event.unwrap().reason, Some(Reason::AddressClass));
}

#[tokio::test]
async fn alias_loops_and_long_alias_chains_fail() {
    let fixture = DnsFixture::new();
    let circle = vec![
        cname_record("allowed.test", "cdn.test"),
        cname_record("cdn.test", "allowed.test"),
    ];
    fixture
        .resolver
        .set_reply("allowed.test", A, DnsReply::Records(circle));
    assert_eq!(
        fixture.resolve("allowed.test", A).await.code,
        ResponseCode::ServFail
    );
    for n in 0..20 {
        let (from, to) = (format!("n{n}.wild.test"), format!("n{}.wild.test", n + 1));
        fixture
            .resolver
            .set_reply(&from, A, DnsReply::Records(vec![cname_record(&from, &to)]));
    }
    assert_eq!(
        fixture.resolve("n0.wild.test", A).await.code,
        ResponseCode::ServFail
    );
    assert!(fixture.resolver.queries().len() < 20);
}

#[tokio::test]
async fn unrequested_records_are_removed() {
    let fixture = DnsFixture::new();
    let reply = vec![
        a_record("allowed.test"),
        record("other.test", RecordData::A(Ipv4Addr::new(203, 0, 113, 66))),
        record("allowed.test", RecordData::Txt("psst".to_owned())),
    ];
    fixture
        .resolver
        .set_reply("allowed.test", A, DnsReply::Records(reply));
    let answer = fixture.resolve("allowed.test", A).await;
    assert_eq!(answer.addresses, [IpAddr::from(PUBLIC)]);
    assert!(answer.texts.is_empty());
}

#[tokio::test]
async fn private_addresses_are_removed_from_responses() {
    let fixture = DnsFixture::new();
    for (n, ip) in [
        "10.0.0.1",
        "127.0.0.1",
        "169.254.169.254",
        "100.64.0.1",
        "198.18.0.1",
    ]
    .iter()
    .enumerate()
    {
        let name = format!("n{n}.wild.test");
        let bad = record(&name, RecordData::A(ip.parse().unwrap()));
        fixture
            .resolver
            .set_reply(&name, A, DnsReply::Records(vec![a_record(&name), bad]));
        let answer = fixture.resolve(&name, A).await;
        assert_eq!(answer.code, ResponseCode::NoError);
        assert!(answer.addresses.is_empty(), "{ip}");
        let event = answer.event.unwrap();
        assert_eq!(event.reason, Some(Reason::AddressClass));
        assert_eq!(event.verdict, Some(VerdictKind::Deny));
    }
    for (n, ip) in ["::ffff:10.0.0.1", "64:ff9b::a00:1", "fd00::1", "::1"]
        .iter()
        .enumerate()
    {
        let name = format!("six{n}.wild.test");
        let bad = record(&name, RecordData::Aaaa(ip.parse().unwrap()));
        fixture
            .resolver
            .set_reply(&name, AAAA, DnsReply::Records(vec![bad]));
        let answer = fixture.resolve(&name, AAAA).await;
        assert!(answer.addresses.is_empty(), "{ip}");
        let reason = answer.event.unwrap().reason;
        assert_eq!(reason, Some(Reason::AddressClass), "{ip}");
    }
}

#[tokio::test]
async fn private_address_exception_allows_its_exact_host() {
    let exceptions = "  allow_private: [{host: allowed.test, cidr: 10.1.0.0/16}]\n  \
                 resolve: {cdn.test: '192.168.7.7:8443', 'x.wild.test:8443': '192.168.7.8:1'}\n";
    let fixture = DnsFixture::with(exceptions, |_| {});
    let private =
        |name: &str, ip: [u8; 4]| DnsReply::Records(vec![record(name, RecordData::A(ip.into()))]);
    fixture
        .resolver
        .set_reply("allowed.test", A, private("allowed.test", [10, 1, 2, 3]));
    fixture
        .resolver
        .set_reply("y.wild.test", A, private("y.wild.test", [10, 1, 2, 3]));
    fixture
        .resolver
        .set_reply("x.wild.test", A, private("x.wild.test", [192, 168, 7, 8]));
    let excepted: Vec<IpAddr> = vec![[10, 1, 2, 3].into()];
    assert_eq!(fixture.resolve("allowed.test", A).await.addresses, excepted);
    assert!(fixture.resolve("y.wild.test", A).await.addresses.is_empty());
    let fixed: Vec<IpAddr> = vec![[192, 168, 7, 8].into()];
    assert_eq!(fixture.resolve("x.wild.test", A).await.addresses, fixed);

    let before = fixture.resolver.queries().len();
    let fixed: Vec<IpAddr> = vec![[192, 168, 7, 7].into()];
    assert_eq!(fixture.resolve("cdn.test", A).await.addresses, fixed);
    assert!(fixture.resolve("cdn.test", AAAA).await.addresses.is_empty());
    assert_eq!(
        fixture.resolver.queries().len(),
        before,
        "no query was forwarded"
    );
}

#[tokio::test]
async fn cached_answer_is_decided_on_every_use() {
    let fixture = DnsFixture::new();
    let long = DnsRecord {
        ttl: 86_400,
        ..a_record("allowed.test")
    };
    fixture
        .resolver
        .set_reply("allowed.test", A, DnsReply::Records(vec![long]));
    assert_eq!(
        fixture.resolve("allowed.test", A).await.ttl,
        Some(300),
        "the TTL is limited"
    );
    let again = fixture.resolve("allowed.test", A).await;
    assert!(again.ttl.is_some_and(|ttl| (1..=300).contains(&ttl)));
    assert_eq!(again.event.unwrap().verdict, Some(VerdictKind::Allow));
    assert_eq!(fixture.resolver.queries().len(), 1);
    let kind = Some(RecordType::A);
    assert_eq!(fixture.metrics.count_of(QueryOutcome::Forwarded, kind), 1);
    assert_eq!(fixture.metrics.count_of(QueryOutcome::Cached, kind), 1);

    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(301)).await;
    tokio::time::resume();
    fixture.resolve("allowed.test", A).await;
    assert_eq!(fixture.resolver.queries().len(), 2);

    fixture.reload(config::Settings::default());
    assert_eq!(
        fixture.resolve("allowed.test", A).await.code,
        ResponseCode::NXDomain
    );
}

#[tokio::test]
async fn dns_cache_is_not_shared_between_sandboxes() {
    let fixture = DnsFixture::with("", |limits| limits.cached = 2);
    let two = policy::id::SandboxId::parse("two").unwrap();
    for name in ["allowed.test", "cdn.test", "n.wild.test"] {
        fixture
            .resolver
            .set_reply(name, A, DnsReply::Records(vec![a_record(name)]));
    }
    fixture.resolve("allowed.test", A).await;
    fixture
        .resolve_as(&two, Transport::Udp, "allowed.test", A)
        .await;
    assert_eq!(
        fixture.resolver.queries().len(),
        2,
        "each sandbox sent its own query"
    );
    let kind = Some(RecordType::A);
    assert_eq!(fixture.metrics.count_of(QueryOutcome::Cached, kind), 0);

    // Entries of one sandbox do not evict entries of another sandbox.
    for name in ["cdn.test", "n.wild.test"] {
        fixture.resolve_as(&two, Transport::Udp, name, A).await;
    }
    let before = fixture.resolver.queries().len();
    fixture.resolve("allowed.test", A).await;
    assert_eq!(
        fixture.resolver.queries().len(),
        before,
        "the answer is cached"
    );
    fixture
        .resolve_as(&two, Transport::Udp, "allowed.test", A)
        .await;
    assert_eq!(
        fixture.resolver.queries().len(),
        before + 1,
        "the oldest entry was evicted"
    );

    // The cache of a removed sandbox is dropped.
    fixture.name_server.prune(|sandbox| *sandbox == two);
    fixture
        .resolve_as(&two, Transport::Udp, "allowed.test", A)
        .await;
    fixture.resolve("allowed.test", A).await;
    assert_eq!(fixture.resolver.queries().len(), before + 2);
}

#[tokio::test]
async fn negative_answers_are_cached_briefly() {
    let fixture = DnsFixture::new();
    fixture
        .resolver
        .set_reply("allowed.test", A, DnsReply::Nothing);
    assert_eq!(
        fixture.resolve("allowed.test", A).await.code,
        ResponseCode::NoError
    );
    assert_eq!(
        fixture.resolve("cdn.test", A).await.code,
        ResponseCode::NXDomain
    );
    assert_eq!(
        fixture.resolve("cdn.test", A).await.code,
        ResponseCode::NXDomain
    );
    assert_eq!(fixture.resolver.queries().len(), 2);
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(31)).await;
    tokio::time::resume();
    fixture.resolve("cdn.test", A).await;
    assert_eq!(fixture.resolver.queries().len(), 3);
}

#[tokio::test]
async fn truncated_answer_is_retried_over_tcp() {
    let fixture = DnsFixture::new();
    let many = (0..60).map(|n| record("allowed.test", RecordData::A([203, 0, 113, n].into())));
    fixture
        .resolver
        .set_reply("allowed.test", A, DnsReply::Cut(many.collect()));
    let answer = fixture
        .resolve_over(Transport::Tcp, "allowed.test", A)
        .await;
    assert_eq!((answer.truncated, answer.addresses.len()), (false, 60));
    let used_tcp: Vec<bool> = fixture
        .resolver
        .queries()
        .iter()
        .map(|query| query.tcp)
        .collect();
    assert_eq!(used_tcp, [false, true]);
}

#[tokio::test]
async fn silent_resolver_fails_at_the_deadline() {
    let fixture = DnsFixture::with("", with_short_deadline);
    fixture
        .resolver
        .set_reply("allowed.test", A, DnsReply::Silence);
    let answer = tokio::time::timeout(TIMEOUT, fixture.resolve("allowed.test", A))
        .await
        .unwrap();
    assert_eq!(answer.code, ResponseCode::ServFail);
    let event = answer.event.unwrap();
    assert_eq!(event.reason, Some(Reason::UpstreamTimeout));
    assert!(event.ms.get("dns").unwrap() < 5_000.0, "{:?}", event.ms);

    // The failure is not cached.
    fixture.resolver.set_reply(
        "allowed.test",
        A,
        DnsReply::Records(vec![a_record("allowed.test")]),
    );
    assert_eq!(
        fixture.resolve("allowed.test", A).await.addresses,
        [IpAddr::from(PUBLIC)]
    );
}

#[tokio::test]
async fn failing_absent_or_malformed_resolver_is_servfail() {
    let fixture = DnsFixture::with("", with_short_deadline);
    for reply in [DnsReply::Failure, DnsReply::Garbage] {
        fixture.resolver.set_reply("allowed.test", A, reply.clone());
        let answer = fixture.resolve("allowed.test", A).await;
        assert_eq!(answer.code, ResponseCode::ServFail, "{reply:?}");
    }
    let gone = testkit::port::Port::take();
    fixture.reload(settings(gone.address(), ""));
    let answer = fixture.resolve("allowed.test", A).await;
    assert_eq!(answer.code, ResponseCode::ServFail);
    assert_eq!(
        fixture
            .metrics
            .count_of(QueryOutcome::Failed, Some(RecordType::A)),
        3
    );
}

#[tokio::test]
async fn names_below_a_wildcard_are_limited() {
    let fixture = DnsFixture::with("", |limits| {
        limits.label_budget = LabelLimits {
            names: 5,
            ..LabelLimits::default()
        };
    });
    for n in 0..8 {
        let answer = fixture.resolve(&format!("chunk{n}.wild.test"), A).await;
        let reason = answer.event.unwrap().reason;
        let expected = (n >= 5).then_some(Reason::RateLimited);
        assert_eq!(
            (answer.code, reason),
            (ResponseCode::NXDomain, expected),
            "{n}"
        );
    }
    assert_eq!(fixture.resolver.queries().len(), 5);
}

#[tokio::test]
async fn reload_switches_to_the_new_resolver() {
    let fixture = DnsFixture::new();
    let other = testkit::resolver::Resolver::start();
    fixture.reload(settings(other.address(), ""));
    fixture.resolve("allowed.test", A).await;
    assert_eq!(
        (fixture.resolver.queries().len(), other.queries().len()),
        (0, 1)
    );
}

#[tokio::test]
async fn second_resolver_answers_when_the_first_is_dead() {
    let fixture = DnsFixture::new();
    add_allowed_name(&fixture);
    let dead = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let mut settings = settings(fixture.resolver.address(), "");
    let dead = config::leaf::DnsUpstream::Server(dead.local_addr().unwrap());
    settings.egress.dns.upstreams.insert(0, dead);
    fixture.reload(settings);
    assert_eq!(
        fixture.resolve("allowed.test", A).await.addresses,
        [IpAddr::from(PUBLIC)]
    );
}

fn add_allowed_name(fixture: &DnsFixture) {
    let reply = DnsReply::Records(vec![a_record("allowed.test")]);
    fixture.resolver.set_reply("allowed.test", A, reply);
}
