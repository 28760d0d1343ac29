//! Rules that name programs.

use serde_json::Value;
use testkit::ca::Ca;
use testkit::origin::{OriginReply, OriginServer};
use testkit::output;

use crate::sandbox_fixture::{SandboxFixture, describe, text};

for_every_operator!(
    program_rule_applies_to_that_program_only,
    connection_shared_by_two_programs_matches_neither_rule,
    rule_for_git_covers_its_helper_programs,
    passthrough_rule_applies_to_its_program_only,
);

/// The address for programs without a proxy.
const ANY_ADDRESS: &str = "192.0.2.1";

/// Perl script that requests a page of the host `$ARGV[0]` and prints the response. Further
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
struct ProgramsFixture<'a> {
    fixture: &'a SandboxFixture,
    plain: OriginServer,
    secure: OriginServer,
}

impl<'a> ProgramsFixture<'a> {
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

    fn perl(&self, args: &[&str]) -> String {
        let command = [&["exec", "fix", "--", "perl", "-e", PERL][..], args].concat();
        let output = self.fixture.run(&command);
        assert!(output.status.success(), "{}", describe(&output));
        output::stdout(&output)
    }

    /// The response that curl gets.
    fn curl(&self, args: &str) -> String {
        let to = format!("--connect-to ::{ANY_ADDRESS}:");
        self.fixture
            .stdout_of("fix", &format!("curl -sSk --noproxy '*' {to} {args}"))
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

fn program_rule_applies_to_that_program_only(fixture: &SandboxFixture) {
    let rules = "  domains: [{host: allowed.test, programs: [curl]}]\n";
    let rules_fixture = ProgramsFixture::new(fixture, rules);
    assert_eq!(rules_fixture.curl("http://allowed.test/"), "welcome");
    assert_eq!(rules_fixture.curl("https://allowed.test/"), "welcome");
    // The rule applies through the proxy and in a tunnel.
    for url in ["http://allowed.test/", "https://allowed.test/"] {
        let line = format!("curl -sSk -x http://{ANY_ADDRESS}:8080 {url}");
        assert_eq!(fixture.stdout_of("fix", &line), "welcome", "{line}");
    }
    assert_eq!(rules_fixture.arrived(), 4);

    let refused = rules_fixture.perl(&["allowed.test"]);
    assert!(refused.starts_with("HTTP/1.1 403"), "{refused}");
    assert_eq!(reason(&refused), "program_denied");
    // Another path of the same program is another program.
    let line =
        format!("cp $(command -v curl) /tmp/other && /tmp/other -sSk -x http://{ANY_ADDRESS}:8080");
    for url in ["http://allowed.test/", "https://allowed.test/"] {
        let refused = fixture.stdout_of("fix", &format!("{line} {url}"));
        assert_eq!(reason(&refused), "program_denied", "{url}");
    }
    assert_eq!(rules_fixture.arrived(), 4);
}

fn connection_shared_by_two_programs_matches_neither_rule(fixture: &SandboxFixture) {
    let rules = "  domains: [{host: perl.test, programs: [perl]}]\n";
    let rules_fixture = ProgramsFixture::new(fixture, rules);
    let welcome = rules_fixture.perl(&["perl.test"]);
    assert!(welcome.ends_with("welcome"), "{welcome}");
    let welcome = rules_fixture.perl(&["perl.test", "perl", "-e", "sleep 1000"]);
    assert!(welcome.ends_with("welcome"), "{welcome}");
    let refused = rules_fixture.perl(&["perl.test", "sleep", "1000"]);
    assert_eq!(reason(&refused), "program_denied", "{refused}");
    assert_eq!(rules_fixture.arrived(), 2);
}

fn rule_for_git_covers_its_helper_programs(fixture: &SandboxFixture) {
    let rules = "  domains: [{host: allowed.test, programs: [git]}]\n";
    let rules_fixture = ProgramsFixture::new(fixture, rules);
    // The server is no git server. The test only checks that the request arrives.
    let asks = format!(
        "git -c http.sslVerify=false -c http.proxy=http://{ANY_ADDRESS}:8080 ls-remote https://allowed.test/a.git"
    );
    fixture.bash("fix", &asks);
    let received = rules_fixture.secure.requests();
    assert_eq!(
        received
            .first()
            .map(|request| request.path().to_owned())
            .as_deref(),
        Some("/a.git/info/refs")
    );
    assert_eq!(
        reason(&rules_fixture.curl("https://allowed.test/a.git/info/refs")),
        "program_denied"
    );
}

fn passthrough_rule_applies_to_its_program_only(fixture: &SandboxFixture) {
    let rules = "  passthrough: [allowed.test]\n  \
                 domains: [{host: allowed.test, programs: [curl]}]\n";
    let rules_fixture = ProgramsFixture::new(fixture, rules);
    assert_eq!(rules_fixture.curl("https://allowed.test/"), "welcome");
    let other = format!(
        "cp $(command -v curl) /tmp/other && /tmp/other -sSk --noproxy '*' \
         --connect-to ::{ANY_ADDRESS}: https://allowed.test/"
    );
    let refused = fixture.bash("fix", &other);
    assert!(!refused.status.success(), "{}", describe(&refused));
    assert_eq!(rules_fixture.arrived(), 1);
}
