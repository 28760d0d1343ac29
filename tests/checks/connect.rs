//! CONNECT requests to the proxy. The client does not trust the gate's certificates and could not
//! read a refusal inside the tunnel, so the gate refuses the CONNECT itself.

use testkit::http::HttpResponse;

use crate::client::open_tunnel;
use crate::network::Network;

/// Sends a CONNECT request and returns the response.
fn send_connect(network: &Network, authority: &str) -> HttpResponse {
    network.audit.mark();
    open_tunnel(&mut network.client().connect_to_gate(443), authority)
}

/// Sends a CONNECT request that must be refused. An opened tunnel itself has no audit record, only
/// the requests inside the tunnel have.
#[track_caller]
fn assert_denied(network: &Network, authority: &str, reason: &str, rule: &str) {
    let answer = send_connect(network, authority);
    assert_eq!(answer.status, 403, "{answer:?}");
    let fields = [("method", "CONNECT"), ("host", authority)];
    network.audit.wait_for_denied(reason, rule, &fields);
}

pub(crate) fn allowlist(network: &Network) {
    assert_eq!(send_connect(network, "open.example:443").status, 200);
    assert_denied(network, "unlisted.example:443", "host_denied", "allowlist");
}

pub(crate) fn identity(network: &Network) {
    assert_eq!(send_connect(network, "open.example:443").status, 200);
    network.unregister();
    assert_denied(network, "open.example:443", "identity_unknown", "identity");
}
