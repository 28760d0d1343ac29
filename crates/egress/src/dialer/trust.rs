//! Root certificates for upstreams, and the TLS client configuration of each sandbox.

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

use super::error::{DialError, error_chain};

/// Hosts with resumable TLS sessions, per sandbox.
const MAX_SESSIONS: usize = 64;

/// Root certificates that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum BadRoots {
    /// A file of `egress.extra_roots` is unusable.
    #[error("egress.extra_roots: {} cannot be used: {detail}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with the file.
        detail: String,
    },
    /// rustls rejected the TLS configuration.
    #[error("TLS cannot be set up: {0}")]
    Library(#[from] rustls::Error),
}

/// Root certificates and the TLS configuration that uses them.
pub(super) struct Trust {
    certificates: Vec<CertificateDer<'static>>,
    /// `None` without any root certificate.
    tls: Option<Tls>,
}

struct Tls {
    /// Template for the configuration of each sandbox, which has its own sessions.
    pooled: ClientConfig,
    /// For single-use connections: HTTP/1.1 and no sessions.
    single: Arc<ClientConfig>,
    /// Sandboxes do not share sessions: a shared one would let an upstream link two sandboxes,
    /// and could carry the authentication of one of them to the other.
    sandboxes: Mutex<HashMap<SandboxId, Arc<ClientConfig>>>,
}

impl Trust {
    /// Reads the platform's roots and those of `extra`. A platform without roots is not an
    /// error, because TLS may not be used at all.
    pub(super) fn load(extra: &[PathBuf]) -> Result<Self, BadRoots> {
        let mut certificates = rustls_native_certs::load_native_certs().certs;
        let mut roots = RootCertStore::empty();
        // Skip entries that cannot be parsed: old system stores contain some.
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

    /// Whether both have the same root certificates.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        self.certificates == other.certificates
    }

    /// Drops the TLS sessions of a sandbox.
    pub(super) fn forget(&self, sandbox: &SandboxId) {
        if let Some(tls) = &self.tls {
            let mut sandboxes = tls.sandboxes.lock().unwrap_or_else(PoisonError::into_inner);
            sandboxes.remove(sandbox);
        }
    }

    /// Performs the TLS handshake, with the sessions of `sandbox`, or without sessions for a
    /// single-use connection. The certificate is always verified.
    pub(super) async fn handshake(
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
            Some(sandbox) => tls.config_of(sandbox),
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
                cause: handshake_failure(&error),
                detail: error_chain(&error),
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

    fn config_of(&self, sandbox: &SandboxId) -> Arc<ClientConfig> {
        let mut sandboxes = self
            .sandboxes
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let config = sandboxes.entry(sandbox.clone()).or_insert_with(|| {
            let mut config = self.pooled.clone();
            config.resumption = Resumption::in_memory_sessions(MAX_SESSIONS);
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
            detail: "the file contains no certificate".to_owned(),
        });
    }
    Ok(certificates)
}

fn bad_file(path: &Path, error: &dyn std::error::Error) -> BadRoots {
    BadRoots::File {
        path: path.to_owned(),
        detail: error_chain(error),
    }
}

/// The cause of a failed handshake, in words for the agent.
fn handshake_failure(error: &std::io::Error) -> &'static str {
    let inner = error
        .get_ref()
        .and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match inner {
        None => "the connection was closed during the handshake",
        Some(rustls::Error::InvalidCertificate(bad)) => certificate_failure(bad),
        Some(rustls::Error::AlertReceived(_)) => "the upstream rejected the handshake",
        Some(rustls::Error::PeerIncompatible(_)) => {
            "the upstream offers no secure TLS version or cipher"
        }
        Some(rustls::Error::InvalidMessage(_)) => "the upstream does not speak TLS on this port",
        Some(rustls::Error::NoCertificatesPresented) => "the upstream sent no certificate",
        // The enum of rustls is non-exhaustive.
        Some(_) => "the upstream violated the TLS protocol",
    }
}

fn certificate_failure(bad: &CertificateError) -> &'static str {
    match bad {
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            "its certificate has expired"
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            "its certificate is not valid yet"
        }
        CertificateError::Revoked => "its certificate was revoked",
        CertificateError::UnknownIssuer => "its certificate is not signed by a trusted CA",
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
            "its certificate is for another host name"
        }
        CertificateError::BadSignature => "its certificate has an invalid signature",
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
            "its certificate is not a server certificate"
        }
        // The enum of rustls is non-exhaustive.
        _ => "its certificate is not acceptable",
    }
}
