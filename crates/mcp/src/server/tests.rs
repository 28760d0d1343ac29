use super::*;

const TOKEN: &str = "a-token";

fn source(at: &str, token: bool) -> RequestSource {
    let token = token.then(|| Sha256::digest(TOKEN.as_bytes()).into());
    RequestSource::Network(ListenerRules {
        address: at.parse().unwrap(),
        endpoints: Endpoints {
            hooks: true,
            tools: true,
        },
        auth: AuthConfig {
            token,
            enforce_agent: false,
        },
    })
}

/// The HTTP status of the refusal, or 200.
fn admission_status(source: &RequestSource, headers: &[(&str, &str)]) -> u16 {
    let mut request = Request::post("/mcp");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let (head, ()) = request.body(()).unwrap().into_parts();
    let admitted = admission::admit(source, &head);
    admitted.map_or_else(
        |refused| refused.response(false).status().as_u16(),
        |()| 200,
    )
}

// Issue 14, number 1.
#[test]
fn listener_without_token_admits_loopback_hosts_only() {
    let bearer = format!("Bearer {TOKEN}");
    let authorization = ("authorization", bearer.as_str());
    for at in [
        "127.0.0.1:8090",
        "[::1]:8090",
        "0.0.0.0:8090",
        "192.0.2.1:8090",
    ] {
        let open = source(at, false);
        for host in ["127.0.0.1:8090", "localhost", "[::1]:8090"] {
            assert_eq!(
                admission_status(&open, &[("host", host)]),
                200,
                "{at} {host}"
            );
        }
        // After DNS rebinding the page's requests have its own name as Host and Origin.
        let host = ("host", "rebound.example:8090");
        let origin = ("origin", "http://rebound.example:8090");
        assert_eq!(admission_status(&open, &[host]), 403, "{at}");
        assert_eq!(
            admission_status(&open, &[host, origin, authorization]),
            403,
            "{at}"
        );
        let host = ("host", "127.0.0.1:8090");
        assert_eq!(admission_status(&open, &[host, origin]), 403, "{at}");
        assert_eq!(admission_status(&open, &[]), 403, "{at}");
    }
}

#[test]
fn listener_with_token_refuses_requests_without_it() {
    let bearer = format!("Bearer {TOKEN}");
    let authorization = ("authorization", bearer.as_str());
    let local = ("host", "127.0.0.1:8090");
    let named = ("host", "gate.example:8090");
    for at in ["127.0.0.1:8090", "0.0.0.0:8090"] {
        let guarded = source(at, true);
        assert_eq!(admission_status(&guarded, &[local]), 401, "{at}");
        let wrong = ("authorization", "Bearer another");
        assert_eq!(admission_status(&guarded, &[local, wrong]), 401, "{at}");
        assert_eq!(
            admission_status(&guarded, &[local, authorization]),
            200,
            "{at}"
        );
    }
    assert_eq!(
        admission_status(&source("0.0.0.0:8090", true), &[named, authorization]),
        200
    );
    // Docker's MCP gateway cannot set headers; its URL contains the token.
    for (credentials, status) in [
        ("eDphLXRva2Vu", 200),     // x:a-token
        ("OmEtdG9rZW4=", 200),     // :a-token
        ("eDphbm90aGVy", 401),     // x:another
        ("YS10b2tlbjp4", 401),     // a-token:x
        ("YS10b2tlbg==", 401),     // a-token
        ("eDphLXRva2VuOg==", 401), // x:a-token:
        ("x:a-token", 401),
        ("", 401),
    ] {
        let basic = format!("Basic {credentials}");
        let given = [named, ("authorization", basic.as_str())];
        let found = admission_status(&source("0.0.0.0:8090", true), &given);
        assert_eq!(found, status, "{credentials}");
    }
    assert_eq!(
        admission_status(&source("127.0.0.1:8090", true), &[named, authorization]),
        403
    );
}
