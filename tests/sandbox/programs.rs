//! Rules that name programs.

use serde_json::Value;
use testkit::ca::Ca;
use testkit::origin::{OriginReply, OriginServer};
use testkit::output;

use crate::sandbox_fixture::{SandboxFixture, describe, text};

for_every_operator!(
    a_rule_for_one_program_is_for_no_other,
    a_connection_that_two_programs_hold_is_neithers,
    a_rule_for_git_is_for_what_git_does_its_work_with,
    what_is_passed_on_unread_is_for_its_program_alone,
);

/// The address for programs without a proxy.
const ANYWHERE: &str = "192.0.2.1";

/// Requests a page of the host `$ARGV[0]` by hand and prints the response. Further
/// arguments are a program that inherits the connection.
const PERL: &str = r#"
    use IO::Socket::INET;
    $^F = 255;
    my ($host, @other) = @ARGV;
    my $s = IO::Socket::INET->new(PeerAddr => "192.0.2.1:80") or die "no connection: $!";
    my $child;
    if (@other) {
        # Its end of a pipe closes when the other program has begun.
        pipe(my $r, my $w);
        $child = fork;
        if (!$child) { fcntl($w, 2, 1); open STDOUT, ">/dev/null"; exec @other; }
        close $w;
        <$r>;
    }
    print $s "GET / HTTP/1.1\r\nHost: $host\r\nConnection: close\r\n\r\n";
    print while <$s>;
    kill "KILL", $child if $child;
"#;

/// A gate with these rules in front of a server, for `allowed.test` and others.
struct World<'a> {
    fixture: &'a SandboxFixture,
    plain: OriginServer,
    secure: OriginServer,
}

impl<'a> World<'a> {
    fn new(fixture: &'a SandboxFixture, rules: &str) -> Self {
        let ca = Ca::new("roots of a test");
        ca.write(fixture.gate_dir.path());
        fixture
            .gate_dir
            .operator()
            .chown(&fixture.gate_dir.path().join("root.pem"));
        let plain = OriginServer::http(|_| OriginReply::text("welcome"));
        let identity = ca.identity(&["allowed.test", "perl.test"]);
        let secure = OriginServer::https(identity, |_| OriginReply::text("welcome"));
        let (http, https) = (plain.address(), secure.address());
        fixture.gate_dir.write_config(&format!(
            "version: \"1.0\"\negress:\n  extra_roots: [root.pem]\n  resolve: {{\
             'allowed.test:80': '{http}', 'allowed.test:443': '{https}', \
             'perl.test:80': '{http}', 'perl.test:443': '{https}'}}\n{rules}"
        ));
        fixture.create("fix");
        Self {
            fixture,
            plain,
            secure,
        }
    }

    fn perl(&self, words: &[&str]) -> String {
        let command = [&["exec", "fix", "--", "perl", "-e", PERL][..], words].concat();
        let output = self.fixture.run(&command);
        assert!(output.status.success(), "{}", describe(&output));
        output::stdout(&output)
    }

    /// The response that curl gets.
    fn curl(&self, words: &str) -> String {
        let to = format!("--connect-to ::{ANYWHERE}:");
        self.fixture
            .stdout_of("fix", &format!("curl -sSk --noproxy '*' {to} {words}"))
    }

    /// Number of requests that reached the server.
    fn arrived(&self) -> usize {
        self.plain.requests().len() + self.secure.requests().len()
    }
}

fn reason(answer: &str) -> String {
    let body = answer.split("\r\n\r\n").last().unwrap_or_default();
    let body: Value = serde_json::from_str(body).unwrap_or_else(|_| panic!("no JSON: {answer}"));
    text(&body["reason"])
}

fn a_rule_for_one_program_is_for_no_other(fixture: &SandboxFixture) {
    let rules = "  domains: [{host: allowed.test, programs: [curl]}]\n";
    let world = World::new(fixture, rules);
    assert_eq!(world.curl("http://allowed.test/"), "welcome");
    assert_eq!(world.curl("https://allowed.test/"), "welcome");
    // Through the proxy, and in a tunnel.
    for url in ["http://allowed.test/", "https://allowed.test/"] {
        let line = format!("curl -sSk -x http://{ANYWHERE}:8080 {url}");
        assert_eq!(fixture.stdout_of("fix", &line), "welcome", "{line}");
    }
    assert_eq!(world.arrived(), 4);

    let refused = world.perl(&["allowed.test"]);
    assert!(refused.starts_with("HTTP/1.1 403"), "{refused}");
    assert_eq!(reason(&refused), "program_denied");
    // Another path of the same program is another program.
    let line =
        format!("cp $(command -v curl) /tmp/other && /tmp/other -sSk -x http://{ANYWHERE}:8080");
    for url in ["http://allowed.test/", "https://allowed.test/"] {
        let refused = fixture.stdout_of("fix", &format!("{line} {url}"));
        assert_eq!(reason(&refused), "program_denied", "{url}");
    }
    assert_eq!(world.arrived(), 4);
}

fn a_connection_that_two_programs_hold_is_neithers(fixture: &SandboxFixture) {
    let rules = "  domains: [{host: perl.test, programs: [perl]}]\n";
    let world = World::new(fixture, rules);
    let welcome = world.perl(&["perl.test"]);
    assert!(welcome.ends_with("welcome"), "{welcome}");
    let welcome = world.perl(&["perl.test", "perl", "-e", "sleep 1000"]);
    assert!(welcome.ends_with("welcome"), "{welcome}");
    let refused = world.perl(&["perl.test", "sleep", "1000"]);
    assert_eq!(reason(&refused), "program_denied", "{refused}");
    assert_eq!(world.arrived(), 2);
}

fn a_rule_for_git_is_for_what_git_does_its_work_with(fixture: &SandboxFixture) {
    let rules = "  domains: [{host: allowed.test, programs: [git]}]\n";
    let world = World::new(fixture, rules);
    // The server is no git server; that the request arrives is enough.
    let asks = format!(
        "git -c http.sslVerify=false -c http.proxy=http://{ANYWHERE}:8080 ls-remote https://allowed.test/a.git"
    );
    fixture.bash("fix", &asks);
    let asked = world.secure.requests();
    assert_eq!(
        asked
            .first()
            .map(|asked| asked.path().to_owned())
            .as_deref(),
        Some("/a.git/info/refs")
    );
    assert_eq!(
        reason(&world.curl("https://allowed.test/a.git/info/refs")),
        "program_denied"
    );
}

fn what_is_passed_on_unread_is_for_its_program_alone(fixture: &SandboxFixture) {
    let rules = "  passthrough: [allowed.test]\n  \
                 domains: [{host: allowed.test, programs: [curl]}]\n";
    let world = World::new(fixture, rules);
    assert_eq!(world.curl("https://allowed.test/"), "welcome");
    let other = format!(
        "cp $(command -v curl) /tmp/other && /tmp/other -sSk --noproxy '*' \
         --connect-to ::{ANYWHERE}: https://allowed.test/"
    );
    let refused = fixture.bash("fix", &other);
    assert!(!refused.status.success(), "{}", describe(&refused));
    assert_eq!(world.arrived(), 1);
}
