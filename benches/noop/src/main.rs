//! `noop ADDRESS CA.pem CA.key ROOT.pem`: a proxy from a library that terminates TLS on both sides
//! and makes no decisions. It measures the cost of decryption alone.

use hudsucker::Proxy;
use hudsucker::certificate_authority::RcgenAuthority;
use hudsucker::hyper_util::client::legacy::connect::HttpConnector;
use hudsucker::rcgen::{Issuer, KeyPair};
use hudsucker::rustls::crypto::aws_lc_rs;
use hudsucker::rustls::pki_types::CertificateDer;
use hudsucker::rustls::pki_types::pem::PemObject;
use hudsucker::rustls::{ClientConfig, RootCertStore};
use hyper_rustls::HttpsConnectorBuilder;
use std::fs::read_to_string;
use std::sync::Arc;

#[tokio::main]
async fn main() {
    let mut arguments = std::env::args().skip(1);
    let mut argument = || arguments.next().expect("ADDRESS CA.pem CA.key ROOT.pem");
    let address = argument().parse().expect("an address");
    let (certificate, key) = (read_to_string(argument()), read_to_string(argument()));
    let key = KeyPair::from_pem(&key.expect("a key")).expect("a key");
    let certificate = certificate.expect("a certificate");
    let issuer = Issuer::from_ca_cert_pem(&certificate, key).expect("a certificate");

    let mut roots = RootCertStore::empty();
    let root = CertificateDer::from_pem_file(argument()).expect("a root");
    roots.add(root).expect("a root");
    let tls = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    let connector = HttpsConnectorBuilder::new()
        .with_tls_config(tls)
        .https_or_http()
        .enable_http1()
        .wrap_connector(tcp);

    let proxy = Proxy::builder()
        .with_addr(address)
        .with_ca(RcgenAuthority::new(
            issuer,
            1000,
            aws_lc_rs::default_provider(),
        ))
        .with_http_connector(connector)
        .build()
        .expect("a proxy");
    proxy.start().await.expect("a listener");
}
