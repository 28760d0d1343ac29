//! Fixture: a gate, a forge behind it, and a container that uses git.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use testkit::ca::Ca;
use testkit::forge::Forge;
use testkit::gate::GateDir;
use testkit::port::Port;
use testkit::{http, output, wait};

const PALISADE: &str = env!("CARGO_BIN_EXE_palisade");

/// The URL of the forge for clients.
pub(crate) const FORGE: &str = "https://forge.example";

/// The repository the container is registered for.
pub(crate) const APP: &str = "https://forge.example/acme/app";

/// A policy bundle of the operator, in the directory `mine`.
const BUNDLE: &str = r#"package git.push

default allow := false

allow if {
	input.kind == "git_push"
	every update in input.updates {
		startswith(update.ref, "refs/heads/ok/")
	}
}

reason := "Only below ok." if not allow
"#;

/// Every git program of this machine.
pub(crate) fn gits() -> Vec<&'static str> {
    let known = ["/usr/bin/git", "/usr/local/bin/git"];
    let installed: Vec<&str> = known
        .into_iter()
        .filter(|git| Path::new(git).exists())
        .collect();
    assert!(!installed.is_empty(), "no git");
    installed
}

/// A gate in front of a forge.
pub(crate) struct GitFixture {
    pub(crate) gate_dir: GateDir,
    pub(crate) forge: Forge,
    proxy: Port,
    git: String,
    version: u8,
}

/// Settings in addition to the defaults. In the configuration, `{forge}` is replaced by the forge's
/// address, and `{port}` by its port.
#[derive(Clone, Copy, Default)]
pub(crate) struct FixtureOptions<'a> {
    /// Additional lines of the section `git`.
    pub(crate) git: &'a str,
    /// The content of policy.yaml.
    pub(crate) policy: &'a str,
    /// Additional top-level lines of palisade.yaml.
    pub(crate) top: &'a str,
    /// Additional entries of `egress.resolve`.
    pub(crate) resolve: &'a str,
    /// Additional entries of `egress.domains`.
    pub(crate) domains: &'a str,
    /// Additional entries of `git.hosts`.
    pub(crate) hosts: &'a str,
    /// Additional lines of the section `egress`.
    pub(crate) egress: &'a str,
    /// Whether the container is registered with the auth mode `bot`.
    pub(crate) bot: bool,
    /// The push limit of the registration.
    pub(crate) limit: Option<u64>,
    /// Whether pushed objects are checked: secret scan and restricted paths.
    pub(crate) checked: bool,
}

impl GitFixture {
    /// A gate that does not read packs, and a container that pushes as its user.
    pub(crate) fn new() -> Self {
        Self::with_options(FixtureOptions::default())
    }

    pub(crate) fn with_options(options: FixtureOptions<'_>) -> Self {
        // Benchmarks set the variable to test another build.
        let binary = std::env::var("PALISADE_BINARY");
        let gate_dir = GateDir::new(binary.as_deref().unwrap_or(PALISADE));
        let ca = Ca::new("the internet's root");
        ca.write(gate_dir.path());
        let root = gate_dir.path().join("forge");
        let git = gits()[0].to_owned();
        let forge = Forge::start(
            Some(&ca.identity(&["forge.example", "*.forge.example", "elsewhere.example"])),
            &root,
            &git,
        );
        let fixture = Self {
            gate_dir,
            forge,
            proxy: Port::take(),
            git,
            version: 2,
        };
        fixture.create_bare("acme/app", &[]);
        fixture.write(options);
        fixture.ok(&["gate", "start"]);
        fixture.ok(&["ca", "export", "--out", "gate.pem"]);
        fixture.register(options);
        fixture
    }

    fn write(&self, options: FixtureOptions<'_>) {
        let checks = if options.checked {
            ""
        } else {
            "  scan: \"off\"\n  restricted_paths: []\n"
        };
        let policy = if options.policy.is_empty() {
            "{}\n"
        } else {
            options.policy
        };
        std::fs::write(self.path("policy.yaml"), policy).unwrap();
        std::fs::create_dir_all(self.path("mine")).unwrap();
        std::fs::write(self.path("mine/policy.rego"), BUNDLE).unwrap();
        let (forge, proxy) = (self.forge.address(), self.proxy.address());
        let FixtureOptions {
            git,
            top,
            resolve,
            domains,
            hosts,
            egress,
            ..
        } = options;
        let config = format!(
            "version: \"1.0\"\negress:\n  extra_roots: [root.pem]\n  policy: policy.yaml\n  \
             domains: [forge.example, elsewhere.example{domains}]\n  \
             resolve: {{\"forge.example\": \"{forge}\", \"elsewhere.example\": \"{forge}\"{resolve}}}\n  \
             listen: [\"{proxy}\"]\n{egress}\n\
             git:\n  hosts: [forge.example{hosts}]\n{checks}{git}\n{top}\n"
        );
        let config = config.replace("{forge}", &forge.to_string());
        let config = config.replace("{port}", &forge.port().to_string());
        self.gate_dir.write_config(&config);
    }

    /// The address of the gate's proxy.
    pub(crate) fn proxy(&self) -> SocketAddr {
        self.proxy.address()
    }

    /// The gate's control socket.
    pub(crate) fn control_socket(&self) -> PathBuf {
        self.gate_dir.control()
    }

    /// The gate's state directory.
    pub(crate) fn state(&self) -> PathBuf {
        self.gate_dir.state()
    }

    fn register(&self, options: FixtureOptions<'_>) {
        let mut repo = serde_json::json!({"name": "acme/app"});
        if let Some(limit) = options.limit {
            repo["max_receive_pack_bytes"] = limit.into();
        }
        let body = serde_json::json!({
            "container_id": "agent", "container_ip": "127.0.0.1",
            "repos": [repo, {"name": "acme/long"}],
            "auth_mode": if options.bot { "bot" } else { "user" },
            "metadata": {"trusts_ca": true},
        });
        let control = self.gate_dir.control();
        let body = body.to_string();
        let answer = http::send(&control, "POST", "/internal/containers", body.as_bytes()).unwrap();
        assert_eq!(answer.status, 201, "{}", answer.text());
    }

    /// Uses another git program and protocol version.
    pub(crate) fn use_git(&mut self, git: &str, version: u8) -> &Self {
        self.git = git.to_owned();
        self.version = version;
        self
    }

    /// A path in the gate directory.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.gate_dir.path().join(name)
    }

    /// Creates a bare repository on the forge.
    pub(crate) fn create_bare(&self, name: &str, more: &[&str]) -> PathBuf {
        let dir = self
            .gate_dir
            .path()
            .join("forge")
            .join(format!("{name}.git"));
        std::fs::create_dir_all(&dir).unwrap();
        let args = [&["init", "-q", "--bare", "-b", "main"], more, &["."]].concat();
        self.git_in(&dir, &args);
        for (key, value) in [
            ("http.receivepack", "true"),
            ("receive.advertisePushOptions", "true"),
            ("uploadpack.allowFilter", "true"),
            ("uploadpack.allowAnySHA1InWant", "true"),
            ("receive.denyDeletes", "false"),
            ("gc.auto", "0"),
        ] {
            self.git_in(&dir, &["config", key, value]);
        }
        dir
    }

    /// The path of a repository on the forge.
    pub(crate) fn upstream(&self, name: &str) -> PathBuf {
        self.gate_dir
            .path()
            .join("forge")
            .join(format!("{name}.git"))
    }

    /// The refs of a repository on the forge.
    pub(crate) fn refs(&self, name: &str) -> String {
        self.git_in(
            &self.upstream(name),
            &["for-each-ref", "--format=%(refname) %(objectname)"],
        )
    }

    /// A git command of the container, which uses the gate as its proxy.
    pub(crate) fn command(&self, dir: &Path, args: &[&str]) -> Command {
        let mut command = Command::new(&self.git);
        command
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap())
            .env("HOME", self.gate_dir.path())
            .env("GIT_CONFIG_NOSYSTEM", "1")
            .env("GIT_TERMINAL_PROMPT", "0")
            .env("http_proxy", format!("http://{}", self.proxy()))
            .env("https_proxy", format!("http://{}", self.proxy()))
            .env("GIT_SSL_CAINFO", self.gate_dir.path().join("gate.pem"))
            .args(["-c", &format!("protocol.version={}", self.version)])
            .args([
                "-c",
                "user.name=Agent",
                "-c",
                "user.email=agent@example.com",
            ])
            .args(["-c", "init.defaultBranch=main", "-c", "gc.auto=0"])
            // The pushed data is small or incompressible.
            .args(["-c", "core.compression=0"])
            .args(args)
            .current_dir(dir);
        command
    }

    /// Runs git, which may fail.
    pub(crate) fn try_git(&self, dir: &Path, args: &[&str]) -> Output {
        self.command(dir, args).output().unwrap()
    }

    /// Runs git, which must succeed, and returns its output.
    #[track_caller]
    pub(crate) fn git_in(&self, dir: &Path, args: &[&str]) -> String {
        let output = self.try_git(dir, args);
        assert!(
            output.status.success(),
            "git {args:?}: {}",
            describe(&output)
        );
        output::stdout(&output).trim_end().to_owned()
    }

    /// Runs a push that must be refused with this sentence; upstream must not change.
    #[track_caller]
    pub(crate) fn assert_refused(&self, dir: &Path, args: &[&str], reason: &str, sentence: &str) {
        let (before, sent) = (self.refs("acme/app"), self.forge.pushed_bytes());
        let output = self.try_git(dir, args);
        let printed = output::stderr(&output);
        assert!(
            !output.status.success(),
            "git {args:?}: {}",
            describe(&output)
        );
        assert!(printed.contains(sentence), "no '{sentence}' in: {printed}");
        assert!(printed.contains("remote: palisade: "), "{printed}");
        assert!(printed.contains(reason), "no '{reason}' in: {printed}");
        assert_eq!(self.refs("acme/app"), before);
        assert_eq!(
            self.forge.pushed_bytes(),
            sent,
            "upstream received data of the push"
        );
        self.assert_explained(&printed, reason);
    }

    /// Checks that `palisade why` and the audit log explain the request that git's output names.
    #[track_caller]
    fn assert_explained(&self, printed: &str, reason: &str) {
        let (_, rest) = printed.split_once("request ").expect("a request id");
        let id = rest.get(..26).unwrap();
        let why = self.ok(&["why", id, "--json"]);
        assert!(why.contains(reason), "{why}");
        let find = || {
            let mut records = self.records().into_iter();
            records.find(|record| record["request_id"] == id)
        };
        let record = wait::until("a record of the refusal", find);
        assert_eq!(
            (&record["reason"], &record["verdict"], &record["kind"]),
            (&reason.into(), &"deny".into(), &"git".into()),
            "{record}"
        );
        assert!(record["repo"].is_string() && record["operation"].is_string());
    }

    /// A working copy with one commit, which `origin` has on `main`.
    pub(crate) fn working_copy(&self, name: &str) -> PathBuf {
        let dir = self.path(name);
        self.git_in(self.gate_dir.path(), &["clone", "-q", APP, name]);
        if self.refs("acme/app").is_empty() {
            self.push_first_commit(&dir);
        }
        dir
    }

    /// Pushes the first commit to upstream past the gate, as the operator.
    fn push_first_commit(&self, dir: &Path) {
        self.commit(dir, "README.md", "hello\n");
        let upstream = self.upstream("acme/app");
        let upstream = upstream.to_str().unwrap();
        self.git_in(dir, &["push", "-q", upstream, "HEAD:refs/heads/main"]);
        self.git_in(dir, &["fetch", "-q", "origin"]);
    }

    /// Commits one file.
    pub(crate) fn commit(&self, dir: &Path, file: &str, text: &str) {
        let path = dir.join(file);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
        self.git_in(dir, &["add", "-A"]);
        self.git_in(dir, &["commit", "-q", "-m", file]);
    }

    /// Runs `palisade`, which must succeed.
    #[track_caller]
    pub(crate) fn ok(&self, args: &[&str]) -> String {
        let output = self.operator(args);
        assert!(output.status.success(), "{args:?}: {}", describe(&output));
        output::stdout(&output)
    }

    /// Runs `palisade`, which may fail.
    pub(crate) fn operator(&self, args: &[&str]) -> Output {
        self.operator_in(self.gate_dir.path(), args)
    }

    /// Runs `palisade` in another directory.
    pub(crate) fn operator_in(&self, dir: &Path, args: &[&str]) -> Output {
        let mut command = self.gate_dir.palisade(args);
        command.current_dir(dir).output().unwrap()
    }

    /// Restarts the gate, which refills the rate limit for pushes.
    pub(crate) fn restart_gate(&self) {
        self.ok(&["gate", "restart"]);
    }

    /// Every record of the audit log.
    pub(crate) fn records(&self) -> Vec<Value> {
        let lines = self.ok(&["audit", "export"]);
        lines
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }

    /// Sends a request to the control socket.
    pub(crate) fn control(&self, method: &str, path: &str, body: &Value) -> Value {
        let control = self.gate_dir.control();
        let answer = http::send(&control, method, path, body.to_string().as_bytes()).unwrap();
        answer.json()
    }

    /// The gate's metrics.
    pub(crate) fn metrics(&self) -> String {
        let control = self.gate_dir.control();
        http::send(&control, "GET", "/internal/metrics", b"")
            .unwrap()
            .text()
    }

    /// Peak and current memory of the gate, in KiB.
    pub(crate) fn memory(&self) -> (u64, u64) {
        let status = self.ok(&["gate", "status", "--json"]);
        let status: Value = serde_json::from_str(&status).unwrap();
        let path = format!("/proc/{}/status", status["pid"]);
        let status = std::fs::read_to_string(path).unwrap();
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let kib = line.unwrap().trim().trim_end_matches(" kB");
            kib.parse::<u64>().unwrap()
        };
        (field("VmHWM:"), field("VmRSS:"))
    }

    /// Runs curl as the container, and returns status and body.
    pub(crate) fn curl(&self, args: &[&str]) -> (u16, String) {
        let output = Command::new("curl")
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap())
            .args(["-sS", "--max-time", "60", "-w", "\n%{http_code}"])
            .args(["-x", &format!("http://{}", self.proxy()), "--cacert"])
            .arg(self.gate_dir.path().join("gate.pem"))
            .args(args)
            .output()
            .unwrap();
        assert!(output.status.success(), "{args:?}: {}", describe(&output));
        let printed = output::stdout(&output);
        let (body, status) = printed.rsplit_once('\n').unwrap();
        (status.parse().unwrap(), body.to_owned())
    }

    /// Posts a file as a push with curl.
    pub(crate) fn post(&self, target: &str, body: &[u8], headers: &[&str]) -> (u16, String) {
        let file = self.path("body");
        std::fs::write(&file, body).unwrap();
        let data = format!("@{}", file.display());
        let mut args = vec![
            "-H",
            "content-type: application/x-git-receive-pack-request",
            "--data-binary",
            &data,
        ];
        for header in headers {
            args.extend(["-H", *header]);
        }
        args.push(target);
        self.curl(&args)
    }
}

/// Status and output of a command, for messages.
pub(crate) fn describe(output: &Output) -> String {
    let (out, err) = (output::stdout(output), output::stderr(output));
    format!("{}\nstdout: {out}\nstderr: {err}", output.status)
}

/// Starts a relay that connects from the address `from`, which identifies another container.
pub(crate) fn relay(from: IpAddr, to: SocketAddr) -> SocketAddr {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    listener.set_nonblocking(true).unwrap();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            while let Ok((mut client, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let socket = tokio::net::TcpSocket::new_v4().unwrap();
                    socket.bind(SocketAddr::new(from, 0)).unwrap();
                    let mut gate = socket.connect(to).await.unwrap();
                    let _ = tokio::io::copy_bidirectional(&mut client, &mut gate).await;
                });
            }
        });
    });
    address
}
