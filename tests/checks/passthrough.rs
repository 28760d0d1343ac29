//! TLS passthrough connections: in a tunnel, or at a transparent listener.

use crate::client::get_unread_on;
use crate::network::{MAX_DATA_LIKE_NAMES, Network, data_like_names};

pub(crate) fn identity(network: &Network) {
    let client = network.client();
    let host = "pinned.example";
    network.assert_allowed_unread(host, || client.get_unread(host));
    let stream = client.connect(host);
    network.unregister();
    let denial = ("identity_unknown", "identity");
    network.assert_denied_unread(host, denial, || get_unread_on(stream, host));
}

pub(crate) fn rate(network: &Network) {
    let client = network.client();
    let host = "limited-pinned.example";
    network.assert_allowed_unread(host, || client.get_unread(host));
    let denial = ("rate_limited", "rate_limits");
    network.assert_denied_unread(host, denial, || client.get_unread(host));
}

pub(crate) fn breaker(network: &Network) {
    let client = network.client();
    let host = "broken-pinned.example";
    network.assert_allowed_unread(host, || client.get_unread(host));
    for _ in 0..2 {
        assert!(client.get_unread("broken-pinned.example:8443").is_none());
    }
    let denial = ("circuit_open", "circuit_breakers");
    network.assert_denied_unread(host, denial, || client.get_unread(host));
}

pub(crate) fn labels(network: &Network) {
    let client = network.client();
    for (at, host) in data_like_names("unread.example").enumerate() {
        let send = || client.get_unread(&network.with_origin_port(&host));
        if at < MAX_DATA_LIKE_NAMES {
            network.assert_allowed_unread(&host, send);
        } else {
            network.assert_denied_unread(&host, ("rate_limited", "dns:labels"), send);
        }
    }
}

pub(crate) fn allowlist(network: &Network) {
    let client = network.client();
    let host = "pinned.example";
    network.assert_allowed_unread(host, || client.get_unread(host));
    let host = "unlisted-pinned.example";
    let denial = ("host_denied", "allowlist");
    network.assert_denied_unread(host, denial, || client.get_unread(host));
}

pub(crate) fn bundles(network: &Network) {
    let client = network.client();
    let host = "pinned.example";
    network.assert_allowed_unread(host, || client.get_unread(host));
    let host = "blocked-pinned.example";
    let denial = ("rego_denied", "rego:authz");
    network.assert_denied_unread(host, denial, || client.get_unread(host));
}

pub(crate) fn address(network: &Network) {
    let client = network.client();
    let host = "public-pinned.example";
    network.assert_allowed_unread(host, || client.get_unread(&network.with_origin_port(host)));
    let host = "private-pinned.example";
    let denial = ("address_class", "dialer");
    network.assert_denied_unread(host, denial, || {
        client.get_unread(&network.with_origin_port(host))
    });
}
