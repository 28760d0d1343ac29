//! The gate's own certificate authority: what a sandbox trusts in place of the world's.
//!
//! One per installation, in one file of the state directory that is replaced whole, so that
//! a crash leaves the old one or the new one. A new root is signed by the old key as well
//! (a bridge): a sandbox that was made before trusts only the old root, and finds its way
//! from a new leaf over the bridge until that old root's own end. The old key is gone by
//! then.
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

/// How long a root counts.
const ROOT_LIFE: Duration = Duration::from_secs(90 * 24 * 60 * 60);

/// With less than this left, a gate makes a new root, when it starts and while it runs: every
/// sandbox that runs gets the new one long before the old one ends.
const RENEW_BEFORE: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// How long a leaf counts.
pub const LEAF_LIFE: Duration = Duration::from_secs(24 * 60 * 60);

/// Clocks differ: what is made now counts since a while ago.
const SKEW: Duration = Duration::from_secs(60 * 60);

/// Whose roots are.
const ORGANIZATION: &str = "Palisade";

/// The file with the key.
const FILE: &str = "authority.json";

/// The root alone, for programs of the operator's that want to trust it.
const PUBLIC: &str = "ca.pem";

/// What went wrong with the authority.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    /// The file cannot be read or written.
    #[error("the certificate authority at {path} cannot be {what}: {source}")]
    File {
        /// Where it is.
        path: PathBuf,
        /// Read or written.
        what: &'static str,
        /// Why.
        source: std::io::Error,
    },
    /// The file says nothing we wrote.
    #[error(
        "the certificate authority at {path} is damaged ({detail}). Move the file away to have a \
         new one made; sandboxes that exist then have to be made anew"
    )]
    Damaged {
        /// Where it is.
        path: PathBuf,
        /// What is wrong with it.
        detail: String,
    },
    /// The library refused.
    #[error("a certificate could not be made: {0}")]
    Make(#[from] rcgen::Error),
    /// There is no randomness.
    #[error("the system gives no random numbers")]
    NoRandomness,
}

/// The authority, as it is used.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    kept: Kept,
    bridges: Vec<CertificateDer<'static>>,
}

/// The authority, as it is kept.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Kept {
    name: String,
    key: String,
    root: String,
    expires: UnixMillis,
    /// This root's key, signed by older ones; the newest first.
    bridges: Vec<Bridge>,
}

/// A root's key with the signature of the one before it.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Bridge {
    certificate: String,
    expires: UnixMillis,
}

/// A certificate for one host, with its key.
pub struct Leaf {
    /// The certificate, and the bridges to older roots.
    pub chain: Vec<CertificateDer<'static>>,
    /// The key, which is the leaf's own.
    pub key: PrivateKeyDer<'static>,
    /// When it ends.
    pub expires: UnixMillis,
}

impl Authority {
    /// The authority in `dir`. One that is not there, or is close to its end, is made.
    /// Blocks.
    pub fn open(dir: &Path, now: UnixMillis) -> Result<Self, AuthorityError> {
        match read(dir)? {
            Some(kept) if !kept.time_to_renewal(now).is_zero() => {
                publish(dir, &kept)?;
                Self::of(dir, kept)
            }
            Some(kept) => Self::renew(dir, Some(&kept), now),
            None => Self::renew(dir, None, now),
        }
    }

    /// Puts a new root in the place of the one in `dir`. Blocks.
    pub fn rotate(dir: &Path, now: UnixMillis) -> Result<Self, AuthorityError> {
        Self::renew(dir, read(dir)?.as_ref(), now)
    }

    fn renew(dir: &Path, before: Option<&Kept>, now: UnixMillis) -> Result<Self, AuthorityError> {
        let mark = random::<4>()?.map(|byte| format!("{byte:02x}")).concat();
        let name = format!("Palisade gate {mark}");
        let key = KeyPair::generate()?;
        let expires = now.plus(ROOT_LIFE);
        let params = root_params(&name, now, expires)?;
        let root = params.self_signed(&key)?.pem();
        let mut bridges = Vec::new();
        if let Some(before) = before.filter(|before| before.expires > now) {
            let issuer = before.issuer(dir)?;
            let params = root_params(&name, now, before.expires)?;
            bridges.push(Bridge {
                certificate: params.signed_by(&key, &issuer)?.pem(),
                expires: before.expires,
            });
            bridges.extend(before.bridges.iter().filter(|b| b.expires > now).cloned());
        }
        let kept = Kept {
            name,
            key: key.serialize_pem(),
            root,
            expires,
            bridges,
        };
        write(dir, &kept)?;
        publish(dir, &kept)?;
        Self::of(dir, kept)
    }

    fn of(dir: &Path, kept: Kept) -> Result<Self, AuthorityError> {
        let issuer = kept.issuer(dir)?;
        let bridges = kept
            .bridges
            .iter()
            .map(|bridge| CertificateDer::from_pem_slice(bridge.certificate.as_bytes()))
            .collect::<Result<_, _>>()
            .map_err(|error| damaged(dir, error.to_string()))?;
        Ok(Self {
            issuer,
            kept,
            bridges,
        })
    }

    /// The root certificate, for those who shall trust it.
    pub fn root_pem(&self) -> &str {
        &self.kept.root
    }

    /// The hash of its name, by which OpenSSL finds it in a directory of certificates.
    pub fn subject_hash(&self) -> u32 {
        subject::hash(&[
            (subject::COMMON_NAME, &self.kept.name),
            (subject::ORGANIZATION, ORGANIZATION),
        ])
    }

    /// The name on it.
    pub fn name(&self) -> &str {
        &self.kept.name
    }

    /// When it ends.
    pub fn expires(&self) -> UnixMillis {
        self.kept.expires
    }

    /// How long this root stays in use; zero when a new one is due.
    pub fn time_to_renewal(&self, now: UnixMillis) -> Duration {
        self.kept.time_to_renewal(now)
    }

    /// How many older roots still lead here.
    pub fn bridges(&self, now: UnixMillis) -> usize {
        self.live_bridges(now).count()
    }

    fn live_bridges(&self, now: UnixMillis) -> impl Iterator<Item = &CertificateDer<'static>> {
        let all = self.bridges.iter().zip(&self.kept.bridges);
        all.filter(move |(_, bridge)| bridge.expires > now)
            .map(|(certificate, _)| certificate)
    }

    /// A certificate for `host` and nothing else, with a key of its own.
    pub fn mint(&self, host: &Host, now: UnixMillis) -> Result<Leaf, AuthorityError> {
        let key = KeyPair::generate()?;
        let expires = now.plus(LEAF_LIFE).min(self.kept.expires);
        let mut params = CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        // A common name has 64 characters at most (X.520); the alternative name is what counts.
        let shown = host.to_string();
        params.distinguished_name.push(
            DnType::CommonName,
            if shown.len() <= 64 {
                &shown
            } else {
                "Palisade"
            },
        );
        params.subject_alt_names = vec![match host {
            Host::Name(name) => SanType::DnsName(name.as_str().try_into()?),
            Host::Ip(ip) => SanType::IpAddress(*ip),
        }];
        params.not_before = moment(back(now, SKEW));
        params.not_after = moment(expires);
        params.serial_number = Some(serial()?);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        let certificate = params.signed_by(&key, &self.issuer)?;
        let mut chain = vec![certificate.der().clone()];
        chain.extend(self.live_bridges(now).cloned());
        Ok(Leaf {
            chain,
            key: PrivatePkcs8KeyDer::from(key.serialize_der()).into(),
            expires,
        })
    }
}

/// Everything but the key.
impl std::fmt::Debug for Authority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Authority")
            .field("name", &self.kept.name)
            .field("expires", &self.kept.expires)
            .finish_non_exhaustive()
    }
}

impl Kept {
    fn time_to_renewal(&self, now: UnixMillis) -> Duration {
        let left = back(self.expires, RENEW_BEFORE)
            .get()
            .saturating_sub(now.get());
        Duration::from_millis(u64::try_from(left).unwrap_or_default())
    }

    fn issuer(&self, dir: &Path) -> Result<Issuer<'static, KeyPair>, AuthorityError> {
        let key = KeyPair::from_pem(&self.key).map_err(|error| damaged(dir, error.to_string()))?;
        // Of the parameters an issuer needs its name and usages, which never change.
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
    params.not_before = moment(back(now, SKEW));
    params.not_after = moment(expires);
    params.serial_number = Some(serial()?);
    params.use_authority_key_identifier_extension = true;
    Ok(params)
}

fn back(moment: UnixMillis, by: Duration) -> UnixMillis {
    let by = i64::try_from(by.as_millis()).unwrap_or(i64::MAX);
    UnixMillis::new(moment.get().saturating_sub(by))
}

fn moment(at: UnixMillis) -> OffsetDateTime {
    // Beyond the calendar's end there is nothing to sign for.
    OffsetDateTime::from_unix_timestamp(at.get().div_euclid(1_000))
        .unwrap_or(OffsetDateTime::UNIX_EPOCH)
}

/// RFC 5280, 4.1.2.2: positive, and 20 octets at most.
fn serial() -> Result<SerialNumber, AuthorityError> {
    let mut bytes = random::<16>()?;
    if let Some(first) = bytes.first_mut() {
        *first = (*first & 0x7f) | 0x40;
    }
    Ok(SerialNumber::from_slice(&bytes))
}

fn random<const N: usize>() -> Result<[u8; N], AuthorityError> {
    let mut bytes = [0; N];
    rustls::crypto::aws_lc_rs::default_provider()
        .secure_random
        .fill(&mut bytes)
        .map_err(|_| AuthorityError::NoRandomness)?;
    Ok(bytes)
}

fn damaged(dir: &Path, detail: String) -> AuthorityError {
    AuthorityError::Damaged {
        path: dir.join(FILE),
        detail,
    }
}

fn read(dir: &Path) -> Result<Option<Kept>, AuthorityError> {
    let path = dir.join(FILE);
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(source) => {
            let what = "read";
            return Err(AuthorityError::File { path, what, source });
        }
    };
    // What serde says of a value may quote it, and a value may be the key.
    let kept = serde_json::from_str(&text).map_err(|error| {
        let (line, column) = (error.line(), error.column());
        damaged(dir, format!("line {line}, column {column}"))
    })?;
    Ok(Some(kept))
}

fn write(dir: &Path, kept: &Kept) -> Result<(), AuthorityError> {
    let text = serde_json::to_string_pretty(kept).map_err(|error| AuthorityError::File {
        path: dir.join(FILE),
        what: "written",
        source: error.into(),
    })?;
    replace(dir, FILE, text.as_bytes(), 0o600)
}

fn publish(dir: &Path, kept: &Kept) -> Result<(), AuthorityError> {
    if std::fs::read_to_string(dir.join(PUBLIC)).is_ok_and(|there| there == kept.root) {
        return Ok(());
    }
    replace(dir, PUBLIC, kept.root.as_bytes(), 0o644)
}

/// Puts a file in its place whole, and on disk.
fn replace(dir: &Path, name: &str, bytes: &[u8], mode: u32) -> Result<(), AuthorityError> {
    let path = dir.join(name);
    let written = || -> std::io::Result<()> {
        let draft = dir.join(format!("{name}.new"));
        match std::fs::remove_file(&draft) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            Ok(()) | Err(_) => {}
        }
        let mut options = OpenOptions::new();
        let mut file = options
            .write(true)
            .create_new(true)
            .mode(mode)
            .open(&draft)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        std::fs::rename(&draft, &path)?;
        File::open(dir)?.sync_all()
    };
    written().map_err(|source| AuthorityError::File {
        path: path.clone(),
        what: "written",
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

    /// Whether a client that trusts `root` takes `leaf` for `name`.
    fn trusts(root: &str, leaf: &Leaf, name: &str, at: UnixMillis) -> bool {
        let mut roots = rustls::RootCertStore::empty();
        roots
            .add(CertificateDer::from_pem_slice(root.as_bytes()).unwrap())
            .unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider)
            .build()
            .unwrap();
        let (end, between) = leaf.chain.split_first().unwrap();
        let at = Duration::from_millis(at.get().unsigned_abs());
        let at = UnixTime::since_unix_epoch(at);
        let name = ServerName::try_from(name.to_owned()).unwrap();
        verifier
            .verify_server_cert(end, between, &name, &[], at)
            .is_ok()
    }

    #[test]
    fn a_leaf_is_good_for_its_host_and_its_day_only() {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::open(dir.path(), NOW).unwrap();
        let root = authority.root_pem();
        for (name, other) in [
            ("api.example.com", "example.com"),
            ("192.0.2.7", "192.0.2.8"),
            ("2001:db8::7", "2001:db8::8"),
        ] {
            let leaf = authority.mint(&host(name), NOW).unwrap();
            assert!(trusts(root, &leaf, name, NOW), "{name}");
            assert!(!trusts(root, &leaf, other, NOW), "{other}");
            let later = NOW.plus(LEAF_LIFE).plus(Duration::from_secs(1));
            assert!(!trusts(root, &leaf, name, later));
        }
        let long = ["a".repeat(60), "b".repeat(60), "example.com".into()].join(".");
        let leaf = authority.mint(&host(&long), NOW).unwrap();
        assert!(trusts(root, &leaf, &long, NOW));
    }

    #[test]
    fn the_next_start_has_the_same_root_and_nobody_else_reads_the_key() {
        let dir = tempfile::tempdir().unwrap();
        let first = Authority::open(dir.path(), NOW).unwrap();
        let again = Authority::open(dir.path(), NOW).unwrap();
        assert_eq!(first.root_pem(), again.root_pem());
        let leaf = again.mint(&host("x.example"), NOW).unwrap();
        assert!(trusts(first.root_pem(), &leaf, "x.example", NOW));
        let mode = |name| {
            let file = std::fs::metadata(dir.path().join(name)).unwrap();
            file.permissions().mode() & 0o777
        };
        assert_eq!(mode(FILE), 0o600);
        let public = std::fs::read_to_string(dir.path().join(PUBLIC)).unwrap();
        assert_eq!(public, first.root_pem());
        assert!(!format!("{first:?}").contains("PRIVATE"));
    }

    #[test]
    fn a_sandbox_with_an_old_root_trusts_what_newer_ones_sign() {
        let dir = tempfile::tempdir().unwrap();
        let first = Authority::open(dir.path(), NOW).unwrap();
        let second = Authority::rotate(dir.path(), NOW).unwrap();
        let third = Authority::rotate(dir.path(), NOW).unwrap();
        assert_ne!(first.root_pem(), second.root_pem());
        assert_eq!(third.bridges(NOW), 2);
        let leaf = third.mint(&host("x.example"), NOW).unwrap();
        for root in [&first, &second, &third] {
            assert!(trusts(root.root_pem(), &leaf, "x.example", NOW), "{root:?}");
        }
        // And never the other way round: what is gone signs nothing new.
        let old = first.mint(&host("x.example"), NOW).unwrap();
        assert!(!trusts(third.root_pem(), &old, "x.example", NOW));
    }

    #[test]
    fn a_root_near_its_end_is_renewed_and_bridges_end_with_their_root() {
        let dir = tempfile::tempdir().unwrap();
        let first = Authority::open(dir.path(), NOW).unwrap();
        let soon = NOW.plus(ROOT_LIFE - RENEW_BEFORE);
        let second = Authority::open(dir.path(), soon).unwrap();
        assert_ne!(first.root_pem(), second.root_pem());
        let leaf = second.mint(&host("x.example"), soon).unwrap();
        assert!(trusts(first.root_pem(), &leaf, "x.example", soon));
        let after = NOW.plus(ROOT_LIFE).plus(Duration::from_secs(1));
        let third = Authority::rotate(dir.path(), after).unwrap();
        assert_eq!(third.bridges(after), 1, "the first root has ended");
    }

    // Issue 14, number 8.
    #[test]
    fn a_root_in_use_is_due_thirty_days_before_its_end_and_once() {
        let dir = tempfile::tempdir().unwrap();
        let first = Authority::open(dir.path(), NOW).unwrap();
        let day = Duration::from_secs(24 * 60 * 60);
        let due = NOW.plus(60 * day);
        assert_eq!(first.time_to_renewal(NOW), 60 * day);
        let before = back(due, Duration::from_millis(1));
        assert_eq!(first.time_to_renewal(before), Duration::from_millis(1));
        for late in [due, due.plus(day), due.plus(365 * day)] {
            assert_eq!(first.time_to_renewal(late), Duration::ZERO);
        }
        let second = Authority::rotate(dir.path(), due).unwrap();
        assert_eq!(second.time_to_renewal(due), 60 * day, "once");
        // The old root verifies until its very end, the new one alone for as long.
        let end = back(NOW.plus(90 * day), Duration::from_secs(1));
        let leaf = second.mint(&host("x.example"), end).unwrap();
        for root in [&first, &second] {
            assert!(trusts(root.root_pem(), &leaf, "x.example", end), "{root:?}");
        }
        // After that the bridge is not sent any more.
        let after = NOW.plus(90 * day);
        let leaf = second.mint(&host("x.example"), after).unwrap();
        assert_eq!((leaf.chain.len(), second.bridges(after)), (1, 0));
        assert!(trusts(second.root_pem(), &leaf, "x.example", after));
    }

    #[test]
    fn a_damaged_file_is_an_error_that_shows_no_key() {
        let dir = tempfile::tempdir().unwrap();
        Authority::open(dir.path(), NOW).unwrap();
        let path = dir.path().join(FILE);
        let text = std::fs::read_to_string(&path).unwrap();
        for bad in [
            text.replace("\"key\":", "\"key\": 1, \"kez\":"),
            text.replace("BEGIN PRIVATE", "BEGIN PUBLIC"),
            String::new(),
        ] {
            std::fs::write(&path, bad).unwrap();
            let error = Authority::open(dir.path(), NOW).unwrap_err();
            assert!(matches!(error, AuthorityError::Damaged { .. }), "{error:?}");
            // The directory has a random name.
            let said = format!("{error} {error:?}").replace(&*dir.path().to_string_lossy(), "");
            assert!(!said.contains("MI"), "{error:?}");
        }
    }
}
