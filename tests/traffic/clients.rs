//! Common programs with default settings, with and without proxy variables.

use testkit::origin::{OriginReply, OriginRequest, OriginServer};

use crate::traffic_fixture::{Agent, Rules, TrafficFixture, describe};

/// The commit of the branch `main`.
const HEAD: &str = "0123456789abcdef0123456789abcdef01234567";

fn reply_to(request: &OriginRequest) -> OriginReply {
    match request.path() {
        "/app.git/info/refs" => OriginReply::text(format!("{HEAD}\trefs/heads/main\n"))
            .header("content-type", "text/plain"),
        "/app.git/HEAD" => OriginReply::text("ref: refs/heads/main\n"),
        _ => OriginReply::text(format!("hello {}", request.method)),
    }
}

/// Shell commands that remove or set the proxy variables.
const PROXY_SETTINGS: [&str; 2] = [
    "unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY all_proxy;",
    "export http_proxy=http://192.0.0.1:8080 https_proxy=http://192.0.0.1:8080;",
];

/// Runs `check` once without and once with proxy variables.
fn with_each_proxy_setting(check: impl Fn(&Agent<'_>, &str)) {
    let fixture = TrafficFixture::new();
    let api = fixture.https(&["api.example"], reply_to);
    let web = OriginServer::http(reply_to);
    let rules = Rules::new()
        .allow("api.example")
        .allow("web.example")
        .at("api.example:443", api.address())
        .at("web.example:80", web.address());
    fixture.write(&rules);
    let agent = fixture.create("fix");
    for environment in PROXY_SETTINGS {
        check(&agent, environment);
    }
    assert!(!api.requests().is_empty() || !web.requests().is_empty());
}

/// A program must exist where these tests run; `./test` installs it.
#[track_caller]
fn require_program(agent: &Agent<'_>, program: &str) {
    let found = agent.bash(&format!("command -v {program}"));
    assert!(
        found.status.success(),
        "{program} is missing here: ./test installs it"
    );
}

#[test]
fn curl_gets_allowed_responses_and_refusal_reasons() {
    with_each_proxy_setting(|agent, environment| {
        for url in ["http://web.example/", "https://api.example/"] {
            assert_eq!(
                agent.stdout_of(&format!("{environment} curl -sS {url}")),
                "hello GET"
            );
        }
        for url in ["http://evil.example/", "https://evil.example/"] {
            let printed = agent.stdout_of(&format!("{environment} curl -sS {url}"));
            assert!(printed.contains("\"host_denied\""), "{printed}");
        }
    });
}

#[test]
fn curl_uses_http2_to_the_gate_and_upstream() {
    let fixture = TrafficFixture::new();
    let api = fixture.https(&["api.example"], reply_to);
    fixture.write(
        &Rules::new()
            .allow("api.example")
            .at("api.example", api.address()),
    );
    let agent = fixture.create("fix");
    let printed =
        agent.stdout_of("curl -sS --http2 -o /dev/null -w '%{http_version}' https://api.example/");
    assert_eq!(printed, "2");
    let printed = agent
        .stdout_of("curl -sS --http1.1 -o /dev/null -w '%{http_version}' https://api.example/");
    assert_eq!(printed, "1.1");
    for request in api.requests() {
        assert_eq!(request.version, http::Version::HTTP_2, "{request:?}");
    }
}

#[test]
fn wget_gets_allowed_responses() {
    with_each_proxy_setting(|agent, environment| {
        require_program(agent, "wget");
        for url in ["http://web.example/", "https://api.example/"] {
            let printed = agent.stdout_of(&format!(
                "{environment} wget -q --ca-certificate=$HOME/gate.pem -O - {url}"
            ));
            assert_eq!(printed, "hello GET", "{url}");
        }
        let printed = agent.stdout_of(&format!(
            "{environment} wget -q --ca-certificate=$HOME/gate.pem --content-on-error -O - https://evil.example/; true"
        ));
        assert!(printed.contains("\"host_denied\""), "{printed}");
    });
}

#[test]
fn static_program_without_proxy_support_gets_allowed_responses() {
    with_each_proxy_setting(|agent, _| {
        require_program(agent, "busybox");
        let printed = agent.stdout_of("env -i busybox wget -q -O - http://web.example/");
        assert_eq!(printed, "hello GET");
        let output = agent.bash("env -i busybox wget -q -O - http://evil.example/");
        assert!(!output.status.success());
        assert!(describe(&output).contains("403"), "{}", describe(&output));
    });
}

#[test]
fn git_lists_a_repositorys_refs() {
    with_each_proxy_setting(|agent, environment| {
        let printed = agent.stdout_of(&format!(
            "{environment} git ls-remote https://api.example/app.git main"
        ));
        assert_eq!(printed, format!("{HEAD}\trefs/heads/main"));
        let output = agent.bash(&format!(
            "{environment} git ls-remote https://evil.example/app.git"
        ));
        assert!(!output.status.success());
        assert!(describe(&output).contains("403"), "{}", describe(&output));
    });
}

#[test]
fn python_urllib_gets_allowed_responses() {
    with_each_proxy_setting(|agent, environment| {
        let program = "import sys, urllib.request as u, urllib.error as e\n\
            try: print(u.urlopen(sys.argv[1]).read().decode())\n\
            except e.HTTPError as refused: print(refused.code, refused.read().decode())\n";
        agent.stdout_of(&format!("cat >~/get.py <<'EOF'\n{program}EOF\n"));
        for url in ["http://web.example/", "https://api.example/"] {
            let printed =
                agent.stdout_of(&format!("{environment} /usr/bin/python3 ~/get.py {url}"));
            assert_eq!(printed, "hello GET", "{url}");
        }
        for url in ["http://evil.example/", "https://evil.example/"] {
            let printed =
                agent.stdout_of(&format!("{environment} /usr/bin/python3 ~/get.py {url}"));
            assert!(
                printed.starts_with("403") && printed.contains("\"host_denied\""),
                "{printed}"
            );
        }
    });
}

#[test]
fn python_requests_gets_allowed_responses() {
    with_each_proxy_setting(|agent, environment| {
        let found = agent.bash("/usr/bin/python3 -c 'import requests'");
        assert!(
            found.status.success(),
            "requests is missing here: ./test installs python3-requests"
        );
        // Two requests in one session, so that the second reuses the connection.
        let program = "import sys, requests\n\
            with requests.Session() as session:\n    \
                for method in ('GET', 'POST'):\n        \
                    got = session.request(method, sys.argv[1], data={'GET': None, 'POST': 'x' * 100000}[method])\n        \
                    print(got.status_code, got.text.strip())\n";
        agent.stdout_of(&format!("cat >~/ask.py <<'EOF'\n{program}EOF\n"));
        for url in ["http://web.example/", "https://api.example/"] {
            let printed =
                agent.stdout_of(&format!("{environment} /usr/bin/python3 ~/ask.py {url}"));
            assert_eq!(printed, "200 hello GET\n200 hello POST", "{url}");
        }
        for url in ["http://evil.example/", "https://evil.example/"] {
            let printed =
                agent.stdout_of(&format!("{environment} /usr/bin/python3 ~/ask.py {url}"));
            for line in printed.lines() {
                let refused = line.starts_with("403") && line.contains("\"host_denied\"");
                assert!(refused, "{printed}");
            }
            assert_eq!(printed.lines().count(), 2, "{printed}");
        }
    });
}

#[test]
fn node_fetch_gets_allowed_responses() {
    with_each_proxy_setting(|agent, environment| {
        require_program(agent, "node");
        let get = |url: &str| {
            agent.stdout_of(&format!(
                "{environment} node -e 'fetch(\"{url}\").then(async (r) => console.log(r.status, await r.text()))'"
            ))
        };
        for url in ["http://web.example/", "https://api.example/"] {
            assert_eq!(get(url), "200 hello GET", "{url}");
        }
        for url in ["http://evil.example/", "https://evil.example/"] {
            let printed = get(url);
            assert!(
                printed.starts_with("403") && printed.contains("\"host_denied\""),
                "{printed}"
            );
        }
    });
}

#[test]
fn openssl_sees_a_certificate_for_the_requested_name_only() {
    with_each_proxy_setting(|agent, _| {
        require_program(agent, "openssl");
        for name in ["api.example", "evil.example"] {
            let printed = agent.stdout_of(&format!(
                "openssl s_client -connect {name}:443 -servername {name} -verify_return_error \
                 -verify_hostname {name} -CAfile ~/gate.pem </dev/null 2>/dev/null | \
                 openssl x509 -noout -ext subjectAltName"
            ));
            let names: Vec<&str> = printed.lines().skip(1).map(str::trim).collect();
            assert_eq!(names, [format!("DNS:{name}")], "{printed}");
        }
        let printed = agent.stdout_of(
            "printf 'GET / HTTP/1.1\\r\\nHost: api.example\\r\\nConnection: close\\r\\n\\r\\n' | \
             openssl s_client -quiet -connect api.example:443 -servername api.example -CAfile ~/gate.pem 2>/dev/null",
        );
        assert!(printed.ends_with("hello GET"), "{printed}");
    });
}
