//! A request takes each of its tokens once, however often it is decided.

use egress::rate_limits::HostReading;
use policy::answer::ApprovalAnswer;
use policy::host::HostName;
use testkit::resolver::Resolver;

use super::fixture::{Gate, Rules};
use super::operator::ALLOW;
use crate::fakes::sandbox_id;

/// A rate limit whose tokens are not refilled while a test runs.
const LIMITS: &str = "rate_limits:\n  defaults: {requests_per_second: 0.001, burst_size: 5}\n";

fn rules() -> Rules {
    Rules {
        limits: LIMITS,
        ..Rules::with_asking_bundle("mine")
    }
}

/// Sends a request that needs approval, reloads while it is held, and then answers the second
/// question. Returns the status of the response.
async fn ask_twice(gate: &Gate, rules: &Rules, host: &str, answer: ApprovalAnswer) -> u16 {
    let request_task = gate.spawn_get(host, "/").await;
    let first = gate.operator.next_question().await;
    gate.reload(rules);
    let second = gate.operator.next_question().await;
    first.wait_until_withdrawn().await;
    second.answer(answer);
    request_task.await.unwrap().status
}

#[tokio::test]
async fn request_decided_three_times_takes_one_rate_token() {
    let gate = Gate::new(&rules());
    assert_eq!(
        ask_twice(&gate, &rules(), "known.example", ALLOW).await,
        200
    );
    let settings = &gate.services.policy().load().settings;
    let now = gate.services.clock().tick();
    let readings = gate.sandbox.upstreams.readings(settings, now);
    let HostReading { tokens, .. } = readings["known.example"].hosts.unwrap();
    assert_eq!(tokens, 4);
}

/// A name below the wildcard whose label looks like data: a sandbox may use sixteen such names.
fn data_like_name(number: usize) -> HostName {
    let name = format!("0123456789abcdefghijkl{number:02}.wild.example");
    match policy::host::Host::parse(&name).unwrap() {
        policy::host::Host::Name(name) => name,
        policy::host::Host::Ip(ip) => panic!("{ip} is no name"),
    }
}

#[tokio::test]
async fn request_decided_three_times_takes_one_label_once_allowed() {
    // The name does not exist. The gate notices this after it has taken the label token.
    let resolver = Resolver::start();
    let rules = Rules {
        domains: "'*.wild.example'".to_owned(),
        egress: format!("  dns: {{upstreams: ['{}']}}\n", resolver.address()),
        ..rules()
    };
    let gate = Gate::new(&rules);
    let (refused, allowed) = (data_like_name(0).to_string(), data_like_name(1).to_string());
    assert_eq!(
        ask_twice(&gate, &rules, &refused, ApprovalAnswer::Deny).await,
        403
    );
    assert_eq!(resolver.queries(), []);
    assert_eq!(ask_twice(&gate, &rules, &allowed, ALLOW).await, 502);
    assert!(resolver.queries().iter().all(|query| query.name == allowed));
    let labels = gate.services.name_server().label_budget();
    let is_admitted = |number: &usize| {
        labels
            .admit(&sandbox_id(), &data_like_name(*number))
            .is_ok()
    };
    assert_eq!((2..30).take_while(is_admitted).count(), 15);
}
