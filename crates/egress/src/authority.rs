//! The gate's certificate authority: issues the leaf certificates that sandboxes trust.
//!
//! Each installation has one authority, in one file of the state directory. The file is replaced
//! atomically, so that a crash leaves the old or the new content. A new root is also cross-signed
//! by the old key: a sandbox that was created earlier trusts only the old root, and can verify new
//! leaves through the cross-signed certificate until the old root expires. The old key itself is
//! deleted at once.
//!
//! **Never here:** the key in a message, a log line or a sandbox.

mod subject;

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use policy::clock::UnixMillis;
use policy::host::Host;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType, SerialNumber,
};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;

/// Validity of a root.
const ROOT_LIFETIME: Duration = Duration::from_secs(90 * 24 * 60 * 60);

/// Remaining validity below which the gate creates a new root, at its start and while it runs:
/// every running sandbox gets the new root long before the old one expires.
const RENEW_BEFORE: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// Validity of a leaf.
pub const LEAF_LIFETIME: Duration = Duration::from_secs(24 * 60 * 60);

/// New certificates are valid from this long ago, because clocks differ.
const CLOCK_SKEW: Duration = Duration::from_secs(60 * 60);

/// The organization in the subject of roots.
const ORGANIZATION: &str = "Palisade";

/// The file with the key and the certificates.
const AUTHORITY_FILE: &str = "authority.json";

/// The file with the root certificate alone, for the operator's programs.
const ROOT_FILE: &str = "ca.pem";

/// Errors of the certificate authority.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    /// The file cannot be read or written.
    #[error("the certificate authority at {path} cannot be {operation}: {source}")]
    File {
        /// The path of the file.
        path: PathBuf,
        /// `read` or `written`.
        operation: &'static str,
        /// The I/O error.
        source: std::io::Error,
    },
    /// The content of the file is invalid.
    #[error(
        "the certificate authority at {path} is damaged ({detail}). Move the file away, and \
         the gate creates a new one; recreate existing sandboxes afterwards"
    )]
    Damaged {
        /// The path of the file.
        path: PathBuf,
        /// The error.
        detail: String,
    },
    /// The library failed to create a certificate.
    #[error("creating a certificate failed: {0}")]
    Make(#[from] rcgen::Error),
    /// The system's random number generator failed.
    #[error("the system's random number generator failed")]
    NoRandomness,
}

/// The certificate authority of the gate.
pub struct CertificateAuthority {
    issuer: Issuer<'static, KeyPair>,
    stored: StoredAuthority,
    cross_signed: Vec<CertificateDer<'static>>,
}

/// The content of the authority file.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredAuthority {
    name: String,
    key: String,
    root: String,
    expires: UnixMillis,
    /// This root's key, cross-signed by older roots; the newest first.
    #[serde(rename = "bridges")]
    cross_signed: Vec<CrossSignedRoot>,
}

/// A root's key, signed by an older root.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct CrossSignedRoot {
    certificate: String,
    expires: UnixMillis,
}

/// A certificate for one host, with its key.
pub struct Leaf {
    /// The certificate, and the cross-signed roots.
    pub chain: Vec<CertificateDer<'static>>,
    /// The private key of the leaf.
    pub key: PrivateKeyDer<'static>,
    /// The end of the certificate's validity.
    pub expires: UnixMillis,
}

impl CertificateAuthority {
    /// Loads the authority in `dir`. Creates a new one if it is missing or expires soon. Blocks.
    pub fn open(dir: &Path, now: UnixMillis) -> Result<Self, AuthorityError> {
        match read_authority_file(dir)? {
            Some(stored) if !stored.time_to_renewal(now).is_zero() => {
                write_root_file(dir, &stored)?;
                Self::from_stored(dir, stored)
            }
            Some(stored) => Self::renew(dir, Some(&stored), now),
            None => Self::renew(dir, None, now),
        }
    }

    /// Replaces the root in `dir` by a new one. Blocks.
    pub fn rotate(dir: &Path, now: UnixMillis) -> Result<Self, AuthorityError> {
        Self::renew(dir, read_authority_file(dir)?.as_ref(), now)
    }

    fn renew(
        dir: &Path,
        previous: Option<&StoredAuthority>,
        now: UnixMillis,
    ) -> Result<Self, AuthorityError> {
        let suffix = random_bytes::<4>()?
            .map(|byte| format!("{byte:02x}"))
            .concat();
        let name = format!("Palisade gate {suffix}");
        let key = KeyPair::generate()?;
        let expires = now.plus(ROOT_LIFETIME);
        let params = root_params(&name, now, expires)?;
        let root = params.self_signed(&key)?.pem();
        let mut cross_signed = Vec::new();
        if let Some(previous) = previous.filter(|previous| previous.expires > now) {
            let issuer = previous.issuer(dir)?;
            let params = root_params(&name, now, previous.expires)?;
            cross_signed.push(CrossSignedRoot {
                certificate: params.signed_by(&key, &issuer)?.pem(),
                expires: previous.expires,
            });
            cross_signed.extend(
                previous
                    .cross_signed
                    .iter()
                    .filter(|root| root.expires > now)
                    .cloned(),
            );
        }
        let stored = StoredAuthority {
            name,
            key: key.serialize_pem(),
            root,
            expires,
            cross_signed,
        };
        write_authority_file(dir, &stored)?;
        write_root_file(dir, &stored)?;
        Self::from_stored(dir, stored)
    }

    fn from_stored(dir: &Path, stored: StoredAuthority) -> Result<Self, AuthorityError> {
        let issuer = stored.issuer(dir)?;
        let cross_signed = stored
            .cross_signed
            .iter()
            .map(|root| CertificateDer::from_pem_slice(root.certificate.as_bytes()))
            .collect::<Result<_, _>>()
            .map_err(|error| damaged_error(dir, error.to_string()))?;
        Ok(Self {
            issuer,
            stored,
            cross_signed,
        })
    }

    /// The root certificate in PEM.
    pub fn root_pem(&self) -> &str {
        &self.stored.root
    }

    /// The hash of the root's subject, by which OpenSSL finds it in a directory of certificates.
    pub fn subject_hash(&self) -> u32 {
        subject::hash(&[
            (subject::COMMON_NAME, &self.stored.name),
            (subject::ORGANIZATION, ORGANIZATION),
        ])
    }

    /// The common name of the root.
    pub fn name(&self) -> &str {
        &self.stored.name
    }

    /// The end of the root's validity.
    pub fn expires(&self) -> UnixMillis {
        self.stored.expires
    }

    /// The time until this root is due for renewal; zero if it is due now.
    pub fn time_to_renewal(&self, now: UnixMillis) -> Duration {
        self.stored.time_to_renewal(now)
    }

    /// The number of older roots that still verify this root.
    pub fn cross_signed_count(&self, now: UnixMillis) -> usize {
        self.valid_cross_signed(now).count()
    }

    fn valid_cross_signed(
        &self,
        now: UnixMillis,
    ) -> impl Iterator<Item = &CertificateDer<'static>> {
        let all = self.cross_signed.iter().zip(&self.stored.cross_signed);
        all.filter(move |(_, root)| root.expires > now)
            .map(|(certificate, _)| certificate)
    }

    /// Issues a certificate for `host` alone, with a new key.
    pub fn mint(&self, host: &Host, now: UnixMillis) -> Result<Leaf, AuthorityError> {
        let key = KeyPair::generate()?;
        let expires = now.plus(LEAF_LIFETIME).min(self.stored.expires);
        let mut params = CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        // A common name has 64 characters at most (X.520); clients check the alternative name.
        let common_name = host.to_string();
        params.distinguished_name.push(
            DnType::CommonName,
            if common_name.len() <= 64 {
                &common_name
            } else {
                "Palisade"
            },
        );
        params.subject_alt_names = vec![match host {
            Host::Name(name) => SanType::DnsName(name.as_str().try_into()?),
            Host::Ip(ip) => SanType::IpAddress(*ip),
        }];
        params.not_before = to_date(minus(now, CLOCK_SKEW));
        params.not_after = to_date(expires);
        params.serial_number = Some(random_serial()?);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        let certificate = params.signed_by(&key, &self.issuer)?;
        let mut chain = vec![certificate.der().clone()];
        chain.extend(self.valid_cross_signed(now).cloned());
        Ok(Leaf {
            chain,
            key: PrivatePkcs8KeyDer::from(key.serialize_der()).into(),
            expires,
        })
    }
}

/// The debug output omits the key.
impl std::fmt::Debug for CertificateAuthority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Authority")
            .field("name", &self.stored.name)
            .field("expires", &self.stored.expires)
            .finish_non_exhaustive()
    }
}

impl StoredAuthority {
    fn time_to_renewal(&self, now: UnixMillis) -> Duration {
        let left = minus(self.expires, RENEW_BEFORE)
            .get()
            .saturating_sub(now.get());
        Duration::from_millis(u64::try_from(left).unwrap_or_default())
    }

    fn issuer(&self, dir: &Path) -> Result<Issuer<'static, KeyPair>, AuthorityError> {
        let key =
            KeyPair::from_pem(&self.key).map_err(|error| damaged_error(dir, error.to_string()))?;
        // An issuer only needs the name and the usages, which never change.
        let params = root_params(&self.name, UnixMillis::new(0), self.expires)?;
        Ok(Issuer::new(params, key))
    }
}

fn root_params(
    name: &str,
    now: UnixMillis,
    expires: UnixMillis,
) -> Result<CertificateParams, AuthorityError> {
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params
        .distinguished_name
        .push(DnType::OrganizationName, ORGANIZATION);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.not_before = to_date(minus(now, CLOCK_SKEW));
    params.not_after = to_date(expires);
    params.serial_number = Some(random_serial()?);
    params.use_authority_key_identifier_extension = true;
    Ok(params)
}

fn minus(time: UnixMillis, by: Duration) -> UnixMillis {
    let by = i64::try_from(by.as_millis()).unwrap_or(i64::MAX);
    UnixMillis::new(time.get().saturating_sub(by))
}

fn to_date(at: UnixMillis) -> OffsetDateTime {
    // A time outside of the calendar gives a certificate that is not valid.
    OffsetDateTime::from_unix_timestamp(at.get().div_euclid(1_000))
        .unwrap_or(OffsetDateTime::UNIX_EPOCH)
}

/// A random serial number: positive, and 20 octets at most (RFC 5280, 4.1.2.2).
fn random_serial() -> Result<SerialNumber, AuthorityError> {
    let mut bytes = random_bytes::<16>()?;
    if let Some(first) = bytes.first_mut() {
        *first = (*first & 0x7f) | 0x40;
    }
    Ok(SerialNumber::from_slice(&bytes))
}

fn random_bytes<const N: usize>() -> Result<[u8; N], AuthorityError> {
    let mut bytes = [0; N];
    rustls::crypto::aws_lc_rs::default_provider()
        .secure_random
        .fill(&mut bytes)
        .map_err(|_| AuthorityError::NoRandomness)?;
    Ok(bytes)
}

fn damaged_error(dir: &Path, detail: String) -> AuthorityError {
    AuthorityError::Damaged {
        path: dir.join(AUTHORITY_FILE),
        detail,
    }
}

fn read_authority_file(dir: &Path) -> Result<Option<StoredAuthority>, AuthorityError> {
    let path = dir.join(AUTHORITY_FILE);
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(source) => {
            let operation = "read";
            return Err(AuthorityError::File {
                path,
                operation,
                source,
            });
        }
    };
    // serde's message may quote a value, and a value may be the key.
    let stored = serde_json::from_str(&text).map_err(|error| {
        let (line, column) = (error.line(), error.column());
        damaged_error(dir, format!("line {line}, column {column}"))
    })?;
    Ok(Some(stored))
}

fn write_authority_file(dir: &Path, stored: &StoredAuthority) -> Result<(), AuthorityError> {
    let text = serde_json::to_string_pretty(stored).map_err(|error| AuthorityError::File {
        path: dir.join(AUTHORITY_FILE),
        operation: "written",
        source: error.into(),
    })?;
    replace_file(dir, AUTHORITY_FILE, text.as_bytes(), 0o600)
}

fn write_root_file(dir: &Path, stored: &StoredAuthority) -> Result<(), AuthorityError> {
    if std::fs::read_to_string(dir.join(ROOT_FILE)).is_ok_and(|current| current == stored.root) {
        return Ok(());
    }
    replace_file(dir, ROOT_FILE, stored.root.as_bytes(), 0o644)
}

/// Replaces a file atomically, and syncs it to disk.
fn replace_file(dir: &Path, name: &str, bytes: &[u8], mode: u32) -> Result<(), AuthorityError> {
    let path = dir.join(name);
    let written = || -> std::io::Result<()> {
        let temporary = dir.join(format!("{name}.new"));
        match std::fs::remove_file(&temporary) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            Ok(()) | Err(_) => {}
        }
        let mut options = OpenOptions::new();
        let mut file = options
            .write(true)
            .create_new(true)
            .mode(mode)
            .open(&temporary)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        std::fs::rename(&temporary, &path)?;
        File::open(dir)?.sync_all()
    };
    written().map_err(|source| AuthorityError::File {
        path: path.clone(),
        operation: "written",
        source,
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::sync::Arc;

    use rustls::client::WebPkiServerVerifier;
    use rustls::client::danger::ServerCertVerifier;
    use rustls_pki_types::{ServerName, UnixTime};

    use super::*;

    const NOW: UnixMillis = UnixMillis::new(1_800_000_000_000);

    fn host(text: &str) -> Host {
        Host::parse(text).unwrap()
    }

    /// Whether a client that trusts `root` accepts `leaf` for `name`.
    fn trusts(root: &str, leaf: &Leaf, name: &str, at: UnixMillis) -> bool {
        let mut roots = rustls::RootCertStore::empty();
        roots
            .add(CertificateDer::from_pem_slice(root.as_bytes()).unwrap())
            .unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider)
            .build()
            .unwrap();
        let (end, intermediates) = leaf.chain.split_first().unwrap();
        let at = Duration::from_millis(at.get().unsigned_abs());
        let at = UnixTime::since_unix_epoch(at);
        let name = ServerName::try_from(name.to_owned()).unwrap();
        verifier
            .verify_server_cert(end, intermediates, &name, &[], at)
            .is_ok()
    }

    #[test]
    fn leaf_is_valid_for_its_host_and_lifetime_only() {
        let dir = tempfile::tempdir().unwrap();
        let authority = CertificateAuthority::open(dir.path(), NOW).unwrap();
        let root = authority.root_pem();
        for (name, other) in [
            ("api.example.com", "example.com"),
            ("192.0.2.7", "192.0.2.8"),
            ("2001:db8::7", "2001:db8::8"),
        ] {
            let leaf = authority.mint(&host(name), NOW).unwrap();
            assert!(trusts(root, &leaf, name, NOW), "{name}");
            assert!(!trusts(root, &leaf, other, NOW), "{other}");
            let later = NOW.plus(LEAF_LIFETIME).plus(Duration::from_secs(1));
            assert!(!trusts(root, &leaf, name, later));
        }
        let long = ["a".repeat(60), "b".repeat(60), "example.com".into()].join(".");
        let leaf = authority.mint(&host(&long), NOW).unwrap();
        assert!(trusts(root, &leaf, &long, NOW));
    }

    #[test]
    fn reopened_authority_keeps_root_and_key_file_is_private() {
        let dir = tempfile::tempdir().unwrap();
        let first = CertificateAuthority::open(dir.path(), NOW).unwrap();
        let again = CertificateAuthority::open(dir.path(), NOW).unwrap();
        assert_eq!(first.root_pem(), again.root_pem());
        let leaf = again.mint(&host("x.example"), NOW).unwrap();
        assert!(trusts(first.root_pem(), &leaf, "x.example", NOW));
        let mode = |name| {
            let file = std::fs::metadata(dir.path().join(name)).unwrap();
            file.permissions().mode() & 0o777
        };
        assert_eq!(mode(AUTHORITY_FILE), 0o600);
        let public = std::fs::read_to_string(dir.path().join(ROOT_FILE)).unwrap();
        assert_eq!(public, first.root_pem());
        assert!(!format!("{first:?}").contains("PRIVATE"));
    }

    #[test]
    fn old_root_verifies_leaves_of_newer_roots() {
        let dir = tempfile::tempdir().unwrap();
        let first = CertificateAuthority::open(dir.path(), NOW).unwrap();
        let second = CertificateAuthority::rotate(dir.path(), NOW).unwrap();
        let third = CertificateAuthority::rotate(dir.path(), NOW).unwrap();
        assert_ne!(first.root_pem(), second.root_pem());
        assert_eq!(third.cross_signed_count(NOW), 2);
        let leaf = third.mint(&host("x.example"), NOW).unwrap();
        for root in [&first, &second, &third] {
            assert!(trusts(root.root_pem(), &leaf, "x.example", NOW), "{root:?}");
        }
        // But the new root does not verify leaves of the old one.
        let old = first.mint(&host("x.example"), NOW).unwrap();
        assert!(!trusts(third.root_pem(), &old, "x.example", NOW));
    }

    #[test]
    fn expiring_root_is_renewed_and_expired_cross_signatures_are_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let first = CertificateAuthority::open(dir.path(), NOW).unwrap();
        let soon = NOW.plus(ROOT_LIFETIME - RENEW_BEFORE);
        let second = CertificateAuthority::open(dir.path(), soon).unwrap();
        assert_ne!(first.root_pem(), second.root_pem());
        let leaf = second.mint(&host("x.example"), soon).unwrap();
        assert!(trusts(first.root_pem(), &leaf, "x.example", soon));
        let after = NOW.plus(ROOT_LIFETIME).plus(Duration::from_secs(1));
        let third = CertificateAuthority::rotate(dir.path(), after).unwrap();
        assert_eq!(
            third.cross_signed_count(after),
            1,
            "the first root has expired"
        );
    }

    // Issue 14, number 8.
    #[test]
    fn root_is_due_for_renewal_thirty_days_before_expiry() {
        let dir = tempfile::tempdir().unwrap();
        let first = CertificateAuthority::open(dir.path(), NOW).unwrap();
        let day = Duration::from_secs(24 * 60 * 60);
        let due = NOW.plus(60 * day);
        assert_eq!(first.time_to_renewal(NOW), 60 * day);
        let before = minus(due, Duration::from_millis(1));
        assert_eq!(first.time_to_renewal(before), Duration::from_millis(1));
        for late in [due, due.plus(day), due.plus(365 * day)] {
            assert_eq!(first.time_to_renewal(late), Duration::ZERO);
        }
        let second = CertificateAuthority::rotate(dir.path(), due).unwrap();
        assert_eq!(
            second.time_to_renewal(due),
            60 * day,
            "the new root is not due"
        );
        // Both roots verify until the old one expires.
        let end = minus(NOW.plus(90 * day), Duration::from_secs(1));
        let leaf = second.mint(&host("x.example"), end).unwrap();
        for root in [&first, &second] {
            assert!(trusts(root.root_pem(), &leaf, "x.example", end), "{root:?}");
        }
        // After that the cross-signed certificate is not sent any more.
        let after = NOW.plus(90 * day);
        let leaf = second.mint(&host("x.example"), after).unwrap();
        assert_eq!((leaf.chain.len(), second.cross_signed_count(after)), (1, 0));
        assert!(trusts(second.root_pem(), &leaf, "x.example", after));
    }

    #[test]
    fn error_of_damaged_file_does_not_contain_the_key() {
        let dir = tempfile::tempdir().unwrap();
        CertificateAuthority::open(dir.path(), NOW).unwrap();
        let path = dir.path().join(AUTHORITY_FILE);
        let text = std::fs::read_to_string(&path).unwrap();
        for bad in [
            text.replace("\"key\":", "\"key\": 1, \"kez\":"),
            text.replace("BEGIN PRIVATE", "BEGIN PUBLIC"),
            String::new(),
        ] {
            std::fs::write(&path, bad).unwrap();
            let error = CertificateAuthority::open(dir.path(), NOW).unwrap_err();
            assert!(matches!(error, AuthorityError::Damaged { .. }), "{error:?}");
            // The directory has a random name.
            let text = format!("{error} {error:?}").replace(&*dir.path().to_string_lossy(), "");
            assert!(!text.contains("MI"), "{error:?}");
        }
    }
}
