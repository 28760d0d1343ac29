//! Requests of a client: through the proxy, in a tunnel, or at a transparent listener.

use crate::network::{MAX_DATA_LIKE_NAMES, Network, assert_has_request_id, data_like_names};

pub(crate) fn identity(network: &Network) {
    let client = network.client();
    let mut connection = client.open("open.example");
    network.assert_allowed("open.example", || connection.get("/", ""));
    network.unregister();
    network.audit.mark();
    let answer = connection.get("/", "");
    assert_eq!(answer.status, 403, "{}", answer.text());
    // The gate identifies the client before it reads the destination, so the record has no host.
    let fields = [("method", "GET")];
    let record = network
        .audit
        .wait_for_denied("identity_unknown", "identity", &fields);
    assert_has_request_id(&answer, &record);
}

pub(crate) fn rate(network: &Network) {
    let client = network.client();
    let host = "limited.example";
    network.assert_allowed(host, || client.get(host, "/"));
    let denial = (429, "rate_limited", "rate_limits");
    network.assert_denied(host, denial, || client.get(host, "/"));
}

pub(crate) fn breaker(network: &Network) {
    let client = network.client();
    let host = "broken.example";
    network.assert_allowed(host, || client.get(host, "/"));
    for _ in 0..2 {
        assert_eq!(client.get(host, "/fail").status, 502);
    }
    let denial = (503, "circuit_open", "circuit_breakers");
    network.assert_denied(host, denial, || client.get(host, "/"));
}

pub(crate) fn labels(network: &Network) {
    let client = network.client();
    for (at, host) in data_like_names("wild.example").enumerate() {
        let send = || client.get(&network.with_origin_port(&host), "/");
        if at < MAX_DATA_LIKE_NAMES {
            network.assert_allowed(&host, send);
        } else {
            network.assert_denied(&host, (429, "rate_limited", "dns:labels"), send);
        }
    }
}

pub(crate) fn allowlist(network: &Network) {
    let client = network.client();
    let host = "paths.example";
    network.assert_allowed(host, || client.get(host, "/open"));
    let denial = (403, "path_denied", "allowlist:paths.example");
    network.assert_denied(host, denial, || client.get(host, "/closed"));
}

pub(crate) fn github(network: &Network) {
    let client = network.client();
    let host = "api.github.com";
    network.assert_allowed(host, || client.get(host, "/repos/acme/app"));
    let denial = (403, "github_rule", "github:repository");
    network.assert_denied(host, denial, || client.get(host, "/repos/acme/other"));
}

pub(crate) fn override_header(network: &Network) {
    let client = network.client();
    let host = "paths.example";
    network.assert_allowed(host, || client.get(host, "/open"));
    let denial = (403, "method_denied", "override-header");
    let header = "X-HTTP-Method-Override: DELETE\r\n";
    network.assert_denied(host, denial, || client.open(host).get("/open", header));
}

pub(crate) fn bundles(network: &Network) {
    let client = network.client();
    let host = "open.example";
    network.assert_allowed(host, || client.get(host, "/"));
    let denial = (403, "rego_denied", "rego:authz");
    network.assert_denied(host, denial, || client.get(host, "/blocked"));
}

pub(crate) fn repository(network: &Network) {
    let client = network.client();
    let (host, service) = ("forge.example", "info/refs?service=git-upload-pack");
    network.assert_allowed(host, || client.get(host, &format!("/acme/app/{service}")));
    let denial = (403, "git_repo", "git:repositories");
    network.assert_denied(host, denial, || {
        client.get(host, &format!("/acme/other/{service}"))
    });
}

pub(crate) fn address(network: &Network) {
    let client = network.client();
    let (public, private) = ("public.example", "private.example");
    network.assert_allowed(public, || {
        client.get(&network.with_origin_port(public), "/")
    });
    let denial = (403, "address_class", "dialer");
    network.assert_denied(private, denial, || {
        client.get(&network.with_origin_port(private), "/")
    });
}
