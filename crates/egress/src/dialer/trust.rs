//! Which certificates of upstreams are believed, and the TLS of each sandbox.

use std::collections::HashMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use policy::host::Host;
use policy::id::SandboxId;
use rustls::client::Resumption;
use rustls::crypto::aws_lc_rs;
use rustls::{CertificateError, ClientConfig, RootCertStore};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, ServerName};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::error::{DialError, said};

/// Hosts whose sessions one sandbox may resume.
const MOST_SESSIONS: usize = 64;

/// Roots that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum BadRoots {
    /// A file of `egress.extra_roots`.
    #[error("egress.extra_roots: {} cannot be used: {detail}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        detail: String,
    },
    /// The cryptography has no protocol version in common with the library.
    #[error("TLS cannot be set up: {0}")]
    Library(#[from] rustls::Error),
}

/// Roots, and what was made of them.
pub(super) struct Trust {
    certificates: Vec<CertificateDer<'static>>,
    /// None when there is no root at all.
    tls: Option<Tls>,
}

struct Tls {
    /// Of which each sandbox gets a copy with sessions of its own.
    pooled: ClientConfig,
    /// For connections that are used once: HTTP/1.1 and no sessions.
    single: Arc<ClientConfig>,
    /// A session resumed by another sandbox would tell an upstream that the two belong
    /// together, and could carry what one of them proved.
    sandboxes: Mutex<HashMap<SandboxId, Arc<ClientConfig>>>,
}

impl Trust {
    /// Reads the platform's roots and those of `extra`. A platform without roots is not an
    /// error: nobody may ask for TLS.
    pub(super) fn load(extra: &[PathBuf]) -> Result<Self, BadRoots> {
        let mut certificates = rustls_native_certs::load_native_certs().certs;
        let mut roots = RootCertStore::empty();
        // A store that has grown for decades has entries nobody can parse; those we skip.
        roots.add_parsable_certificates(certificates.iter().cloned());
        for path in extra {
            for certificate in read(path)? {
                roots
                    .add(certificate.clone())
                    .map_err(|error| bad_file(path, &error))?;
                certificates.push(certificate);
            }
        }
        let tls = (!roots.is_empty()).then(|| Tls::new(roots)).transpose()?;
        Ok(Self { certificates, tls })
    }

    /// Whether both believe the same.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        self.certificates == other.certificates
    }

    /// Forgets the sessions of a sandbox.
    pub(super) fn forget(&self, sandbox: &SandboxId) {
        if let Some(tls) = &self.tls {
            let mut sandboxes = tls.sandboxes.lock().unwrap_or_else(PoisonError::into_inner);
            sandboxes.remove(sandbox);
        }
    }

    /// The handshake, with `sandbox`'s sessions, or without any for a connection that is used
    /// once. The certificate is checked, always.
    pub(super) async fn shake(
        &self,
        sandbox: Option<&SandboxId>,
        host: &Host,
        stream: TcpStream,
    ) -> Result<TlsStream<TcpStream>, DialError> {
        let tls = self
            .tls
            .as_ref()
            .ok_or_else(|| DialError::NoRoots { host: host.clone() })?;
        let config = match sandbox {
            Some(sandbox) => tls.of(sandbox),
            None => Arc::clone(&tls.single),
        };
        let name = match host {
            Host::Name(name) => {
                ServerName::try_from(name.as_str().to_owned()).map_err(|error| {
                    DialError::BadName {
                        host: host.clone(),
                        detail: error.to_string(),
                    }
                })?
            }
            Host::Ip(IpAddr::V4(ip)) => ServerName::from(*ip),
            Host::Ip(IpAddr::V6(ip)) => ServerName::from(*ip),
        };
        TlsConnector::from(config)
            .connect(name, stream)
            .await
            .map_err(|error| DialError::Tls {
                host: host.clone(),
                says: sentence(&error),
                detail: said(&error),
            })
    }
}

impl Tls {
    fn new(roots: RootCertStore) -> Result<Self, BadRoots> {
        let mut pooled =
            ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
                .with_safe_default_protocol_versions()?
                .with_root_certificates(roots)
                .with_no_client_auth();
        pooled.resumption = Resumption::disabled();
        let mut single = pooled.clone();
        pooled.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        single.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self {
            pooled,
            single: Arc::new(single),
            sandboxes: Mutex::default(),
        })
    }

    fn of(&self, sandbox: &SandboxId) -> Arc<ClientConfig> {
        let mut sandboxes = self
            .sandboxes
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let config = sandboxes.entry(sandbox.clone()).or_insert_with(|| {
            let mut config = self.pooled.clone();
            config.resumption = Resumption::in_memory_sessions(MOST_SESSIONS);
            Arc::new(config)
        });
        Arc::clone(config)
    }
}

fn read(path: &Path) -> Result<Vec<CertificateDer<'static>>, BadRoots> {
    let certificates = CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|error| bad_file(path, &error))?;
    if certificates.is_empty() {
        return Err(BadRoots::File {
            path: path.to_owned(),
            detail: "there is no certificate in it".to_owned(),
        });
    }
    Ok(certificates)
}

fn bad_file(path: &Path, error: &dyn std::error::Error) -> BadRoots {
    BadRoots::File {
        path: path.to_owned(),
        detail: said(error),
    }
}

/// What a person needs to know of a failed handshake.
fn sentence(error: &std::io::Error) -> &'static str {
    let inner = error
        .get_ref()
        .and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match inner {
        None => "the connection ended in the middle of it",
        Some(rustls::Error::InvalidCertificate(bad)) => certificate_sentence(bad),
        Some(rustls::Error::AlertReceived(_)) => "the upstream refused it",
        Some(rustls::Error::PeerIncompatible(_)) => {
            "the upstream offers no version or cipher that is still safe"
        }
        Some(rustls::Error::InvalidMessage(_)) => "the upstream does not speak TLS on this port",
        Some(rustls::Error::NoCertificatesPresented) => "the upstream showed no certificate",
        // The library's list is open.
        Some(_) => "the upstream did not follow the protocol",
    }
}

fn certificate_sentence(bad: &CertificateError) -> &'static str {
    match bad {
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            "its certificate has expired"
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            "its certificate is not valid yet"
        }
        CertificateError::Revoked => "its certificate was revoked",
        CertificateError::UnknownIssuer => "its certificate is signed by nobody we trust",
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
            "its certificate is for another name"
        }
        CertificateError::BadSignature => "its certificate carries a false signature",
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
            "its certificate is not one for servers"
        }
        // The library's list is open.
        _ => "its certificate cannot be accepted",
    }
}
