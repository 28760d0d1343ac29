use super::*;

#[test]
fn host_names_other_than_localhost_are_refused() {
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
fn debug_output_does_not_contain_the_token() {
    let address = WorkbenchAddress::Unix("/nowhere".into());
    let client = WorkbenchClient::new(address, Duration::ZERO, Some("open-sesame")).unwrap();
    assert!(!format!("{client:?}").contains("sesame"));
    let address = WorkbenchAddress::Unix("/nowhere".into());
    assert!(WorkbenchClient::new(address, Duration::ZERO, Some("a\nb")).is_err());
}
