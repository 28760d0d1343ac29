//! The processes under test: an origin, the gate and its peers.

use std::fs;
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};

/// The origin's host name for clients of the gate.
pub const ORIGIN: &str = "origin.example";

/// The origin's host name for proxies that use the system's resolver.
pub const LOCAL: &str = "localhost";

/// Number of names that are queried: the first names of the allowlist.
pub const NAMES: usize = 100;

/// Number of additional rules in the allowlist.
const ALLOWLIST_ENTRIES: usize = 10_000;
/// Size of the file `/large`.
const LARGE_BYTES: usize = 100_000_000;

/// A process that is stopped when this value is dropped.
pub struct ChildProcess {
    child: Child,
    name: &'static str,
}

impl ChildProcess {
    fn start(name: &'static str, command: &mut Command) -> Self {
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap_or_else(|error| panic!("{name} does not start: {error}"));
        Self { child, name }
    }

    /// Waits until a process listens on the address.
    fn wait_for_listener(mut self, at: SocketAddr) -> Self {
        let started = Instant::now();
        while TcpStream::connect(at).is_err() {
            let ended = self.child.try_wait().unwrap();
            assert!(ended.is_none(), "{} ended: {ended:?}", self.name);
            assert!(started.elapsed().as_secs() < 30, "{} is not up", self.name);
            std::thread::park_timeout(Duration::from_millis(20));
        }
        self
    }

    /// Resident memory, in kilobytes.
    pub fn memory(&self) -> f64 {
        let path = format!("/proc/{}/status", self.child.id());
        let status = fs::read_to_string(path).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:"));
        let number = line.and_then(|line| line.split_whitespace().nth(1));
        number.unwrap().parse().unwrap()
    }

    /// Processor time of the process and its children so far, in microseconds.
    pub fn processor(&self) -> f64 {
        let id = self.child.id();
        let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children"));
        let children = children.unwrap_or_default();
        let children = children.split_whitespace().filter_map(|id| id.parse().ok());
        std::iter::once(id).chain(children).map(processor_of).sum()
    }

    /// The process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }
}

/// Processor time of one process with its threads, in microseconds.
fn processor_of(id: u32) -> f64 {
    let stat = fs::read_to_string(format!("/proc/{id}/stat")).unwrap();
    let after = stat.rsplit(") ").next().unwrap();
    let mut fields = after.split(' ').skip(11);
    let mut ticks = || fields.next().unwrap().parse::<f64>().unwrap();
    // A tick is a hundredth of a second on all common Linux systems.
    (ticks() + ticks()) * 1e4
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        // On SIGTERM the process ends its own children.
        let pid = self.child.id().to_string();
        let signalled = Command::new("kill").arg(pid).status();
        if !signalled.is_ok_and(|status| status.success()) {
            let _ = self.child.kill();
        }
        let _ = self.child.wait();
    }
}

/// A free address on the loopback.
pub fn free_address() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    // DNS servers listen on UDP and TCP.
    drop(UdpSocket::bind(at).unwrap());
    at
}

/// nginx with TLS and two files. Writes its root to `root.pem`.
pub fn origin(dir: &Path, at: SocketAddr) -> ChildProcess {
    write_certificates(dir);
    let files = dir.join("files");
    fs::create_dir(&files).unwrap();
    fs::write(files.join("small"), vec![b'x'; 1024]).unwrap();
    fs::write(files.join("large"), vec![b'x'; LARGE_BYTES]).unwrap();
    nginx(
        dir,
        "origin",
        at,
        &format!("root {}/files;", dir.display()),
        "",
    )
}

/// nginx as a reverse proxy that terminates TLS on both sides, keeps its connections to the origin
/// and verifies the origin's certificate: a baseline for proxies of this kind.
pub fn reverse_proxy(dir: &Path, at: SocketAddr, origin: SocketAddr) -> ChildProcess {
    let upstream = format!(
        "upstream origin {{ server {origin}; keepalive 64; keepalive_requests 1000000000; }}"
    );
    let location = format!(
        "location / {{
            proxy_pass https://origin; proxy_http_version 1.1;
            proxy_set_header Connection ''; proxy_set_header Host {ORIGIN};
            proxy_ssl_server_name on; proxy_ssl_name {ORIGIN}; proxy_ssl_protocols TLSv1.2 TLSv1.3;
            proxy_ssl_verify on; proxy_ssl_trusted_certificate {}/root.pem;
        }}",
        dir.display()
    );
    nginx(dir, "proxy", at, &location, &upstream)
}

/// Starts nginx with one TLS server of that configuration.
fn nginx(dir: &Path, name: &str, at: SocketAddr, server: &str, upstream: &str) -> ChildProcess {
    let config = dir.join(format!("{name}.conf"));
    let temp = dir.join(name);
    fs::create_dir(&temp).unwrap();
    let (dir, temp) = (dir.display(), temp.display());
    let text = format!(
        "daemon off; pid {temp}/pid; worker_processes auto; worker_rlimit_nofile 16384;
        user root; error_log stderr crit;
        events {{ worker_connections 8192; }}
        http {{
            access_log off; sendfile on; tcp_nopush on; keepalive_requests 1000000000;
            client_body_temp_path {temp}/b; proxy_temp_path {temp}/p; fastcgi_temp_path {temp}/f;
            uwsgi_temp_path {temp}/u; scgi_temp_path {temp}/s;
            ssl_protocols TLSv1.2 TLSv1.3; ssl_session_cache shared:{name}:16m;
            {upstream}
            server {{
                listen {at} ssl backlog=4096; {server}
                ssl_certificate {dir}/origin.pem; ssl_certificate_key {dir}/origin.key;
            }}
        }}"
    );
    fs::write(&config, text).unwrap();
    ChildProcess::start("nginx", Command::new("nginx").arg("-c").arg(config)).wait_for_listener(at)
}

/// Writes the certificates of a root and of the origin.
fn write_certificates(dir: &Path) {
    let mut root = CertificateParams::default();
    root.distinguished_name.push(DnType::CommonName, "bench");
    root.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().unwrap();
    fs::write(dir.join("root.pem"), root.self_signed(&key).unwrap().pem()).unwrap();
    let issuer = Issuer::new(root, key);
    let names = vec![ORIGIN.to_owned(), LOCAL.to_owned()];
    let leaf = CertificateParams::new(names).unwrap();
    let key = KeyPair::generate().unwrap();
    let signed = leaf.signed_by(&key, &issuer).unwrap();
    fs::write(dir.join("origin.pem"), signed.pem()).unwrap();
    fs::write(dir.join("origin.key"), key.serialize_pem()).unwrap();
}

/// The gate with all checks on. The client is identified by its address.
pub struct Gate {
    pub process: ChildProcess,
    /// The root certificate of the gate.
    pub root: String,
}

/// The addresses of the gate's listeners and upstreams.
pub struct Addresses {
    pub origin: SocketAddr,
    pub proxy: SocketAddr,
    pub names: SocketAddr,
    pub resolver: SocketAddr,
}

impl Gate {
    /// Starts the binary in a directory with the origin's `root.pem`. `wrapper` is a program that
    /// runs the binary, with its arguments; empty to run the binary directly.
    pub fn start(wrapper: &[String], binary: &Path, dir: &Path, at: &Addresses) -> Self {
        let Addresses {
            origin,
            proxy,
            names,
            resolver,
        } = at;
        let mut domains = format!(
            "version: 1\ndomains:\n- host: {ORIGIN}\n  methods: [GET, HEAD, POST]\n  \
             paths: [/small, /large, /api/**]\n  deny: [{{methods: [POST], paths: [/api/admin/**]}}]\n"
        );
        for number in 0..ALLOWLIST_ENTRIES {
            domains += &format!("- {{host: {}, paths: [/api/**]}}\n", name(number));
        }
        fs::write(dir.join("allowlist.yaml"), domains).unwrap();
        let config = format!(
            "version: '1.0'
egress:
  listen: ['{proxy}']
  allowlist: allowlist.yaml
  resolve: {{{ORIGIN}: '{origin}'}}
  extra_roots: [root.pem]
  dns: {{listen: ['{names}'], upstreams: ['{resolver}'], rate: 1000000, burst: 1000000}}
  policy: policy.yaml
logging: {{level: warn}}
"
        );
        fs::write(dir.join("palisade.yaml"), config).unwrap();
        let limits = "rate_limits: {defaults: {requests_per_second: 1000000, \
                      burst_size: 1000000}}\n";
        fs::write(dir.join("policy.yaml"), limits).unwrap();
        let palisade = |wrapper: &[String]| {
            let mut command = match wrapper {
                [] => Command::new(binary),
                [program, arguments @ ..] => {
                    let mut command = Command::new(program);
                    command.args(arguments).arg(binary);
                    command
                }
            };
            command
                .arg("--state-dir")
                .arg(dir.join("state"))
                .arg("--config")
                .arg(dir.join("palisade.yaml"));
            command
        };
        let process = ChildProcess::start("palisade", palisade(wrapper).args(["gate", "run"]));
        let process = process.wait_for_listener(*proxy);
        let added = palisade(&[])
            .args(["registry", "add", "bench", "--ip", "127.0.0.1"])
            .args(["--repo", "o/r", "--trusts-ca"])
            .stdout(Stdio::null())
            .status();
        assert!(added.unwrap().success(), "the registration failed");
        let root = fs::read_to_string(dir.join("state/ca.pem")).unwrap();
        Self { process, root }
    }
}

/// The allowlist's names.
pub fn name(number: usize) -> String {
    format!("h{number:05}.example")
}

/// mitmproxy as a forward proxy, and its root.
pub fn mitmproxy(binary: &Path, dir: &Path, at: SocketAddr) -> (ChildProcess, String) {
    let process = ChildProcess::start(
        "mitmdump",
        Command::new(binary)
            .args(["--quiet", "--mode", "regular", "--set", "ssl_insecure=true"])
            .args(["--listen-host", "127.0.0.1", "--listen-port"])
            .arg(at.port().to_string())
            .arg("--set")
            .arg(format!("confdir={}/mitmproxy", dir.display())),
    );
    let process = process.wait_for_listener(at);
    let root = fs::read_to_string(dir.join("mitmproxy/mitmproxy-ca-cert.pem")).unwrap();
    (process, root)
}

/// A proxy that decrypts and makes no decisions, and its root.
pub fn noop(binary: &Path, dir: &Path, at: SocketAddr) -> (ChildProcess, String) {
    let mut root = CertificateParams::default();
    root.distinguished_name.push(DnType::CommonName, "noop");
    root.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().unwrap();
    let root = root.self_signed(&key).unwrap().pem();
    let (root_at, key_at) = (dir.join("noop.pem"), dir.join("noop.key"));
    fs::write(&root_at, &root).unwrap();
    fs::write(&key_at, key.serialize_pem()).unwrap();
    let process = ChildProcess::start(
        "noop",
        Command::new(binary)
            .arg(at.to_string())
            .args([root_at, key_at, dir.join("root.pem")]),
    );
    (process.wait_for_listener(at), root)
}

/// dnsmasq, which has a record for every name, or forwards to `upstream` and caches the answers.
pub fn dnsmasq(at: SocketAddr, upstream: Option<SocketAddr>) -> ChildProcess {
    let mut command = Command::new("dnsmasq");
    command
        .args([
            "--keep-in-foreground",
            "--conf-file=/dev/null",
            "--no-hosts",
        ])
        .args([
            "--no-resolv",
            "--bind-interfaces",
            "--user=root",
            "--pid-file=",
        ])
        .args(["--cache-size=10000", "--dns-forward-max=10000"])
        .arg(format!("--listen-address={}", at.ip()))
        .arg(format!("--port={}", at.port()));
    match upstream {
        Some(upstream) => {
            command.arg(format!("--server={}#{}", upstream.ip(), upstream.port()));
        }
        None => {
            let names = (0..NAMES).map(name);
            let records = names.map(|name| format!("--host-record={name},203.0.113.7,3600"));
            command.args(records);
        }
    }
    ChildProcess::start("dnsmasq", &mut command).wait_for_listener(at)
}
