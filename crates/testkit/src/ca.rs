//! A certificate authority for the servers of a test.
#![expect(
    clippy::expect_used,
    reason = "a test without certificates cannot continue"
)]

use std::path::PathBuf;

use rcgen::{BasicConstraints, Certificate, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};

/// A certificate authority, made for one test.
pub struct Ca {
    issuer: Issuer<'static, KeyPair>,
    root: Certificate,
}

/// A certificate and its key.
#[derive(Debug)]
pub struct TlsIdentity {
    /// The certificate.
    pub certificate: CertificateDer<'static>,
    /// Its key.
    pub key: PrivateKeyDer<'static>,
}

impl Clone for TlsIdentity {
    fn clone(&self) -> Self {
        Self {
            certificate: self.certificate.clone(),
            key: self.key.clone_key(),
        }
    }
}

impl Ca {
    /// A new authority with a self-signed root that no program trusts yet.
    pub fn new(name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key");
        let root = params.self_signed(&key).expect("a root");
        Self {
            issuer: Issuer::new(params, key),
            root,
        }
    }

    /// The root certificate in PEM.
    pub fn pem(&self) -> String {
        self.root.pem()
    }

    /// Writes the root certificate into `directory` and returns its path, for `egress.extra_roots`.
    pub fn write(&self, directory: &std::path::Path) -> PathBuf {
        let path = directory.join("root.pem");
        std::fs::write(&path, self.pem()).expect("a writable directory");
        path
    }

    /// A certificate for `names`, which may be addresses.
    pub fn identity(&self, names: &[&str]) -> TlsIdentity {
        self.sign(params(names))
    }

    /// A certificate that has expired.
    pub fn expired(&self, names: &[&str]) -> TlsIdentity {
        let mut params = params(names);
        params.not_before = rcgen::date_time_ymd(2001, 1, 1);
        params.not_after = rcgen::date_time_ymd(2002, 1, 1);
        self.sign(params)
    }

    fn sign(&self, params: CertificateParams) -> TlsIdentity {
        let key = KeyPair::generate().expect("a key");
        let certificate = params.signed_by(&key, &self.issuer).expect("a signature");
        TlsIdentity {
            certificate: certificate.der().clone(),
            key: PrivatePkcs8KeyDer::from(key.serialize_der()).into(),
        }
    }
}

fn params(names: &[&str]) -> CertificateParams {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    CertificateParams::new(names).expect("valid certificate names")
}
