//! A tunnel that a client asks the proxy for. The client of the fixture does not trust the gate's
//! certificates, and could not read a refusal inside the tunnel.

use testkit::http::HttpResponse;

use crate::client::open_tunnel;
use crate::network::Network;

/// Asks for a tunnel.
fn open(network: &Network, authority: &str) -> HttpResponse {
    network.audit.mark();
    open_tunnel(&mut network.client().connect_to_gate(443), authority)
}

/// Asks for a tunnel, which must be refused. One that is opened has no record: what passes
/// through it has.
#[track_caller]
fn denies(network: &Network, authority: &str, reason: &str, rule: &str) {
    let answer = open(network, authority);
    assert_eq!(answer.status, 403, "{answer:?}");
    let fields = [("method", "CONNECT"), ("host", authority)];
    network.audit.denied(reason, rule, &fields);
}

pub(crate) fn allowlist(network: &Network) {
    assert_eq!(open(network, "open.example:443").status, 200);
    denies(network, "unlisted.example:443", "host_denied", "allowlist");
}

pub(crate) fn identity(network: &Network) {
    assert_eq!(open(network, "open.example:443").status, 200);
    network.unregister();
    denies(network, "open.example:443", "identity_unknown", "identity");
}
