//! Names in DNS queries in the forward mode.

use testkit::wait;

use crate::client::{DnsClient, NAME_ERROR, NO_ERROR, REFUSED};
use crate::network::{MAX_DATA_LIKE_NAMES, Network, data_like_names};

/// Sends a query that must be answered with one address.
#[track_caller]
fn assert_allowed(network: &Network, client: &mut DnsClient, name: &str) {
    network.audit.mark();
    assert_eq!(client.query(name), (NO_ERROR, 1), "{name}");
    network
        .audit
        .wait_for_allowed(&[("kind", "dns"), ("host", name)]);
}

/// Sends a query that must be answered with this response code and recorded as denied.
#[track_caller]
fn assert_denied(
    network: &Network,
    client: &mut DnsClient,
    name: &str,
    (code, reason, rule): (u8, &str, &str),
) {
    network.audit.mark();
    assert_eq!(client.query(name), (code, 0), "{name}");
    let fields = [("kind", "dns"), ("host", name)];
    network.audit.wait_for_denied(reason, rule, &fields);
}

pub(crate) fn identity(network: &Network) {
    let mut client = network.dns_client();
    let name = "open.example";
    assert_allowed(network, &mut client, name);
    network.unregister();
    let denial = (REFUSED, "identity_unknown", "identity");
    assert_denied(network, &mut client, name, denial);
}

/// Needs a fixture whose clients may send one query a second, with a burst of two. Queries beyond
/// the rate are only dropped and counted; a record of each would let an agent fill the disk.
pub(crate) fn rate(network: &Network) {
    const SENT: u64 = 40;
    let client = network.dns_client();
    client.send("open.example");
    assert_eq!(client.receive().unwrap(), (NO_ERROR, 1));
    let before = count_dropped(network);
    (0..SENT).for_each(|_| client.send("open.example"));
    wait::until("queries to be dropped", || {
        (count_dropped(network) > before + SENT / 2).then_some(())
    });
}

/// The number of dropped queries.
fn count_dropped(network: &Network) -> u64 {
    let metrics = network.traffic_fixture.metrics();
    let mut lines = metrics.lines();
    let found = lines
        .find(|line| line.starts_with("proxy_dns_queries_total{") && line.contains("\"dropped\""));
    let value = found.and_then(|line| line.rsplit_once(' '));
    value.map_or(0, |(_, value)| value.parse().unwrap())
}

pub(crate) fn labels(network: &Network) {
    let mut client = network.dns_client();
    for (at, name) in data_like_names("wild.example").enumerate() {
        if at < MAX_DATA_LIKE_NAMES {
            assert_allowed(network, &mut client, &name);
        } else {
            let denial = (NAME_ERROR, "rate_limited", "dns:labels");
            assert_denied(network, &mut client, &name, denial);
        }
    }
}

pub(crate) fn allowlist(network: &Network) {
    let mut client = network.dns_client();
    assert_allowed(network, &mut client, "open.example");
    let denial = (NAME_ERROR, "host_denied", "allowlist");
    assert_denied(network, &mut client, "unlisted.example", denial);
}

pub(crate) fn address(network: &Network) {
    let mut client = network.dns_client();
    assert_allowed(network, &mut client, "public.example");
    let denial = (NO_ERROR, "address_class", "dns:address");
    assert_denied(network, &mut client, "private.example", denial);
}
