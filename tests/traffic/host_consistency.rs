//! Consistency of a request: CONNECT target, SNI, request target and `Host` must name the same
//! host, in one spelling, on one port.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use testkit::http::{self, HttpResponse};
use testkit::inside::{self, ByteAtATime, NetNamespace};
use testkit::origin::{OriginReply, OriginServer};

use crate::traffic_fixture::{Agent, Rules, TrafficFixture, exchange, get, may_enter, refusal};

/// Time limit for closing a connection.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(20);

/// The origins: `api` serves api.example and twin.example over TLS, `web` serves web.example.
struct Origins {
    api: OriginServer,
    web: OriginServer,
}

fn with_agent(check: impl FnOnce(&Origins, &Agent<'_>, &NetNamespace)) {
    if !may_enter() {
        return;
    }
    let fixture = TrafficFixture::new();
    let net = Origins {
        api: fixture.https(&["api.example", "twin.example"], |_| {
            OriginReply::text("api")
        }),
        web: OriginServer::http(|_| OriginReply::text("web")),
    };
    let rules = Rules::new()
        .allow("api.example")
        .allow("twin.example")
        .allow("web.example")
        .allow("{host: port.example, ports: [8443, 8000]}")
        .at("api.example:443", net.api.address())
        .at("twin.example:443", net.api.address())
        .at("web.example:80", net.web.address())
        .at("web.example:443", net.web.address())
        .at("port.example:8000", net.web.address())
        .egress("timeouts: {header: 5s}");
    fixture.write(&rules);
    let agent = fixture.create("fix");
    check(&net, &agent, &agent.namespace());
}

impl Origins {
    /// Asserts that no request reached an origin.
    #[track_caller]
    fn assert_untouched(&self) {
        let requests = [self.api.requests(), self.web.requests()].concat();
        assert!(requests.is_empty(), "{requests:?}");
    }
}

/// Sends CONNECT and reads the response. After a success the stream is the tunnel.
fn connect(mut stream: &TcpStream, to: &str) -> HttpResponse {
    let request = format!("CONNECT {to} HTTP/1.1\r\nHost: {to}\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = http::read_head(stream).unwrap();
    if let Some(length) = answer.header("content-length") {
        answer.body = vec![0; length.parse().unwrap()];
        stream.read_exact(&mut answer.body).unwrap();
    }
    answer
}

/// Opens a tunnel through the proxy.
fn tunnel(namespace: &NetNamespace, to: &str) -> TcpStream {
    let stream = namespace.port(8080);
    let answer = connect(&stream, to);
    assert_eq!(answer.status, 200, "{to}: {answer:?} {}", answer.text());
    stream
}

/// Sends a request over TLS in a tunnel and returns the response.
fn in_tunnel(
    namespace: &NetNamespace,
    to: &str,
    hello: Option<&str>,
    request: &str,
) -> HttpResponse {
    exchange(
        inside::tls(tunnel(namespace, to), hello, &["http/1.1"]),
        request,
    )
}

#[test]
fn matching_connect_sni_and_host_pass() {
    with_agent(|net, _, namespace| {
        let same = [
            ("api.example:443", Some("api.example"), "api.example"),
            ("API.example.:443", Some("api.example"), "Api.Example:443"),
            ("api.example:443", None, "api.example"),
        ];
        for (to, hello, host) in same {
            let answer = in_tunnel(namespace, to, hello, &get(host, "/"));
            assert_eq!(answer.text(), "api", "{to} {hello:?} {host}: {answer:?}");
        }
        assert_eq!(net.api.requests().len(), same.len());
        // The checked name is the one that is sent upstream.
        for request in net.api.requests() {
            let authority = request.uri.authority().map(ToString::to_string);
            let authority = authority.or_else(|| request.header("host").map(ToOwned::to_owned));
            assert_eq!(authority.as_deref(), Some("api.example"), "{request:?}");
        }
    });
}

#[test]
fn differing_connect_sni_and_host_get_421_and_close() {
    with_agent(|net, agent, namespace| {
        for (to, hello, host) in [
            // Both names are allowed, but they must agree.
            ("api.example:443", Some("twin.example"), "api.example"),
            ("api.example:443", Some("twin.example"), "twin.example"),
            ("api.example:443", Some("api.example"), "twin.example"),
            ("api.example:443", Some("evil.example"), "api.example"),
            ("evil.example:443", Some("api.example"), "api.example"),
            ("evil.example:443", None, "api.example"),
            ("api.example:443", Some("api.example"), "api.example:8443"),
            ("api.example:443", Some("api.example"), "api.example:80"),
            ("api.example:8443", Some("api.example"), "api.example"),
        ] {
            let mut stream = inside::tls(tunnel(namespace, to), hello, &["http/1.1"]);
            let answer = exchange(&mut stream, get(host, "/"));
            let id = refusal(&answer, 421, "name_mismatch");
            // An idle connection would close later.
            assert_eq!(answer.header("connection"), Some("close"), "{answer:?}");
            let closed = inside::closes_within(&mut stream, CLOSE_TIMEOUT);
            assert!(closed, "{to} {hello:?} {host}: still open");
            assert_eq!(agent.fixture.record(&id)["reason"], "name_mismatch");
        }
        net.assert_untouched();
    });
}

#[test]
fn differing_sni_and_host_are_refused_without_a_proxy() {
    with_agent(|net, _, namespace| {
        let direct = |hello, host: &str| {
            exchange(
                inside::tls(namespace.port(443), hello, &["http/1.1"]),
                get(host, "/"),
            )
        };
        refusal(
            &direct(Some("api.example"), "twin.example"),
            421,
            "name_mismatch",
        );
        refusal(
            &direct(Some("evil.example"), "api.example"),
            421,
            "name_mismatch",
        );
        // A Host header without SNI and without CONNECT is not enough.
        refusal(&direct(None, "api.example"), 421, "name_mismatch");
        net.assert_untouched();
        assert_eq!(direct(Some("api.example"), "api.example").text(), "api");
    });
}

#[test]
fn each_request_on_a_reused_connection_is_decided_separately() {
    with_agent(|net, _, namespace| {
        let mut stream = inside::tls(namespace.port(443), Some("api.example"), &["http/1.1"]);
        assert_eq!(exchange(&mut stream, get("api.example", "/")).text(), "api");
        refusal(
            &exchange(&mut stream, get("twin.example", "/")),
            421,
            "name_mismatch",
        );
        assert!(inside::closes_within(&mut stream, CLOSE_TIMEOUT));
        let mut plain = namespace.port(80);
        assert_eq!(exchange(&mut plain, get("web.example", "/")).text(), "web");
        refusal(
            &exchange(&mut plain, get("evil.example", "/")),
            403,
            "host_denied",
        );
        assert_eq!(exchange(&mut plain, get("web.example", "/")).text(), "web");
        assert_eq!(net.web.requests().len(), 2);
    });
}

#[test]
fn differing_absolute_target_and_host_are_refused() {
    with_agent(|net, _, namespace| {
        let send = |port, target: &str, host: &str| {
            let request = format!("GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n");
            exchange(namespace.port(port), request)
        };
        for (target, host) in [
            ("http://web.example/", "evil.example"),
            ("http://evil.example/", "web.example"),
            ("http://web.example/", "api.example"),
            ("http://web.example:81/", "web.example"),
            ("http://web.example/", "web.example:81"),
        ] {
            for port in [80, 8080] {
                refusal(&send(port, target, host), 421, "name_mismatch");
            }
        }
        net.assert_untouched();
        assert_eq!(
            send(8080, "http://web.example/", "WEB.example:80").text(),
            "web"
        );
        assert_eq!(net.web.requests().len(), 1);
    });
}

#[test]
fn http_target_inside_tls_is_refused() {
    with_agent(|net, _, namespace| {
        let send = |target: &str| {
            let tls = inside::tls(namespace.port(443), Some("api.example"), &["http/1.1"]);
            let request = format!("GET {target} HTTP/1.1\r\nHost: api.example:443\r\n\r\n");
            exchange(tls, request)
        };
        for target in ["http://api.example:443/", "http://api.example/"] {
            refusal(&send(target), 421, "name_mismatch");
        }
        net.assert_untouched();
        assert_eq!(send("https://api.example/").text(), "api");
    });
}

#[test]
fn differing_ports_are_refused() {
    with_agent(|net, _, namespace| {
        let send_for = |authority: &str| {
            let request = format!("GET http://{authority}/ HTTP/1.1\r\nHost: {authority}\r\n\r\n");
            exchange(namespace.port(8080), request)
        };
        for authority in [
            "web.example:8000",
            "web.example:22",
            "port.example",
            "port.example:80",
        ] {
            refusal(&send_for(authority), 403, "port_denied");
        }
        refusal(
            &in_tunnel(
                namespace,
                "api.example:8443",
                Some("api.example"),
                &get("api.example:8443", "/"),
            ),
            403,
            "port_denied",
        );
        net.assert_untouched();
        assert_eq!(send_for("port.example:8000").text(), "web");
        // For a program without a proxy, the port must be the port that it connected to.
        refusal(
            &exchange(namespace.port(80), get("port.example:8000", "/")),
            421,
            "name_mismatch",
        );
    });
}

/// Addresses in every spelling that some program accepts.
const LITERALS: [&str; 21] = [
    "127.0.0.1",
    "169.254.169.254",
    "10.0.0.1",
    "192.0.2.1",
    "2130706433",
    "0x7f000001",
    "0x7f.0.0.1",
    "0177.0.0.1",
    "017700000001",
    "127.1",
    "127.0.1",
    "0",
    "127.0.0.1.",
    "[::1]",
    "[::ffff:127.0.0.1]",
    "[::ffff:7f00:1]",
    "[64:ff9b::7f00:1]",
    "[2002:7f00:1::]",
    "[fe80::1]",
    "[fe80::1%25eth0]",
    "[2001:db8::1]",
];

#[test]
fn ip_addresses_are_refused_in_every_spelling() {
    with_agent(|net, _, namespace| {
        for literal in LITERALS {
            let request = format!("GET http://{literal}/ HTTP/1.1\r\nHost: {literal}\r\n\r\n");
            let plain = exchange(namespace.port(8080), request);
            let text = plain.text();
            assert!(
                matches!(plain.status, 400 | 403),
                "{literal}: {plain:?} {text}"
            );
            assert!(
                text.contains("ip_literal") || text.contains("bad_name"),
                "{literal}: {text}"
            );
            let plain = exchange(namespace.port(80), get(literal, "/"));
            assert!(matches!(plain.status, 400 | 403), "{literal}: {plain:?}");
            // A tunnel is opened so that the refusal can be read inside, or refused at once.
            let stream = namespace.port(8080);
            let opened = connect(&stream, &format!("{literal}:443"));
            if opened.status == 200 {
                let inner = exchange(inside::tls(stream, None, &[]), get(literal, "/"));
                let text = inner.text();
                assert!(
                    matches!(inner.status, 400 | 403),
                    "{literal}: {inner:?} {text}"
                );
                assert!(
                    text.contains("ip_literal") || text.contains("bad_name"),
                    "{text}"
                );
            } else {
                assert!(matches!(opened.status, 400 | 403), "{literal}: {opened:?}");
            }
        }
        net.assert_untouched();
    });
}

#[test]
fn only_listed_ip_address_is_reached() {
    if !may_enter() {
        return;
    }
    let fixture = TrafficFixture::new();
    let web = OriginServer::http(|_| OriginReply::text("web"));
    let rules = Rules::new()
        .allow("192.0.2.7")
        .at("192.0.2.7:80", web.address());
    fixture.write(&rules);
    let agent = fixture.create("fix");
    assert_eq!(agent.curl("http://192.0.2.7/").body, "web");
    refusal(
        &exchange(agent.namespace().port(80), get("192.0.2.8", "/")),
        403,
        "ip_literal",
    );
    // Another spelling is the same address, and is sent in the checked form.
    for spelling in ["3221225991", "0xc0000207", "192.0.519", "0300.0.2.7"] {
        let answer = exchange(agent.namespace().port(80), get(spelling, "/"));
        assert_eq!(answer.status, 200, "{spelling}: {answer:?}");
    }
    for request in web.requests() {
        assert_eq!(request.header("host"), Some("192.0.2.7"), "{request:?}");
    }
}

#[test]
fn tls_hello_sent_byte_by_byte_is_read() {
    with_agent(|_, _, namespace| {
        let stream = ByteAtATime(namespace.port(443));
        let mut stream = inside::tls(stream, Some("api.example"), &["http/1.1"]);
        assert_eq!(exchange(&mut stream, get("api.example", "/")).text(), "api");
        let stream = ByteAtATime(tunnel(namespace, "api.example:443"));
        let mut stream = inside::tls(stream, Some("evil.example"), &["http/1.1"]);
        refusal(
            &exchange(&mut stream, get("api.example", "/")),
            421,
            "name_mismatch",
        );
        // Plain HTTP requests may also arrive byte by byte.
        let answer = exchange(ByteAtATime(namespace.port(80)), get("web.example", "/"));
        assert_eq!(answer.text(), "web");
    });
}

#[test]
fn incomplete_tls_hello_times_out() {
    with_agent(|net, _, namespace| {
        for stream in [namespace.port(443), tunnel(namespace, "api.example:443")] {
            let mut stream = stream;
            stream.write_all(&[0x16, 3, 1, 2, 0, 1, 0]).unwrap();
            assert!(inside::closes_within(&mut stream, CLOSE_TIMEOUT));
        }
        net.assert_untouched();
    });
}

#[test]
fn encrypted_client_hello_is_decided_by_its_outer_name() {
    with_agent(|net, _, namespace| {
        let send_with_ech = |name, host: &str| {
            let tls = inside::tls_with_ech(namespace.port(443), name, &["http/1.1"]);
            exchange(tls, get(host, "/"))
        };
        assert_eq!(send_with_ech("api.example", "api.example").text(), "api");
        // The inner hello does not count: the request must name the outer name.
        refusal(
            &send_with_ech("evil.example", "api.example"),
            421,
            "name_mismatch",
        );
        refusal(
            &send_with_ech("evil.example", "evil.example"),
            403,
            "host_denied",
        );
        assert_eq!(net.api.requests().len(), 1);
    });
}

#[test]
fn plain_text_in_a_tunnel_is_http_or_closed() {
    with_agent(|net, _, namespace| {
        // Some clients send plain HTTP through a tunnel to port 80.
        let answer = exchange(tunnel(namespace, "web.example:80"), get("web.example", "/"));
        assert_eq!(answer.text(), "web");
        assert_eq!(net.web.requests().len(), 1);
        refusal(
            &exchange(
                tunnel(namespace, "evil.example:80"),
                get("evil.example", "/"),
            ),
            403,
            "host_denied",
        );
        refusal(
            &exchange(
                tunnel(namespace, "web.example:80"),
                get("evil.example", "/"),
            ),
            421,
            "name_mismatch",
        );
        // To port 443 plain HTTP is a request to http://…:443, which does not match the tunnel.
        let answer = exchange(
            tunnel(namespace, "api.example:443"),
            get("api.example", "/"),
        );
        refusal(&answer, 421, "name_mismatch");
        // Bytes that are neither TLS nor HTTP are not forwarded.
        for bytes in [
            "SSH-2.0-OpenSSH_9.2\r\n",
            "\0\0\0\0\0\0\0\0\n\n",
            "EHLO x\r\n\r\n",
        ] {
            for to in ["web.example:80", "api.example:443"] {
                let mut stream = tunnel(namespace, to);
                stream.write_all(bytes.as_bytes()).unwrap();
                stream.write_all(b"\r\n\r\n").unwrap();
                assert!(
                    inside::closes_within(&mut stream, CLOSE_TIMEOUT),
                    "{bytes:?} to {to}"
                );
            }
        }
        assert_eq!(net.web.requests().len(), 1);
        assert_eq!(net.api.connections(), 0);
    });
}

#[test]
fn nested_tunnel_and_tls_in_tls_are_refused() {
    with_agent(|net, _, namespace| {
        let connect = "CONNECT api.example:443 HTTP/1.1\r\nHost: api.example:443\r\n\r\n";
        refusal(
            &exchange(tunnel(namespace, "web.example:80"), connect),
            400,
            "framing",
        );
        refusal(
            &in_tunnel(namespace, "api.example:443", Some("api.example"), connect),
            400,
            "framing",
        );
        let outer = inside::tls(
            tunnel(namespace, "api.example:443"),
            Some("api.example"),
            &[],
        );
        let mut inner = inside::tls(outer, Some("twin.example"), &[]);
        assert!(
            inner
                .write_all(get("twin.example", "/").as_bytes())
                .is_err()
        );
        net.assert_untouched();
    });
}

#[test]
fn http_1_0_connect_without_host_opens_a_tunnel() {
    with_agent(|_, agent, namespace| {
        let mut stream = namespace.port(8080);
        stream
            .write_all(b"CONNECT api.example:443 HTTP/1.0\r\n\r\n")
            .unwrap();
        let opened = http::read_head(&mut stream).unwrap();
        assert_eq!(opened.status, 200, "{opened:?}");
        let answer = exchange(
            inside::tls(stream, Some("api.example"), &[]),
            get("api.example", "/"),
        );
        assert_eq!(answer.text(), "api");
        // Python's urllib sends such a CONNECT.
        let program = "import os, urllib.request as u; \
             os.environ['https_proxy'] = 'http://192.0.0.1:8080'; \
             print(u.urlopen('https://api.example/').read().decode())";
        assert_eq!(
            agent.stdout_of(&format!("/usr/bin/python3 -c \"{program}\"")),
            "api"
        );
    });
}

#[test]
fn ambiguous_names_and_paths_are_refused() {
    with_agent(|net, _, namespace| {
        let line = |target: &str, host: &str| {
            let request = format!("GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n");
            exchange(namespace.port(8080), request)
        };
        for (target, host) in [
            ("http://user@web.example/", "web.example"),
            ("http://user:word@web.example/", "web.example"),
            ("http://evil.example@web.example/", "web.example"),
            ("http://web.example/", "user@web.example"),
            ("http://web.example/a%252fb", "web.example"),
            ("http://web.example/%252e%252e/x", "web.example"),
            ("http://web.example/a%5cb", "web.example"),
            ("http://web.example/a%00b", "web.example"),
            ("http://web.example/a%0d%0ab", "web.example"),
            ("http://web.example/../../x", "web.example"),
            ("http://web..example/", "web..example"),
            ("ftp://web.example/", "web.example"),
        ] {
            let answer = line(target, host);
            assert_eq!(answer.status, 400, "{target}: {answer:?} {}", answer.text());
            let body = answer.json();
            assert!(
                body["reason"] == "bad_name" || body["reason"] == "framing",
                "{body}"
            );
        }
        net.assert_untouched();
    });
}

#[test]
fn upstream_receives_the_checked_target() {
    with_agent(|net, _, namespace| {
        for (written, sent) in [
            ("/a/../b", "/b"),
            ("/a/./b", "/a/b"),
            ("/a//b", "/a/b"),
            ("/%61", "/a"),
            ("/a/%2e%2e/b?q=%2e%2e", "/b?q=%2e%2e"),
        ] {
            let before = net.web.requests().len();
            let answer = exchange(namespace.port(80), get("web.example", written));
            assert_eq!(
                answer.status,
                200,
                "{written}: {answer:?} {}",
                answer.text()
            );
            let requests = net.web.requests();
            assert_eq!(requests[before].uri.to_string(), sent, "{written}");
        }
    });
}

#[test]
fn differing_http2_authority_gets_421() {
    with_agent(|net, agent, _| {
        let got = agent.curl("--http2 -H 'Host: twin.example' https://api.example/");
        got.refused(421, "name_mismatch");
        let got = agent.curl("--http2 -H 'Host: evil.example' https://api.example/");
        got.refused(421, "name_mismatch");
        net.assert_untouched();
        assert_eq!(agent.curl("--http2 https://api.example/").body, "api");
    });
}
