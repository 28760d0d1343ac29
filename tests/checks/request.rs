//! A request that a client sends: through the proxy, in a tunnel, or at a transparent listener.

use crate::network::{MAX_DATA_LIKE_NAMES, Network, data_like_names, names_record};

pub(crate) fn identity(network: &Network) {
    let client = network.client();
    let mut connection = client.open("open.example");
    network.allows("open.example", || connection.get("/", ""));
    network.unregister();
    network.audit.mark();
    let answer = connection.get("/", "");
    assert_eq!(answer.status, 403, "{}", answer.text());
    // The destination is read once the sender is known.
    let fields = [("method", "GET")];
    let record = network
        .audit
        .denied("identity_unknown", "identity", &fields);
    names_record(&answer, &record);
}

pub(crate) fn rate(network: &Network) {
    let client = network.client();
    let host = "limited.example";
    network.allows(host, || client.get(host, "/"));
    let denial = (429, "rate_limited", "rate_limits");
    network.denies(host, denial, || client.get(host, "/"));
}

pub(crate) fn breaker(network: &Network) {
    let client = network.client();
    let host = "broken.example";
    network.allows(host, || client.get(host, "/"));
    for _ in 0..2 {
        assert_eq!(client.get(host, "/fail").status, 502);
    }
    let denial = (503, "circuit_open", "circuit_breakers");
    network.denies(host, denial, || client.get(host, "/"));
}

pub(crate) fn labels(network: &Network) {
    let client = network.client();
    for (at, host) in data_like_names("wild.example").enumerate() {
        let send = || client.get(&network.direct(&host), "/");
        if at < MAX_DATA_LIKE_NAMES {
            network.allows(&host, send);
        } else {
            network.denies(&host, (429, "rate_limited", "dns:labels"), send);
        }
    }
}

pub(crate) fn allowlist(network: &Network) {
    let client = network.client();
    let host = "paths.example";
    network.allows(host, || client.get(host, "/open"));
    let denial = (403, "path_denied", "allowlist:paths.example");
    network.denies(host, denial, || client.get(host, "/closed"));
}

pub(crate) fn github(network: &Network) {
    let client = network.client();
    let host = "api.github.com";
    network.allows(host, || client.get(host, "/repos/acme/app"));
    let denial = (403, "github_rule", "github:repository");
    network.denies(host, denial, || client.get(host, "/repos/acme/other"));
}

pub(crate) fn override_header(network: &Network) {
    let client = network.client();
    let host = "paths.example";
    network.allows(host, || client.get(host, "/open"));
    let denial = (403, "method_denied", "override-header");
    let header = "X-HTTP-Method-Override: DELETE\r\n";
    network.denies(host, denial, || client.open(host).get("/open", header));
}

pub(crate) fn bundles(network: &Network) {
    let client = network.client();
    let host = "open.example";
    network.allows(host, || client.get(host, "/"));
    let denial = (403, "rego_denied", "rego:authz");
    network.denies(host, denial, || client.get(host, "/blocked"));
}

pub(crate) fn repository(network: &Network) {
    let client = network.client();
    let (host, service) = ("forge.example", "info/refs?service=git-upload-pack");
    network.allows(host, || client.get(host, &format!("/acme/app/{service}")));
    let denial = (403, "git_repo", "git:repositories");
    network.denies(host, denial, || {
        client.get(host, &format!("/acme/other/{service}"))
    });
}

pub(crate) fn address(network: &Network) {
    let client = network.client();
    let (public, private) = ("public.example", "private.example");
    network.allows(public, || client.get(&network.direct(public), "/"));
    let denial = (403, "address_class", "dialer");
    network.denies(private, denial, || {
        client.get(&network.direct(private), "/")
    });
}
