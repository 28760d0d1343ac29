use super::*;

const TOKEN: &str = "a-token";

fn source(at: &str, token: bool) -> RequestSource {
    let token = token.then(|| Sha256::digest(TOKEN.as_bytes()).into());
    RequestSource::Network(ListenerRules {
        at: at.parse().unwrap(),
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

/// The status of a refusal, or 200.
fn admitted(source: &RequestSource, headers: &[(&str, &str)]) -> u16 {
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
fn a_listener_without_a_token_admits_loopback_hosts_only() {
    let bearer = format!("Bearer {TOKEN}");
    let shown = ("authorization", bearer.as_str());
    for at in [
        "127.0.0.1:8090",
        "[::1]:8090",
        "0.0.0.0:8090",
        "192.0.2.1:8090",
    ] {
        let open = source(at, false);
        for host in ["127.0.0.1:8090", "localhost", "[::1]:8090"] {
            assert_eq!(admitted(&open, &[("host", host)]), 200, "{at} {host}");
        }
        // A page whose name was made to resolve to this address is its own origin.
        let host = ("host", "rebound.example:8090");
        let origin = ("origin", "http://rebound.example:8090");
        assert_eq!(admitted(&open, &[host]), 403, "{at}");
        assert_eq!(admitted(&open, &[host, origin, shown]), 403, "{at}");
        let host = ("host", "127.0.0.1:8090");
        assert_eq!(admitted(&open, &[host, origin]), 403, "{at}");
        assert_eq!(admitted(&open, &[]), 403, "{at}");
    }
}

#[test]
fn a_listener_with_a_token_admits_nobody_without_it() {
    let bearer = format!("Bearer {TOKEN}");
    let shown = ("authorization", bearer.as_str());
    let local = ("host", "127.0.0.1:8090");
    let named = ("host", "gate.example:8090");
    for at in ["127.0.0.1:8090", "0.0.0.0:8090"] {
        let guarded = source(at, true);
        assert_eq!(admitted(&guarded, &[local]), 401, "{at}");
        let wrong = ("authorization", "Bearer another");
        assert_eq!(admitted(&guarded, &[local, wrong]), 401, "{at}");
        assert_eq!(admitted(&guarded, &[local, shown]), 200, "{at}");
    }
    assert_eq!(
        admitted(&source("0.0.0.0:8090", true), &[named, shown]),
        200
    );
    // Docker's gateway can set no header, and writes the token into the URL.
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
        let found = admitted(&source("0.0.0.0:8090", true), &given);
        assert_eq!(found, status, "{credentials}");
    }
    assert_eq!(
        admitted(&source("127.0.0.1:8090", true), &[named, shown]),
        403
    );
}
