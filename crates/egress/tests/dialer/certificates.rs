//! Which upstream certificates are accepted.

use policy::reason::Reason;
use testkit::ca::TlsIdentity;
use testkit::origin::{OriginReply, OriginServer};

use super::*;

const HOST: &str = "api.example";

/// Requires that a TLS handshake with an upstream that has `identity` fails with the message
/// `cause`.
async fn assert_handshake_fails(operator: &Operator, identity: TlsIdentity, cause: &str) {
    let origin = OriginServer::https(identity, |_| OriginReply::text("fine"));
    let dialer = operator.dialer(HOST, origin.address(), "");
    let error = fetch(&dialer, "s", &https(HOST), "/").await.unwrap_err();
    let DialError::Tls { .. } = &error else {
        panic!("{error:?}");
    };
    assert_eq!(error.reason(), Reason::TlsUpstream);
    assert!(error.counts_as_failure());
    assert_eq!(
        error.to_string(),
        format!("the TLS handshake with {HOST} failed: {cause}")
    );
    assert!(origin.requests().is_empty());
    let error = dialer
        .open(&sandbox("one"), &https(HOST))
        .await
        .err()
        .unwrap();
    assert!(matches!(error, DialError::Tls { .. }), "{error:?}");
}

#[tokio::test]
async fn operators_extra_root_is_trusted() {
    let operator = Operator::new();
    let origin = OriginServer::https(operator.ca.identity(&[HOST]), |_| OriginReply::text("fine"));
    let dialer = operator.dialer(HOST, origin.address(), "");
    assert_eq!(
        fetch(&dialer, "s", &https(HOST), "/").await.unwrap(),
        "fine"
    );
}

#[tokio::test]
async fn certificate_of_an_unknown_issuer_is_refused() {
    let operator = Operator::new();
    let untrusted = Ca::new("an untrusted CA").identity(&[HOST]);
    assert_handshake_fails(
        &operator,
        untrusted,
        "its certificate is not signed by a trusted CA",
    )
    .await;
}

#[tokio::test]
async fn expired_certificate_is_refused() {
    let operator = Operator::new();
    let expired = operator.ca.expired(&[HOST]);
    assert_handshake_fails(&operator, expired, "its certificate has expired").await;
}

#[tokio::test]
async fn certificate_of_another_name_is_refused() {
    let operator = Operator::new();
    let other = operator.ca.identity(&["other.example"]);
    assert_handshake_fails(&operator, other, "its certificate is for another host name").await;
}

#[tokio::test]
async fn server_without_tls_is_refused() {
    let operator = Operator::new();
    let origin = OriginServer::raw(|mut stream, _| {
        use std::io::Write;
        let _sent = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n");
    });
    let dialer = operator.dialer(HOST, origin.address(), "");
    let error = fetch(&dialer, "s", &https(HOST), "/").await.unwrap_err();
    assert!(
        error
            .to_string()
            .ends_with("the upstream does not speak TLS on this port"),
        "{error}"
    );
}

#[tokio::test]
async fn certificate_of_an_ip_address_is_verified() {
    let operator = Operator::new();
    let origin = OriginServer::https(operator.ca.identity(&["127.0.0.1"]), |_| {
        OriginReply::text("fine")
    });
    let lines = "allow_private: [{host: 127.0.0.1, cidr: 127.0.0.1}]\nextra_roots: [root.pem]";
    let dialer = Dialer::new(&operator.settings(lines)).unwrap();
    let route = Route {
        port: origin.address().port(),
        ..https("127.0.0.1")
    };
    assert_eq!(fetch(&dialer, "s", &route, "/").await.unwrap(), "fine");
}

#[tokio::test]
async fn root_removed_by_a_reload_is_not_trusted() {
    let operator = Operator::new();
    let origin = OriginServer::https(operator.ca.identity(&[HOST]), |_| OriginReply::text("fine"));
    let dialer = operator.dialer(HOST, origin.address(), "");
    fetch(&dialer, "s", &https(HOST), "/").await.unwrap();
    let lines = format!("resolve: {{{HOST}: '{}'}}", origin.address());
    dialer.reload(&operator.settings(&lines)).unwrap();
    let error = fetch(&dialer, "s", &https(HOST), "/").await.unwrap_err();
    assert_eq!(error.reason(), Reason::TlsUpstream);
    // On a platform without root certificates the error is NoRoots.
    assert!(
        matches!(error, DialError::Tls { .. } | DialError::NoRoots { .. }),
        "{error:?}"
    );
}

#[test]
fn root_file_without_certificate_is_an_error() {
    let operator = Operator::new();
    std::fs::write(operator.directory.path().join("empty.pem"), "nothing").unwrap();
    let settings = operator.settings("extra_roots: [empty.pem]");
    let error = Dialer::new(&settings).err().unwrap().to_string();
    assert!(
        error.contains("empty.pem cannot be used: the file contains no certificate"),
        "{error}"
    );
}

#[test]
fn missing_root_file_is_an_error() {
    let operator = Operator::new();
    let settings = operator.settings("extra_roots: [gone.pem]");
    let error = Dialer::new(&settings).err().unwrap().to_string();
    assert!(error.contains("gone.pem cannot be used: "), "{error}");
    let dialer = Dialer::new(&operator.settings("extra_roots: [root.pem]")).unwrap();
    dialer.reload(&settings).unwrap_err();
}
