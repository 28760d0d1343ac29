//! A name in a DNS query that is forwarded.

use testkit::wait;

use crate::client::{NO_ERROR, NO_NAME, NameClient, REFUSED};
use crate::network::{MAX_DATA_LIKE_NAMES, Network, data_like_names};

/// A query that must be answered with one address.
#[track_caller]
fn allows(network: &Network, client: &mut NameClient, name: &str) {
    network.audit.mark();
    assert_eq!(client.query(name), (NO_ERROR, 1), "{name}");
    network.audit.allowed(&[("kind", "dns"), ("host", name)]);
}

/// A query that must be refused with this code.
#[track_caller]
fn denies(
    network: &Network,
    client: &mut NameClient,
    name: &str,
    (code, reason, rule): (u8, &str, &str),
) {
    network.audit.mark();
    assert_eq!(client.query(name), (code, 0), "{name}");
    let fields = [("kind", "dns"), ("host", name)];
    network.audit.denied(reason, rule, &fields);
}

pub(crate) fn identity(network: &Network) {
    let mut client = network.name_client();
    let name = "open.example";
    allows(network, &mut client, name);
    network.unregister();
    let denial = (REFUSED, "identity_unknown", "identity");
    denies(network, &mut client, name, denial);
}

/// For a fixture whose clients may send one query a second, and two at once. What is beyond is
/// dropped and counted: a record of each would let an agent fill the disk.
pub(crate) fn rate(network: &Network) {
    const SENT: u64 = 40;
    let client = network.name_client();
    client.send("open.example");
    assert_eq!(client.receive().unwrap(), (NO_ERROR, 1));
    let before = dropped(network);
    (0..SENT).for_each(|_| client.send("open.example"));
    wait::until("queries to be dropped", || {
        (dropped(network) > before + SENT / 2).then_some(())
    });
}

/// How many queries were dropped.
fn dropped(network: &Network) -> u64 {
    let metrics = network.traffic_fixture.metrics();
    let mut lines = metrics.lines();
    let found = lines
        .find(|line| line.starts_with("proxy_dns_queries_total{") && line.contains("\"dropped\""));
    let value = found.and_then(|line| line.rsplit_once(' '));
    value.map_or(0, |(_, value)| value.parse().unwrap())
}

pub(crate) fn labels(network: &Network) {
    let mut client = network.name_client();
    for (at, name) in data_like_names("wild.example").enumerate() {
        if at < MAX_DATA_LIKE_NAMES {
            allows(network, &mut client, &name);
        } else {
            let denial = (NO_NAME, "rate_limited", "dns:labels");
            denies(network, &mut client, &name, denial);
        }
    }
}

pub(crate) fn allowlist(network: &Network) {
    let mut client = network.name_client();
    allows(network, &mut client, "open.example");
    let denial = (NO_NAME, "host_denied", "allowlist");
    denies(network, &mut client, "unlisted.example", denial);
}

pub(crate) fn address(network: &Network) {
    let mut client = network.name_client();
    allows(network, &mut client, "public.example");
    let denial = (NO_ERROR, "address_class", "dns:address");
    denies(network, &mut client, "private.example", denial);
}
