use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use super::*;

#[track_caller]
fn assert_round_trip<T: Leaf>(text: &str, written: &str) {
    let value = T::read(text).unwrap_or_else(|detail| panic!("{text:?}: {detail}"));
    assert_eq!(value.write(), written, "{text:?}");
    let again = T::read(&value.write()).map(|value| value.write());
    assert_eq!(again.as_deref(), Ok(written), "{text:?} does not read back");
}

#[track_caller]
fn assert_refuses<F: Format>(texts: &[&str]) {
    for text in texts {
        assert!(F::check(text).is_err(), "{} accepts {text:?}", F::NAME);
    }
}

#[track_caller]
fn assert_accepts<F: Format>(texts: &[&str]) {
    for text in texts {
        assert_eq!(F::check(text), Ok(()), "{} refuses {text:?}", F::NAME);
    }
}

#[test]
fn formats_have_distinct_names() {
    let mut names: Vec<&str> = FORMATS.iter().map(|row| row.name).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), FORMATS.len());
}

#[test]
fn durations_parse_and_print() {
    for (text, written) in [
        ("10s", "10s"),
        ("50ms", "50ms"),
        ("2m", "120s"),
        ("1h", "3600s"),
        ("1d", "86400s"),
        ("1m30s", "90s"),
        ("1s500ms", "1500ms"),
        ("30", "30s"),
        ("0", "0s"),
        ("3650d", "315360000s"),
    ] {
        assert_round_trip::<Duration>(text, written);
    }
    assert_refuses::<Duration>(&[
        "",
        "s",
        "10 s",
        "-1s",
        "1.5s",
        "10x",
        "10S",
        "3651d",
        "99999999999999999999",
        "1s2",
        "18446744073709551615h",
        "１s",
    ]);
}

#[test]
fn sizes_parse_and_print() {
    for (text, written) in [
        ("64MiB", "64MiB"),
        ("4GiB", "4GiB"),
        ("1GB", "1GB"),
        ("1024", "1KiB"),
        ("1000", "1000"),
        ("1 KiB", "1KiB"),
        ("5B", "5"),
        ("0", "0"),
    ] {
        assert_round_trip::<u64>(text, written);
    }
    assert_refuses::<u64>(&[
        "",
        "MiB",
        "-1",
        "1.5GiB",
        "1Gb",
        "4g",
        "9999999TiB",
        "18446744073709551616",
    ]);
}

#[test]
fn addresses_parse_and_print() {
    for (text, written) in [
        ("127.0.0.1:8090", "127.0.0.1:8090"),
        ("[::1]:80", "[::1]:80"),
        (":8090", "[::]:8090"),
        (":0", "[::]:0"),
        ("localhost:1", "127.0.0.1:1"),
    ] {
        assert_round_trip::<SocketAddr>(text, written);
    }
    assert_refuses::<SocketAddr>(&[
        "",
        ":",
        "8090",
        "127.0.0.1",
        "h.example:80",
        ":65536",
        ":+1",
        "::1:80x",
    ]);
    assert_round_trip::<Cidr>("10.0.0.0/8", "10.0.0.0/8");
    assert_round_trip::<Cidr>("192.0.2.1", "192.0.2.1/32");
    assert_round_trip::<Cidr>("fd00::/8", "fd00::/8");
    assert_round_trip::<Cidr>("0.0.0.0/0", "0.0.0.0/0");
    assert_refuses::<Cidr>(&[
        "",
        "10.0.0.0/33",
        "10.0.0.1/8",
        "10/8",
        "fd00::/129",
        "10.0.0.0/+8",
        "x",
    ]);
    let range = Cidr::read("10.1.0.0/16").unwrap();
    assert!(range.contains("10.1.255.1".parse().unwrap()));
    assert!(range.contains("::ffff:10.1.0.1".parse().unwrap()));
    assert!(!range.contains("10.2.0.1".parse().unwrap()));
    assert!(!range.contains("fd00::1".parse().unwrap()));
    assert!(
        Cidr::read("::/0")
            .unwrap()
            .contains("fd00::1".parse().unwrap())
    );
    assert_round_trip::<DnsUpstream>("system", "system");
    assert_round_trip::<DnsUpstream>("192.0.2.53", "192.0.2.53:53");
    assert_round_trip::<DnsUpstream>("[2001:db8::1]:5353", "[2001:db8::1]:5353");
    assert_refuses::<DnsUpstream>(&["", "System", "dns.example"]);
    assert_accepts::<DnsType>(&["TXT", "MX", "TYPE65"]);
    assert_refuses::<DnsType>(&["", "txt", "A B", "1"]);
}

#[test]
fn secret_sources_and_env_entries_parse() {
    assert_round_trip::<SecretSource>("env:TOKEN", "env:TOKEN");
    assert_round_trip::<SecretSource>("file:~/x", "file:~/x");
    assert_round_trip::<SecretSource>("command: pass show x", "command:pass show x");
    assert_refuses::<SecretSource>(&[
        "",
        "TOKEN",
        "env:",
        "env:1X",
        "file:",
        "command: ",
        "command:a\nb",
        "sk-abc",
    ]);
    // An entry is written without its value, so the text does not parse to the same entry.
    let entry = EnvEntry::read("A=b=c").unwrap();
    assert_eq!((entry.name.as_str(), entry.value.expose()), ("A", "b=c"));
    assert_eq!(entry.write(), "A=[secret]");
    assert_eq!(EnvEntry::read("A=").unwrap().write(), "A=[unset]");
    assert_refuses::<EnvEntry>(&["", "A", "=b", "1=b", "A B=c", "A=\0"]);
}

#[test]
fn paths_and_urls_are_checked() {
    assert_accepts::<PathBuf>(&["a", "/a/b c", "~/x", "."]);
    assert_refuses::<PathBuf>(&["", "a\nb", "a\0b"]);
    assert_accepts::<UrlPath>(&["/", "/metrics"]);
    assert_refuses::<UrlPath>(&["", "metrics", "/a b", "/a?b", "/a\n"]);
    assert_accepts::<HttpUrl>(&[
        "http://localhost:4318",
        "https://a.example/b?c#d",
        "http://[::1]:80/",
    ]);
    assert_refuses::<HttpUrl>(&[
        "",
        "a.example",
        "ftp://a.example",
        "http://",
        "http://u@a.example",
        "https://a b",
    ]);
    assert_accepts::<TreePath>(&[".github/workflows", "a/", "a"]);
    assert_refuses::<TreePath>(&["", "/a", "a//b", "../a", "a/..", "a\nb"]);
    assert_accepts::<GitUrl>(&[
        "ssh://git@git.example/app.git",
        "ssh://git.example:2222/a/b",
        "git@git.example:app.git",
        "https://git.example/a/b.git",
        "git://git.example/a",
    ]);
    assert_refuses::<GitUrl>(&[
        "",
        "app",
        "ssh://git.example",
        "file:///etc",
        "ext::sh -c x",
        "https://u:p@git.example/a",
        "-oProxyCommand=x:y",
        "ssh://-oProxyCommand=x/a",
        "ssh://-u@git.example/a",
        "git@git.example:-x",
        "ssh://git@git.example/a\nb",
    ]);
    assert!(GitUrl::is_ssh("git@git.example:app.git"));
    assert!(!GitUrl::is_ssh("https://git.example/app.git"));
}

#[test]
fn names_are_checked() {
    assert_accepts::<Name>(&["a", "Daten-Werkzeug é", "a b", "it's \"x\""]);
    assert_refuses::<Name>(&["", " a", "a\n", "a\u{1b}b", "a\u{202e}b", &"x".repeat(129)]);
    assert_accepts::<Slug>(&["a", "A-1_.b"]);
    assert_refuses::<Slug>(&["", ".a", "-a", "a/b", "a b", "é", &"x".repeat(65)]);
    assert_accepts::<Image>(&["busybox:latest", "r.example:5000/a/b@sha256:00ff"]);
    assert_refuses::<Image>(&["", "-v", "a b", "a;b", "/x"]);
    assert_accepts::<HostKey>(&["ssh-ed25519 AAAA", "ecdsa-sha2-nistp256 AAAA= comment"]);
    assert_refuses::<HostKey>(&["", "ssh-ed25519", "AAAA", "ssh-rsa AA\nAA"]);
    assert_accepts::<HeaderName>(&["Authorization", "x-api-key"]);
    assert_refuses::<HeaderName>(&["", "a b", "a:", "é"]);
}

#[test]
fn parts_of_rules_parse() {
    assert_round_trip::<AuthScheme>("Bearer", "Bearer");
    assert_round_trip::<AuthScheme>("Basic:x-access-token", "Basic:x-access-token");
    assert_round_trip::<AuthScheme>("raw", "raw");
    assert_refuses::<AuthScheme>(&["", "Basic", "Basic:", "Basic:a:b", "Digest"]);
    assert_round_trip::<PortMapping>("3000", "3000");
    assert_round_trip::<PortMapping>("8080:3000", "8080:3000");
    assert_refuses::<PortMapping>(&["", "0", "1:0", "65536", "a:1", "1:2:3", "+1"]);
    assert_round_trip::<Endpoint>("GET /**", "GET /**");
    assert_round_trip::<Endpoint>("/a/*", "/a/*");
    assert_refuses::<Endpoint>(&["", "GET", "get /x", "GET x", "G(T /x"]);
    assert_round_trip::<RegexPattern>("^/a$", "^/a$");
    assert_refuses::<RegexPattern>(&["(", "a{100000}{100000}", "(?=x)"]);
    assert_accepts::<MethodName>(&["GET", "PROPFIND"]);
    assert_refuses::<MethodName>(&["", "get", "G T"]);
}
