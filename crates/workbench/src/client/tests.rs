use super::*;

#[test]
fn an_address_that_cannot_be_dialled_is_refused_at_once() {
    let client = |host: &str| {
        let address = WorkbenchAddress::Tcp(host.to_owned(), 80);
        WorkbenchClient::new(address, Duration::ZERO, None).map(|_| ())
    };
    for host in ["127.0.0.1", "::1", "[::1]", "localhost"] {
        assert!(client(host).is_ok(), "{host}");
    }
    let error = client("sidecar.example").unwrap_err();
    assert!(
        matches!(error, WorkbenchClientError::InvalidAddress(_)),
        "{error}"
    );
}

#[test]
fn a_token_is_never_shown() {
    let address = WorkbenchAddress::Unix("/nowhere".into());
    let client = WorkbenchClient::new(address, Duration::ZERO, Some("open-sesame")).unwrap();
    assert!(!format!("{client:?}").contains("sesame"));
    let address = WorkbenchAddress::Unix("/nowhere".into());
    assert!(WorkbenchClient::new(address, Duration::ZERO, Some("a\nb")).is_err());
}
