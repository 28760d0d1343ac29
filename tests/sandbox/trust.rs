//! Trust and proxy settings of programs in a sandbox: the gate's certificate, and its proxy.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use testkit::ca::Ca;
use testkit::operator::Operator;
use testkit::origin::{OriginReply, OriginServer};
use testkit::{output, wait};

use crate::sandbox_fixture::SandboxFixture;

for_every_operator!(
    programs_trust_the_gate_with_and_without_proxy,
    java_trusts_the_gate,
    refusal_is_readable_and_no_tls_error,
    rotated_root_keeps_old_sandboxes_working,
    running_sandbox_receives_a_rotated_root,
    gate_renews_its_root_before_expiry,
    operators_env_option_overrides_trust_variables,
    setup_command_trusts_the_gate,
    agent_cannot_change_the_trust_files_of_the_host,
    custom_rootfs_trusts_the_gate,
);

mod with_subids {
    use super::*;

    for_subid_user!(
        programs_trust_the_gate_with_and_without_proxy,
        refusal_is_readable_and_no_tls_error,
        rotated_root_keeps_old_sandboxes_working,
        running_sandbox_receives_a_rotated_root,
        agent_cannot_change_the_trust_files_of_the_host,
        rebuilt_certificate_bundle_has_the_gates_root,
        fork_trusts_the_gate_despite_altered_certificate_files,
    );
}

mod needs_root {
    use super::*;

    fn as_root(test: fn(&SandboxFixture)) {
        if testkit::require_root("ids of a sandbox's own") {
            test(&SandboxFixture::new(Operator::CurrentUser));
        }
    }

    #[test]
    fn rebuilt_certificate_bundle_has_the_gates_root() {
        as_root(super::rebuilt_certificate_bundle_has_the_gates_root);
    }

    #[test]
    fn fork_trusts_the_gate_despite_altered_certificate_files() {
        as_root(super::fork_trusts_the_gate_despite_altered_certificate_files);
    }
}

/// Starts a server for the allowed host `allowed.test`.
fn internet(fixture: &SandboxFixture, more: &str) -> OriginServer {
    let ca = Ca::new("the internet");
    let origin = OriginServer::https(ca.identity(&["allowed.test"]), |request| {
        match request.path() {
            "/hello" => OriginReply::text("hello"),
            "/project.git/info/refs" => {
                OriginReply::text("5ca1ab1e5ca1ab1e5ca1ab1e5ca1ab1e5ca1ab1e\trefs/heads/main\n")
            }
            "/project.git/HEAD" => OriginReply::text("ref: refs/heads/main\n"),
            _ => OriginReply::status(404),
        }
    });
    let root = ca.write(fixture.gate_dir.path());
    fixture.gate_dir.write_config(&format!(
        "version: \"1.0\"\negress:\n  domains: [allowed.test]\n  resolve:\n    allowed.test: {}\n  \
         extra_roots: [{}]\n{more}",
        origin.address(),
        root.display()
    ));
    origin
}

/// Unsets every variable that names the proxy.
const WITHOUT_PROXY: &str =
    "env -u HTTP_PROXY -u HTTPS_PROXY -u http_proxy -u https_proxy -u NODE_USE_ENV_PROXY";

/// Unsets every variable that the sandbox sets.
const WITHOUT_ENVIRONMENT: &str = "env -i PATH=\"$PATH\" HOME=\"$HOME\"";

const CURL: &str = "curl -sS --max-time 60 https://allowed.test/hello";

const JAVA: &str = "import java.net.http.*; class Ask { public static void main(String[] a) \
    throws Exception { var ask = HttpRequest.newBuilder(java.net.URI.create(\
    \"https://allowed.test/hello\")).build(); System.out.println(HttpClient.newHttpClient()\
    .send(ask, HttpResponse.BodyHandlers.ofString()).body()); } }";

/// Returns for each program its name, the command that sends a request, the expected output, and
/// whether the program reads the system's certificates if no variable names them.
fn programs() -> Vec<(&'static str, String, &'static str, bool)> {
    let python = "import urllib.request as r; \
                  print(r.urlopen('https://allowed.test/hello').read().decode())";
    let requests = "import requests; print(requests.get('https://allowed.test/hello').text)";
    let node = "fetch('https://allowed.test/hello').then(r => r.text()).then(console.log)";
    vec![
        ("curl", CURL.to_owned(), "hello", true),
        (
            "wget",
            "wget -q -O- https://allowed.test/hello".to_owned(),
            "hello",
            true,
        ),
        (
            "/usr/bin/python3",
            format!("/usr/bin/python3 -c \"{python}\""),
            "hello",
            true,
        ),
        (
            "/usr/bin/python3",
            format!("/usr/bin/python3 -c \"{requests}\""),
            "hello",
            true,
        ),
        (
            "git",
            "git ls-remote --heads https://allowed.test/project.git".to_owned(),
            "5ca1ab1e5ca1ab1e5ca1ab1e5ca1ab1e5ca1ab1e\trefs/heads/main",
            true,
        ),
        (
            "openssl",
            "openssl s_client -connect allowed.test:443 -servername allowed.test \
             -verify_return_error -verify_hostname allowed.test -brief 2>&1 </dev/null | \
             grep -o 'Verification: OK'"
                .to_owned(),
            "Verification: OK",
            true,
        ),
        ("node", format!("node -e \"{node}\""), "hello", false),
    ]
}

fn programs_trust_the_gate_with_and_without_proxy(fixture: &SandboxFixture) {
    let origin = internet(fixture, "");
    fixture.create("fix");
    let mut tried = 0;
    for (program, line, expected, reads_system_certificates) in programs() {
        if !fixture
            .bash("fix", &format!("command -v {program}"))
            .status
            .success()
        {
            continue;
        }
        let prefixes: &[&str] = if reads_system_certificates {
            &["", WITHOUT_PROXY, WITHOUT_ENVIRONMENT]
        } else {
            &["", WITHOUT_PROXY]
        };
        for prefix in prefixes {
            let line = format!("{prefix} {line}");
            let before = origin.requests().len();
            assert_eq!(fixture.stdout_of("fix", &line), expected, "{line}");
            tried += 1;
            // The response came from the origin.
            if program != "openssl" {
                assert!(origin.requests().len() > before, "{line}");
            }
        }
    }
    assert!(tried >= 9, "curl, git and openssl at least: {tried}");
}

fn java_trusts_the_gate(fixture: &SandboxFixture) {
    let origin = internet(fixture, "");
    fixture.create("fix");
    let finds = "ls /usr/lib/jvm/*/bin/javac 2>/dev/null || true";
    let found = fixture.stdout_of("fix", finds);
    let Some(compiler) = found.lines().next() else {
        assert_eq!(fixture.stdout_of("fix", "echo $JAVA_TOOL_OPTIONS"), "");
        return;
    };
    fixture.stdout_of(
        "fix",
        &format!("cat > Ask.java <<'end'\n{JAVA}\nend\n{compiler} --release 11 Ask.java"),
    );
    for one in found.lines() {
        let line = format!("{} Ask", one.trim_end_matches('c'));
        assert_eq!(fixture.stdout_of("fix", &line), "hello", "{line}");
        let line = format!("env -u JAVA_TOOL_OPTIONS {line}");
        assert!(!fixture.bash("fix", &line).status.success(), "{line}");
    }
    assert_eq!(origin.requests().len(), found.lines().count());
    // Regression test for issue 14, item 8: a new root is added to the trust store of a running
    // sandbox.
    let store = "sha256sum < /etc/palisade/truststore.jks";
    let before = fixture.stdout_of("fix", store);
    fixture.ok(&["ca", "rotate", "--yes"]);
    assert_ne!(fixture.stdout_of("fix", store), before);
    let line = format!("{} Ask", compiler.trim_end_matches('c'));
    assert_eq!(fixture.stdout_of("fix", &line), "hello");
}

fn refusal_is_readable_and_no_tls_error(fixture: &SandboxFixture) {
    internet(fixture, "");
    fixture.create("fix");
    for prefix in ["", WITHOUT_PROXY, WITHOUT_ENVIRONMENT] {
        let line = format!("{prefix} curl -sS --max-time 60 https://denied.test/");
        let answer = fixture.stdout_of("fix", &line);
        let answer: serde_json::Value =
            serde_json::from_str(&answer).unwrap_or_else(|error| panic!("{error}: {answer}"));
        assert!(answer["request_id"].is_string(), "{answer}");
        assert!(answer["reason"].is_string(), "{answer}");
    }
}

fn root_in_sandbox(fixture: &SandboxFixture, name: &str) -> String {
    fixture.stdout_of(name, "cat /etc/palisade/ca.pem")
}

fn exported_root(fixture: &SandboxFixture) -> String {
    fixture.ok(&["ca", "export"]).trim_end().to_owned()
}

fn rotated_root_keeps_old_sandboxes_working(fixture: &SandboxFixture) {
    let _origin = internet(fixture, "");
    let old = fixture.create("old");
    let first = exported_root(fixture);
    assert_eq!(root_in_sandbox(fixture, "old"), first);
    assert_eq!(fixture.stdout_of("old", CURL), "hello");
    fixture.ok(&["ca", "rotate", "--yes"]);
    let second = exported_root(fixture);
    assert_ne!(first, second);
    fixture.create("new");
    let both_roots = root_in_sandbox(fixture, "old");
    assert!(
        both_roots.contains(&first) && both_roots.contains(&second),
        "{both_roots}"
    );
    assert_eq!(root_in_sandbox(fixture, "new"), second);
    let both = |line: &str| {
        for name in ["old", "new"] {
            for prefix in ["", WITHOUT_PROXY, WITHOUT_ENVIRONMENT] {
                let line = format!("{prefix} {line}");
                assert_eq!(fixture.stdout_of(name, &line), "hello", "{name}: {line}");
            }
        }
    };
    both(CURL);
    both("wget -q -O- https://allowed.test/hello");
    // A restarted sandbox trusts the current root.
    let init = fixture.init(&old);
    kill(Pid::from_raw(init), Signal::SIGKILL).unwrap();
    wait::until("init's end", || {
        (fixture.json(&["list"])[0]["status"] == "error").then_some(())
    });
    fixture.ok(&["resume", "old"]);
    assert_eq!(root_in_sandbox(fixture, "old"), second);
    both(CURL);
}

/// Command that writes the newest root of a sandbox to `/tmp/last.pem` in the sandbox.
const LAST_ROOT: &str =
    "tac /etc/palisade/ca.pem | sed '/BEGIN CERTIFICATE/q' | tac > /tmp/last.pem";

/// Asserts that a running sandbox has a root in every trust store, and that certificates verify
/// with this root alone.
fn assert_has_root(fixture: &SandboxFixture, name: &str, root: &str) {
    fixture.stdout_of(name, LAST_ROOT);
    assert_eq!(fixture.stdout_of(name, "cat /tmp/last.pem"), root, "{name}");
    let bundle = fixture.stdout_of(name, "cat /etc/ssl/certs/ca-certificates.crt");
    assert!(bundle.contains(root), "{name}: {bundle}");
    let curl = format!("{CURL} --cacert /tmp/last.pem --capath /nowhere");
    for prefix in ["", WITHOUT_PROXY] {
        assert_eq!(
            fixture.stdout_of(name, &format!("{prefix} {curl}")),
            "hello",
            "{prefix}"
        );
    }
    // OpenSSL also finds the root by its hash in the certificate directory.
    let line = "cat /etc/ssl/certs/$(openssl x509 -noout -hash -in /tmp/last.pem).0";
    assert!(fixture.stdout_of(name, line).contains(root), "{name}");
}

// Regression test for issue 14, item 8.
fn running_sandbox_receives_a_rotated_root(fixture: &SandboxFixture) {
    let _origin = internet(fixture, "");
    for name in ["one", "paused"] {
        fixture.create(name);
        assert_eq!(fixture.stdout_of(name, CURL), "hello");
    }
    fixture.ok(&["pause", "paused"]);
    let before = exported_root(fixture);
    let bundle = "cat /etc/ssl/certs/ca-certificates.crt";
    let system = fixture.stdout_of("one", bundle).replace(&before, "");
    fixture.ok(&["ca", "rotate", "--yes"]);
    let second = exported_root(fixture);
    assert_has_root(fixture, "one", &second);
    let old = "sed '/END CERTIFICATE/q' /etc/palisade/ca.pem > /tmp/first.pem";
    fixture.stdout_of("one", old);
    let curl = format!("{CURL} --cacert /tmp/first.pem --capath /nowhere");
    assert_eq!(
        fixture.stdout_of("one", &curl),
        "hello",
        "the old root verifies"
    );
    // The other certificates are the same as before.
    let now = fixture.stdout_of("one", bundle);
    let rest = now.replace(&before, "").replace(&second, "");
    assert_eq!(rest.trim_end(), system.trim_end());
    fixture.ok(&["resume", "paused"]);
    assert_has_root(fixture, "paused", &second);
    // A root that was rotated while no gate ran: the next gate distributes it.
    fixture.ok(&["pause", "one"]);
    fixture.ok(&["ca", "rotate", "--yes"]);
    let third = exported_root(fixture);
    assert_has_root(fixture, "paused", &third);
    fixture.ok(&["gate", "restart"]);
    fixture.ok(&["resume", "one"]);
    assert_has_root(fixture, "one", &third);
}

// Regression test for issue 14, item 8. The test cannot change the gate's clock, so it changes the
// end of the root's validity.
fn gate_renews_its_root_before_expiry(fixture: &SandboxFixture) {
    let _origin = internet(fixture, "");
    fixture.create("fix");
    let first = exported_root(fixture);
    fixture.ok(&["gate", "stop"]);
    let file = fixture.gate_dir.state().join("authority.json");
    let kept = std::fs::read_to_string(&file).unwrap();
    let mut kept: serde_json::Value = serde_json::from_str(&kept).unwrap();
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let due = Duration::from_secs(30 * 24 * 60 * 60) + Duration::from_secs(10);
    let ends = since.unwrap() + due;
    kept["expires"] = serde_json::json!(u64::try_from(ends.as_millis()).unwrap());
    std::fs::write(&file, kept.to_string()).unwrap();
    fixture.ok(&["gate", "start"]);
    let gate = fixture.gate();
    // The root is changed on disk. No command makes the running gate read it, so the gate must
    // check by itself.
    let public = fixture.gate_dir.state().join("ca.pem");
    let root = || {
        std::fs::read_to_string(&public)
            .unwrap()
            .trim_end()
            .to_owned()
    };
    wait::until("a new root", || (root() != first).then_some(()));
    wait::until("the new root in force", || {
        (exported_root(fixture) == root()).then_some(())
    });
    assert_eq!(fixture.gate(), gate, "by the gate that ran already");
    assert_has_root(fixture, "fix", &root());
    assert_eq!(
        fixture.json(&["ca", "show"])["older_roots_that_lead_here"],
        1
    );
}

fn operators_env_option_overrides_trust_variables(fixture: &SandboxFixture) {
    fixture.create("fix");
    let line = "echo \"[$HTTPS_PROXY] [$no_proxy] [$SSL_CERT_FILE]\"";
    assert_eq!(
        fixture.stdout_of("fix", line),
        "[http://palisade.internal:8080] [localhost,127.0.0.1,::1] \
         [/etc/ssl/certs/ca-certificates.crt]"
    );
    let requested = ["--env", "HTTPS_PROXY=", "--env", "SSL_CERT_FILE=/mine"];
    let args = [&["exec"], &requested[..], &["fix", "--", "sh", "-c", line]].concat();
    assert_eq!(fixture.ok(&args), "[] [localhost,127.0.0.1,::1] [/mine]\n");
}

fn setup_command_trusts_the_gate(fixture: &SandboxFixture) {
    let setup = format!("sandbox:\n  setup_command: \"{CURL} > /tmp/said\"\n");
    let _origin = internet(fixture, &setup);
    fixture.create("fix");
    assert_eq!(fixture.stdout_of("fix", "cat /tmp/said"), "hello");
}

/// Every trust file of the host: its name, modification time and content.
fn trusted_by_the_host() -> Vec<(PathBuf, SystemTime, Vec<u8>)> {
    let mut all = Vec::new();
    for gate_dir in [
        "/etc/ssl/certs",
        "/etc/palisade",
        "/usr/local/share/ca-certificates",
    ] {
        for entry in std::fs::read_dir(gate_dir).into_iter().flatten().flatten() {
            let changed = entry.path().symlink_metadata().unwrap().modified().unwrap();
            let bytes = std::fs::read(entry.path()).unwrap_or_default();
            all.push((entry.path(), changed, bytes));
        }
    }
    all.sort();
    all
}

fn agent_cannot_change_the_trust_files_of_the_host(fixture: &SandboxFixture) {
    let before = trusted_by_the_host();
    fixture.create("fix");
    fixture.bash(
        "fix",
        "for at in /etc/ssl/certs /etc/palisade /usr/local/share/ca-certificates; do \
         for name in $at/*; do echo x >> $name; mv $name $name.gone; rm -f $name; done; \
         echo x > $at/new; done",
    );
    assert_eq!(trusted_by_the_host(), before);
    // The agent cannot change the files with the gate's certificate either.
    assert_eq!(root_in_sandbox(fixture, "fix"), exported_root(fixture));
    fixture.stdout_of("fix", "test ! -e /etc/palisade/new");
    fixture.create("other");
    let bundle = fixture.stdout_of("other", "cat /etc/ssl/certs/ca-certificates.crt");
    assert!(bundle.ends_with(&exported_root(fixture)), "{bundle}");
}

fn custom_rootfs_trusts_the_gate(fixture: &SandboxFixture) {
    let tree = fixture.gate_dir.path().join("tree");
    let at = |name: &str| tree.join(name);
    // As on Fedora, directories are links, and the bundle is a link.
    for name in ["bin", "etc/ssl", "etc/pki/tls/certs", "etc/pki/extracted"] {
        std::fs::create_dir_all(at(name)).unwrap();
    }
    std::fs::copy("/bin/busybox", at("bin/busybox"))
        .unwrap_or_else(|error| panic!("install busybox-static: {error}"));
    let link = |to: &str, name: &str| std::os::unix::fs::symlink(to, at(name)).unwrap();
    for name in ["sh", "cat", "bash"] {
        link("busybox", &format!("bin/{name}"));
    }
    link("../pki/tls/certs", "etc/ssl/certs");
    link(
        "/etc/pki/extracted/bundle.pem",
        "etc/pki/tls/certs/ca-bundle.crt",
    );
    std::fs::write(at("etc/pki/extracted/bundle.pem"), "theirs").unwrap();
    let _origin = internet(
        fixture,
        &format!("sandbox:\n  rootfs: {}\n", tree.display()),
    );
    let created = fixture.run(&["create", "fix"]);
    assert!(created.status.success(), "{}", output::stderr(&created));
    let run = |path: &str| {
        let output = fixture.run(&["exec", "fix", "--", "/bin/cat", path]);
        assert!(
            output.status.success(),
            "{path}: {}",
            output::stderr(&output)
        );
        output::stdout(&output).trim_end().to_owned()
    };
    let root = exported_root(fixture);
    assert_eq!(run("/etc/palisade/ca.pem"), root);
    for gate_dir in [
        "/etc/ssl/certs/ca-certificates.crt",
        "/etc/pki/tls/certs/ca-certificates.crt",
        "/etc/pki/tls/certs/ca-bundle.crt",
    ] {
        assert!(run(gate_dir).ends_with(&root), "{gate_dir}");
    }
    assert_eq!(run("/etc/pki/extracted/bundle.pem"), "theirs");
    let theirs = std::fs::read(at("etc/pki/tls/certs/ca-bundle.crt")).unwrap_or_default();
    assert!(theirs.is_empty(), "the link leads nowhere on the host");
    assert_eq!(
        std::fs::read_dir(at("etc/pki/tls/certs")).unwrap().count(),
        1
    );
}

/// Creates a sandbox whose agent is root in the sandbox. The fixture does that anyway for a user
/// with subordinate ids.
fn create_as_root(fixture: &SandboxFixture, name: &str) {
    match fixture.gate_dir.operator() {
        Operator::SubidUser => fixture.ok(&["create", name]),
        Operator::CurrentUser | Operator::Unprivileged => fixture.ok(&["create", "--root", name]),
    };
}

fn rebuilt_certificate_bundle_has_the_gates_root(fixture: &SandboxFixture) {
    let _origin = internet(fixture, "");
    create_as_root(fixture, "fix");
    if !fixture
        .bash("fix", "command -v update-ca-certificates")
        .status
        .success()
    {
        return;
    }
    fixture.stdout_of("fix", "update-ca-certificates --fresh 2>&1");
    for prefix in ["", WITHOUT_PROXY, WITHOUT_ENVIRONMENT] {
        assert_eq!(
            fixture.stdout_of("fix", &format!("{prefix} {CURL}")),
            "hello",
            "{prefix}"
        );
    }
    let bundle = fixture.stdout_of("fix", "cat /etc/ssl/certs/ca-certificates.crt");
    assert!(bundle.contains(&exported_root(fixture)));
}

fn fork_trusts_the_gate_despite_altered_certificate_files(fixture: &SandboxFixture) {
    let _origin = internet(fixture, "");
    create_as_root(fixture, "one");
    // An agent that is root in the sandbox can change the files, and a fork starts with these
    // files.
    fixture.bash(
        "one",
        "mv /etc/palisade /etc/other; ln -s /workspace /etc/palisade; \
         rm -r /etc/ssl/certs; ln -s /workspace /etc/ssl/certs",
    );
    fixture.ok(&["checkpoint", "one", "early"]);
    fixture.ok(&["fork", "one", "two"]);
    fixture.ok(&["restore", "--yes", "one", "early"]);
    for name in ["one", "two"] {
        assert_eq!(root_in_sandbox(fixture, name), exported_root(fixture));
        let line = format!("{CURL} --cacert /etc/palisade/ca.pem");
        assert_eq!(fixture.stdout_of(name, &line), "hello");
    }
    let left = std::fs::read_dir(fixture.repo.dir()).unwrap();
    let left: Vec<_> = left.flatten().map(|entry| entry.file_name()).collect();
    assert!(!left.iter().any(|name| name == "ca.pem"), "{left:?}");
}
