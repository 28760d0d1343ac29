//! DNS queries for names that need approval: the query fails at once, and a question is raised.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use egress::dns::{QueryClient, QueryContext, Transport};
use hickory_proto::op::{Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::{Name, RData, RecordType};
use policy::audit::AuditEvent;
use policy::reason::Reason;
use policy::verdict::{Grant, VerdictKind};
use testkit::resolver::{DnsReply, RecordData, Resolver, record};
use tokio::time::timeout;

use super::fixture::{Gate, Rules};
use crate::fakes::sandbox_id;

const ADDRESS: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 7);

/// Queries the IPv4 addresses of a name and waits for the answer at most `limit`.
async fn resolve(
    gate: &Gate,
    name: &str,
    limit: Duration,
) -> (ResponseCode, Vec<IpAddr>, Option<AuditEvent>) {
    let mut message = Message::new(7, MessageType::Query, OpCode::Query);
    let name = Name::from_ascii(name).unwrap();
    message.add_query(Query::query(name, RecordType::A));
    let query = message.to_vec().unwrap();
    let context = QueryContext {
        transport: Transport::Udp,
        mode: config::section::egress::DnsMode::Forward,
        gate: None,
    };
    let client = QueryClient::Known(sandbox_id());
    let answering = gate
        .services
        .name_server()
        .answer(&client, &query, &context);
    let answered = timeout(limit, answering).await;
    let answered = answered.expect("an answer in time").unwrap();
    let message = Message::from_vec(&answered.bytes).unwrap();
    let addresses = message.answers.iter().map(|record| match &record.data {
        RData::A(address) => IpAddr::from(address.0),
        other => panic!("unrequested record {other:?}"),
    });
    let code = message.metadata.response_code;
    (code, addresses.collect(), answered.event)
}

#[tokio::test]
async fn unknown_name_raises_a_question_and_fails_at_once() {
    let resolver = Resolver::start();
    let reply = DnsReply::Records(vec![record("named.example", RecordData::A(ADDRESS))]);
    resolver.set_reply("named.example", 1, reply);
    let gate = Gate::new(&Rules {
        egress: format!(
            "  dns: {{mode: forward, upstreams: ['{}']}}\n",
            resolver.address()
        ),
        ..Rules::default()
    });
    // With a timeout of zero the answer must be ready at the first poll.
    let (code, addresses, event) = resolve(&gate, "named.example.", Duration::ZERO).await;
    assert_eq!((code, addresses), (ResponseCode::ServFail, vec![]));
    let event = event.unwrap();
    assert_eq!(event.verdict, Some(VerdictKind::Deny));
    assert_eq!(event.reason, Some(Reason::AskTimeout));
    assert_eq!(event.rule.unwrap().as_str(), "egress.unknown");
    assert_eq!(resolver.queries(), []);
    let raised = gate.operator.raised();
    let [question] = raised.as_slice() else {
        panic!("{raised:?}");
    };
    assert_eq!(question.grants, Grant::Host);
    assert_eq!(gate.operator.waiting(), 0);

    let now = gate.services.clock().tick();
    let grants = &gate.sandbox.grants;
    grants.add(question.digest, now + Duration::from_secs(3600), now);
    let (code, addresses, event) = resolve(&gate, "named.example.", testkit::wait::LIMIT).await;
    assert_eq!(
        (code, addresses),
        (ResponseCode::NoError, vec![ADDRESS.into()])
    );
    assert_eq!(event.unwrap().verdict, Some(VerdictKind::Allow));
    // A grant applies to one name and one sandbox.
    let (code, ..) = resolve(&gate, "unnamed.example.", Duration::ZERO).await;
    assert_eq!(code, ResponseCode::ServFail);
    assert_eq!(gate.operator.raised().len(), 2);
}
