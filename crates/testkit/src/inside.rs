//! Network namespaces of sandboxes and of tests. A thread enters the namespace and opens a socket,
//! which stays in the namespace after the thread has ended. A test can thereby send arbitrary
//! bytes from a sandbox without running a program in the sandbox.
//!
//! A test can also create a pair of network namespaces that are connected only to each other.
//!
//! Creating and entering network namespaces needs root.
#![expect(
    clippy::expect_used,
    reason = "a test without its connection cannot continue"
)]

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::process::Command;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use nix::sched::{CloneFlags, setns, unshare};
use nix::unistd::gettid;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{EchGreaseConfig, EchMode};
use rustls::crypto::CryptoProvider;
use rustls::crypto::aws_lc_rs::hpke::DH_KEM_X25519_HKDF_SHA256_AES_128;
use rustls::crypto::hpke::Hpke;
use rustls::{
    ClientConfig, ClientConnection, ConfigBuilder, DigitallySignedStruct, SignatureScheme,
    StreamOwned, WantsVerifier,
};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};
use serde_json::Value;

use crate::gate::GateDir;
use crate::wait;

/// A TLS client connection.
pub type Tls<IO> = StreamOwned<ClientConnection, IO>;

/// An open network namespace.
#[derive(Clone, Debug)]
pub struct NetNamespace(Arc<File>);

impl NetNamespace {
    /// The namespace of the sandbox with that id.
    pub fn of_sandbox(gate_dir: &GateDir, id: &str) -> Self {
        let record = gate_dir.state().join("sandboxes").join(id);
        let record = std::fs::read(record.join("record.json")).expect("a record");
        let record: Value = serde_json::from_slice(&record).expect("JSON");
        let pid = record.pointer("/init/pid").and_then(Value::as_u64);
        Self::of_process(u32::try_from(pid.expect("a process")).expect("a process id"))
    }

    /// The namespace of the process with that id.
    pub fn of_process(pid: u32) -> Self {
        let path = format!("/proc/{pid}/ns/net");
        Self(Arc::new(File::open(path).expect("a namespace")))
    }

    /// Two new namespaces with these addresses, connected by a veth pair. The kernel removes them
    /// with their last user.
    pub fn pair(addresses: [Ipv4Addr; 2]) -> [Self; 2] {
        let pair = [Self::create(), Self::create()];
        let [one, other] = &pair;
        let (entered, thread_id) = mpsc::channel();
        let (done, until) = mpsc::channel::<()>();
        std::thread::scope(|scope| {
            // `ip link set netns` names a namespace by a thread that is in it.
            scope.spawn(move || {
                other.within(move || {
                    entered.send(gettid()).expect("the receiver waits");
                    let _ = until.recv();
                });
            });
            one.within(move || {
                ip("link add name card type veth");
                let thread_id = thread_id.recv().expect("a thread");
                ip(&format!("link set veth0 netns {thread_id}"));
            });
            drop(done);
        });
        for (namespace, (card, address)) in pair.iter().zip(["card", "veth0"].iter().zip(addresses))
        {
            namespace.within(|| {
                ip("link set lo up");
                ip(&format!("addr add {address}/24 dev {card}"));
                ip(&format!("link set {card} up"));
            });
        }
        pair
    }

    /// A new namespace without interfaces.
    fn create() -> Self {
        let thread = std::thread::spawn(|| {
            unshare(CloneFlags::CLONE_NEWNET).expect("root may create a namespace");
            File::open("/proc/thread-self/ns/net").expect("a namespace")
        });
        Self(Arc::new(thread.join().expect("the thread does not panic")))
    }

    /// Runs `work` in the namespace, on a thread of its own. Processes that `work` starts stay in
    /// the namespace.
    pub fn within<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                setns(&*self.0, CloneFlags::CLONE_NEWNET).expect("root may enter");
                work()
            });
            thread.join().expect("the thread does not panic")
        })
    }

    /// Connects to `to` from inside the namespace.
    pub fn connect(&self, to: SocketAddr) -> io::Result<TcpStream> {
        let stream = self.within(move || TcpStream::connect(to))?;
        stream.set_read_timeout(Some(wait::LIMIT))?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }

    /// Connects to the gate's listener on that port; the destination address does not matter.
    pub fn port(&self, port: u16) -> TcpStream {
        self.connect(SocketAddr::from(([192, 0, 2, 1], port)))
            .expect("a connection")
    }
}

/// The same command in a new network namespace with only a loopback: every port is free there,
/// and no packet leaves. This needs root. The process id is that of the command itself.
pub fn in_new_namespace(command: &Command) -> Command {
    let mut isolated = Command::new("unshare");
    let line = "busybox ip link set lo up && exec \"$@\"";
    isolated.args(["--net", "sh", "-c", line, "sh"]);
    isolated.arg(command.get_program()).args(command.get_args());
    isolated.env_clear();
    for (name, value) in command.get_envs() {
        isolated.env(name, value.unwrap_or_default());
    }
    isolated
}

/// Runs busybox's `ip` in the namespace of this thread.
fn ip(line: &str) {
    let mut command = Command::new("/bin/busybox");
    let output = command.arg("ip").args(line.split(' ')).output();
    let output = output.expect("busybox");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "ip {line}: {error}");
}

/// Starts TLS on `io` with the SNI `name`, if any. The certificate is not verified; tests with
/// real programs cover trust.
pub fn tls<IO: Read + Write>(io: IO, name: Option<&str>, protocols: &[&str]) -> Tls<IO> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .expect("TLS");
    begin(io, builder, provider, name, protocols)
}

/// Starts TLS with a GREASE ECH extension, as browsers send it.
pub fn tls_with_ech<IO: Read + Write>(io: IO, name: &str, protocols: &[&str]) -> Tls<IO> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let suite = DH_KEM_X25519_HKDF_SHA256_AES_128;
    let (key, _) = suite.generate_key_pair().expect("a key");
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_ech(EchMode::Grease(EchGreaseConfig::new(suite, key)))
        .expect("TLS");
    begin(io, builder, provider, Some(name), protocols)
}

fn begin<IO: Read + Write>(
    io: IO,
    builder: ConfigBuilder<ClientConfig, WantsVerifier>,
    provider: Arc<CryptoProvider>,
    name: Option<&str>,
    protocols: &[&str],
) -> Tls<IO> {
    let mut config = builder
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AcceptAnyCertificate(provider)))
        .with_no_client_auth();
    config.enable_sni = name.is_some();
    config.alpn_protocols = protocols.iter().map(|p| p.as_bytes().to_vec()).collect();
    let name = name.unwrap_or("unnamed.example").to_owned();
    let name = ServerName::try_from(name).expect("a name");
    let session = ClientConnection::new(Arc::new(config), name).expect("a session");
    StreamOwned::new(session, io)
}

/// The certificate of the peer, after the handshake.
pub fn certificate<IO: Read + Write>(tls: &mut Tls<IO>) -> io::Result<CertificateDer<'static>> {
    while tls.conn.is_handshaking() {
        tls.conn.complete_io(&mut tls.sock)?;
    }
    let chain = tls.conn.peer_certificates().unwrap_or_default();
    let leaf = chain.first().cloned();
    leaf.ok_or_else(|| io::Error::other("no certificate"))
}

/// A stream that writes each byte in a packet of its own.
#[derive(Debug)]
pub struct ByteAtATime(pub TcpStream);

impl Read for ByteAtATime {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

impl Write for ByteAtATime {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes.get(..1).unwrap_or_default())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Whether the peer closes the connection within `limit`; bytes before the end are discarded.
pub fn closes_within(mut stream: impl Read, limit: Duration) -> bool {
    let begun = std::time::Instant::now();
    let mut rest = [0; 4096];
    loop {
        match stream.read(&mut rest) {
            Ok(0) => return true,
            Ok(_) if begun.elapsed() < limit => {}
            Ok(_) => return false,
            Err(error) => {
                let waited = matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
                );
                return !waited;
            }
        }
    }
}

#[derive(Debug)]
struct AcceptAnyCertificate(Arc<CryptoProvider>);

impl ServerCertVerifier for AcceptAnyCertificate {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
