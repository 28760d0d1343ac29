//! Names that a resolver answers for.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use egress::dns::{LabelLimits, Outcome, Transport};
use hickory_proto::op::ResponseCode;
use hickory_proto::rr::RecordType;
use policy::reason::Reason;
use policy::verdict::Word;
use testkit::resolver::{DnsRecord, DnsReply, RecordData, record};

use super::place::{A, AAAA, LONG, Place, TXT, settings};

const PUBLIC: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 7);

fn a(name: &str) -> DnsRecord {
    record(name, RecordData::A(PUBLIC))
}

fn alias(name: &str, to: &str) -> DnsRecord {
    record(name, RecordData::Cname(to.to_owned()))
}

fn short(limits: &mut egress::dns::Limits) {
    limits.deadline = Duration::from_secs(2);
}

#[tokio::test]
async fn an_allowed_name_is_asked_for_in_our_words_and_answered_in_theirs() {
    let place = Place::new();
    place.resolver.set_reply(
        "allowed.test",
        A,
        DnsReply::Records(vec![a("allowed.test")]),
    );
    let heard = place.ask("ALLOWED.tEst", A).await;
    assert_eq!(heard.code, ResponseCode::NoError);
    assert_eq!(heard.addresses, [IpAddr::from(PUBLIC)]);
    assert_eq!(heard.ttl, Some(60));
    let event = heard.event.unwrap();
    assert_eq!(event.verdict, Some(Word::Allow));
    assert_eq!(event.host.as_deref(), Some("allowed.test"));
    assert_eq!(event.method.as_deref(), Some("A"));
    assert_eq!(event.rule.unwrap().as_str(), "allowlist:allowed.test");

    let asked = place.resolver.queries();
    assert_eq!(asked.len(), 1);
    assert_eq!(asked[0].name, "allowed.test", "lower case");
    let text = String::from_utf8_lossy(&asked[0].message).into_owned();
    assert!(!text.contains("tellthem"), "no cookie: {text:?}");
    assert!(
        !asked[0].message.windows(3).any(|w| w == [192, 0, 2]),
        "no subnet"
    );
}

#[tokio::test]
async fn no_query_leaves_for_a_denied_name() {
    let place = Place::new();
    for name in ["evil.test", "secret.allowed.test", "wild.test", "127.0.0.1"] {
        let heard = place.ask(name, A).await;
        assert_eq!(heard.code, ResponseCode::NXDomain, "{name}");
        assert_eq!(heard.event.unwrap().verdict, Some(Word::Deny));
    }
    assert_eq!(place.resolver.queries(), []);
}

#[tokio::test]
async fn hints_for_other_protocols_stay_here_and_listed_types_do_not() {
    let place = Place::new();
    let text = record("allowed.test", RecordData::Txt("v=spf1".to_owned()));
    place
        .resolver
        .set_reply("allowed.test", TXT, DnsReply::Records(vec![text]));
    let heard = place.ask("allowed.test", 65).await;
    assert_eq!((heard.code, heard.event), (ResponseCode::NoError, None));
    assert_eq!(place.resolver.queries(), []);
    assert_eq!(
        place.ask("allowed.test", 15).await.code,
        ResponseCode::Refused
    );
    assert_eq!(place.ask("allowed.test", TXT).await.texts, ["v=spf1"]);
}

#[tokio::test]
async fn aliases_are_flattened_wherever_they_lead() {
    let place = Place::new();
    // Neither of them is on the allowlist: the host's own operator chose them.
    let chain = vec![
        alias("allowed.test", "a.edge.example"),
        alias("a.edge.example", "node.cdn.example"),
    ];
    let whole = [chain.clone(), vec![a("node.cdn.example")]].concat();
    place
        .resolver
        .set_reply("allowed.test", A, DnsReply::Records(whole));
    let heard = place.ask("allowed.test", A).await;
    assert_eq!(heard.addresses, [IpAddr::from(PUBLIC)]);
    let event = heard.event.unwrap();
    assert_eq!(event.rule.unwrap().as_str(), "allowlist:allowed.test");

    // A resolver that leaves the rest to us.
    let six = "2001:db8::7".parse().unwrap();
    place
        .resolver
        .set_reply("allowed.test", AAAA, DnsReply::Records(chain));
    let last = record("node.cdn.example", RecordData::Aaaa(six));
    place
        .resolver
        .set_reply("node.cdn.example", AAAA, DnsReply::Records(vec![last]));
    let heard = place.ask("allowed.test", AAAA).await;
    assert_eq!(heard.addresses, [IpAddr::from(six)]);
    let asked = place.resolver.queries();
    assert_eq!(asked.last().unwrap().name, "node.cdn.example");

    // That a name is behind an alias does not let the agent ask for it.
    let heard = place.ask("node.cdn.example", AAAA).await;
    assert_eq!(heard.code, ResponseCode::NXDomain);
}

#[tokio::test]
async fn an_alias_of_a_name_that_the_operator_denied_does_not_exist_and_nobody_asks_for_it() {
    let place = Place::new();
    let alias_of = |to: &str| vec![alias("allowed.test", to)];
    for (kind, reply) in [
        (
            A,
            [alias_of("evil.wild.test"), vec![a("evil.wild.test")]].concat(),
        ),
        (AAAA, alias_of("evil.wild.test")),
    ] {
        place
            .resolver
            .set_reply("allowed.test", kind, DnsReply::Records(reply));
        let heard = place.ask("allowed.test", kind).await;
        assert_eq!(heard.code, ResponseCode::NXDomain);
        let event = heard.event.unwrap();
        assert_eq!(event.reason, Some(Reason::HostDenied));
        assert_eq!(event.rule.unwrap().as_str(), "allowlist:evil.wild.test");
    }
    let heard = place.ask("evil.wild.test", A).await;
    assert_eq!(heard.code, ResponseCode::NXDomain);
    let asked = place.resolver.queries();
    assert!(
        asked.iter().all(|asked| asked.name == "allowed.test"),
        "{asked:?}"
    );
}

#[tokio::test]
async fn an_address_behind_an_alias_is_judged_like_any_other() {
    let holes = "  allow_private: [{host: edge.example, cidr: 10.1.0.0/16}]\n";
    let place = Place::with(holes, |_| {});
    let inside = record("edge.example", RecordData::A([10, 1, 2, 3].into()));
    let reply = vec![alias("allowed.test", "edge.example"), inside];
    place
        .resolver
        .set_reply("allowed.test", A, DnsReply::Records(reply));
    let heard = place.ask("allowed.test", A).await;
    assert!(heard.addresses.is_empty(), "the hole is another name's");
    assert_eq!(heard.event.unwrap().reason, Some(Reason::AddressClass));
}

#[tokio::test]
async fn aliases_in_a_circle_or_without_end_fail() {
    let place = Place::new();
    let circle = vec![
        alias("allowed.test", "cdn.test"),
        alias("cdn.test", "allowed.test"),
    ];
    place
        .resolver
        .set_reply("allowed.test", A, DnsReply::Records(circle));
    assert_eq!(
        place.ask("allowed.test", A).await.code,
        ResponseCode::ServFail
    );
    for n in 0..20 {
        let (from, to) = (format!("n{n}.wild.test"), format!("n{}.wild.test", n + 1));
        place
            .resolver
            .set_reply(&from, A, DnsReply::Records(vec![alias(&from, &to)]));
    }
    assert_eq!(
        place.ask("n0.wild.test", A).await.code,
        ResponseCode::ServFail
    );
    assert!(place.resolver.queries().len() < 20);
}

#[tokio::test]
async fn records_that_were_not_asked_for_are_left_behind() {
    let place = Place::new();
    let reply = vec![
        a("allowed.test"),
        record("other.test", RecordData::A(Ipv4Addr::new(203, 0, 113, 66))),
        record("allowed.test", RecordData::Txt("psst".to_owned())),
    ];
    place
        .resolver
        .set_reply("allowed.test", A, DnsReply::Records(reply));
    let heard = place.ask("allowed.test", A).await;
    assert_eq!(heard.addresses, [IpAddr::from(PUBLIC)]);
    assert!(heard.texts.is_empty());
}

#[tokio::test]
async fn an_address_that_is_never_dialled_is_not_told() {
    let place = Place::new();
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
        place
            .resolver
            .set_reply(&name, A, DnsReply::Records(vec![a(&name), bad]));
        let heard = place.ask(&name, A).await;
        assert_eq!(heard.code, ResponseCode::NoError);
        assert!(heard.addresses.is_empty(), "{ip}");
        let event = heard.event.unwrap();
        assert_eq!(event.reason, Some(Reason::AddressClass));
        assert_eq!(event.verdict, Some(Word::Deny));
    }
    for (n, ip) in ["::ffff:10.0.0.1", "64:ff9b::a00:1", "fd00::1", "::1"]
        .iter()
        .enumerate()
    {
        let name = format!("six{n}.wild.test");
        let bad = record(&name, RecordData::Aaaa(ip.parse().unwrap()));
        place
            .resolver
            .set_reply(&name, AAAA, DnsReply::Records(vec![bad]));
        let heard = place.ask(&name, AAAA).await;
        assert!(heard.addresses.is_empty(), "{ip}");
        let reason = heard.event.unwrap().reason;
        assert_eq!(reason, Some(Reason::AddressClass), "{ip}");
    }
}

#[tokio::test]
async fn an_exact_hole_lets_a_private_address_through() {
    let holes = "  allow_private: [{host: allowed.test, cidr: 10.1.0.0/16}]\n  \
                 resolve: {cdn.test: '192.168.7.7:8443', 'x.wild.test:8443': '192.168.7.8:1'}\n";
    let place = Place::with(holes, |_| {});
    let private =
        |name: &str, ip: [u8; 4]| DnsReply::Records(vec![record(name, RecordData::A(ip.into()))]);
    place
        .resolver
        .set_reply("allowed.test", A, private("allowed.test", [10, 1, 2, 3]));
    place
        .resolver
        .set_reply("y.wild.test", A, private("y.wild.test", [10, 1, 2, 3]));
    place
        .resolver
        .set_reply("x.wild.test", A, private("x.wild.test", [192, 168, 7, 8]));
    let open: Vec<IpAddr> = vec![[10, 1, 2, 3].into()];
    assert_eq!(place.ask("allowed.test", A).await.addresses, open);
    assert!(place.ask("y.wild.test", A).await.addresses.is_empty());
    let fixed: Vec<IpAddr> = vec![[192, 168, 7, 8].into()];
    assert_eq!(place.ask("x.wild.test", A).await.addresses, fixed);

    let before = place.resolver.queries().len();
    let fixed: Vec<IpAddr> = vec![[192, 168, 7, 7].into()];
    assert_eq!(place.ask("cdn.test", A).await.addresses, fixed);
    assert!(place.ask("cdn.test", AAAA).await.addresses.is_empty());
    assert_eq!(place.resolver.queries().len(), before, "nobody was asked");
}

#[tokio::test]
async fn an_answer_is_remembered_for_a_while_and_judged_each_time() {
    let place = Place::new();
    let long = DnsRecord {
        ttl: 86_400,
        ..a("allowed.test")
    };
    place
        .resolver
        .set_reply("allowed.test", A, DnsReply::Records(vec![long]));
    assert_eq!(
        place.ask("allowed.test", A).await.ttl,
        Some(300),
        "no longer than that"
    );
    let again = place.ask("allowed.test", A).await;
    assert!(again.ttl.is_some_and(|ttl| (1..=300).contains(&ttl)));
    assert_eq!(again.event.unwrap().verdict, Some(Word::Allow));
    assert_eq!(place.resolver.queries().len(), 1);
    let kind = Some(RecordType::A);
    assert_eq!(place.metrics.count_of(Outcome::Forwarded, kind), 1);
    assert_eq!(place.metrics.count_of(Outcome::Cached, kind), 1);

    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(301)).await;
    tokio::time::resume();
    place.ask("allowed.test", A).await;
    assert_eq!(place.resolver.queries().len(), 2);

    place.reload(config::Settings::default());
    assert_eq!(
        place.ask("allowed.test", A).await.code,
        ResponseCode::NXDomain
    );
}

#[tokio::test]
async fn no_sandbox_is_answered_from_what_another_asked() {
    let place = Place::with("", |limits| limits.cached = 2);
    let two = policy::id::SandboxId::parse("two").unwrap();
    for name in ["allowed.test", "cdn.test", "n.wild.test"] {
        place
            .resolver
            .set_reply(name, A, DnsReply::Records(vec![a(name)]));
    }
    place.ask("allowed.test", A).await;
    place.ask_as(&two, Transport::Udp, "allowed.test", A).await;
    assert_eq!(place.resolver.queries().len(), 2, "each asked for itself");
    let kind = Some(RecordType::A);
    assert_eq!(place.metrics.count_of(Outcome::Cached, kind), 0);

    // What one remembers takes no room from the other.
    for name in ["cdn.test", "n.wild.test"] {
        place.ask_as(&two, Transport::Udp, name, A).await;
    }
    let before = place.resolver.queries().len();
    place.ask("allowed.test", A).await;
    assert_eq!(place.resolver.queries().len(), before, "remembered");
    place.ask_as(&two, Transport::Udp, "allowed.test", A).await;
    assert_eq!(place.resolver.queries().len(), before + 1, "made room");

    // One that is gone takes along what it was told.
    place.names.prune(|sandbox| *sandbox == two);
    place.ask_as(&two, Transport::Udp, "allowed.test", A).await;
    place.ask("allowed.test", A).await;
    assert_eq!(place.resolver.queries().len(), before + 2);
}

#[tokio::test]
async fn nothing_is_remembered_briefly() {
    let place = Place::new();
    place
        .resolver
        .set_reply("allowed.test", A, DnsReply::Nothing);
    assert_eq!(
        place.ask("allowed.test", A).await.code,
        ResponseCode::NoError
    );
    assert_eq!(place.ask("cdn.test", A).await.code, ResponseCode::NXDomain);
    assert_eq!(place.ask("cdn.test", A).await.code, ResponseCode::NXDomain);
    assert_eq!(place.resolver.queries().len(), 2);
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(31)).await;
    tokio::time::resume();
    place.ask("cdn.test", A).await;
    assert_eq!(place.resolver.queries().len(), 3);
}

#[tokio::test]
async fn an_answer_that_was_cut_on_the_way_is_fetched_whole() {
    let place = Place::new();
    let many = (0..60).map(|n| record("allowed.test", RecordData::A([203, 0, 113, n].into())));
    place
        .resolver
        .set_reply("allowed.test", A, DnsReply::Cut(many.collect()));
    let heard = place.ask_over(Transport::Tcp, "allowed.test", A).await;
    assert_eq!((heard.cut, heard.addresses.len()), (false, 60));
    let over: Vec<bool> = place
        .resolver
        .queries()
        .iter()
        .map(|asked| asked.tcp)
        .collect();
    assert_eq!(over, [false, true]);
}

#[tokio::test]
async fn a_silent_resolver_costs_no_more_than_the_deadline() {
    let place = Place::with("", short);
    place
        .resolver
        .set_reply("allowed.test", A, DnsReply::Silence);
    let heard = tokio::time::timeout(LONG, place.ask("allowed.test", A))
        .await
        .unwrap();
    assert_eq!(heard.code, ResponseCode::ServFail);
    let event = heard.event.unwrap();
    assert_eq!(event.reason, Some(Reason::UpstreamTimeout));
    assert!(event.ms.get("dns").unwrap() < 5_000.0, "{:?}", event.ms);

    // It is not held against the name.
    place.resolver.set_reply(
        "allowed.test",
        A,
        DnsReply::Records(vec![a("allowed.test")]),
    );
    assert_eq!(
        place.ask("allowed.test", A).await.addresses,
        [IpAddr::from(PUBLIC)]
    );
}

#[tokio::test]
async fn a_resolver_that_fails_is_gone_or_talks_nonsense_is_a_failure() {
    let place = Place::with("", short);
    for reply in [DnsReply::Failure, DnsReply::Garbage] {
        place.resolver.set_reply("allowed.test", A, reply.clone());
        let heard = place.ask("allowed.test", A).await;
        assert_eq!(heard.code, ResponseCode::ServFail, "{reply:?}");
    }
    let gone = testkit::port::Port::take();
    place.reload(settings(gone.address(), ""));
    let heard = place.ask("allowed.test", A).await;
    assert_eq!(heard.code, ResponseCode::ServFail);
    assert_eq!(
        place.metrics.count_of(Outcome::Failed, Some(RecordType::A)),
        3
    );
}

#[tokio::test]
async fn names_that_carry_data_out_run_dry() {
    let place = Place::with("", |limits| {
        limits.labels = LabelLimits {
            names: 5,
            ..LabelLimits::default()
        };
    });
    for n in 0..8 {
        let heard = place.ask(&format!("chunk{n}.wild.test"), A).await;
        let reason = heard.event.unwrap().reason;
        let expected = (n >= 5).then_some(Reason::RateLimited);
        assert_eq!(
            (heard.code, reason),
            (ResponseCode::NXDomain, expected),
            "{n}"
        );
    }
    assert_eq!(place.resolver.queries().len(), 5);
}

#[tokio::test]
async fn new_settings_ask_the_new_resolver() {
    let place = Place::new();
    let other = testkit::resolver::Resolver::start();
    place.reload(settings(other.address(), ""));
    place.ask("allowed.test", A).await;
    assert_eq!(
        (place.resolver.queries().len(), other.queries().len()),
        (0, 1)
    );
}

#[tokio::test]
async fn one_dead_resolver_of_two_is_not_noticed() {
    let place = Place::new();
    known_by(&place);
    let dead = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let mut settings = settings(place.resolver.address(), "");
    let dead = config::leaf::DnsUpstream::Server(dead.local_addr().unwrap());
    settings.egress.dns.upstreams.insert(0, dead);
    place.reload(settings);
    assert_eq!(
        place.ask("allowed.test", A).await.addresses,
        [IpAddr::from(PUBLIC)]
    );
}

fn known_by(place: &Place) {
    let reply = DnsReply::Records(vec![a("allowed.test")]);
    place.resolver.set_reply("allowed.test", A, reply);
}
