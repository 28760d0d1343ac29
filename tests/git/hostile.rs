//! Malformed pushes that no git client sends.

use std::io::Write;

use testkit::output;

use crate::git_fixture::{FixtureOptions, GitFixture};

/// The URL of pushes to the container's repository.
const TARGET: &str = "https://forge.example/acme/app.git/git-receive-pack";

fn pkt_line(text: &[u8]) -> Vec<u8> {
    [format!("{:04x}", text.len() + 4).as_bytes(), text].concat()
}

fn push_body(commands: &[&str]) -> Vec<u8> {
    let mut body = Vec::new();
    for (at, command) in commands.iter().enumerate() {
        let caps = if at == 0 { "\0report-status" } else { "" };
        body.extend(pkt_line(format!("{command}{caps}").as_bytes()));
    }
    body.extend_from_slice(b"0000");
    body.extend_from_slice(b"PACK\0\0\0\x02\0\0\0\0");
    body.extend_from_slice(&[7; 20]);
    body
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut child = std::process::Command::new("gzip")
        .arg("-c")
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let bytes = bytes.to_vec();
    let writer = std::thread::spawn(move || stdin.write_all(&bytes).unwrap());
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    assert!(output.status.success(), "{}", output::stderr(&output));
    output.stdout
}

#[test]
fn deletion_is_found_in_every_encoding_of_a_push() {
    let fixture = GitFixture::new();
    let (zero, one) = ("0".repeat(40), "1".repeat(40));
    let fine = format!("{zero} {one} refs/heads/fine");
    let gone = format!("{one} {zero} refs/heads/gone");
    let body = push_body(&[&fine, &gone]);
    for (bytes, headers) in [
        (body.clone(), vec![]),
        (body.clone(), vec!["transfer-encoding: chunked"]),
        (gzip(&body), vec!["content-encoding: gzip"]),
        (gzip(&body), vec!["content-encoding: x-gzip"]),
        (
            gzip(&body),
            vec!["content-encoding: GZip", "transfer-encoding: chunked"],
        ),
    ] {
        let (status, reply) = fixture.post(TARGET, &bytes, &headers);
        assert_eq!(status, 200, "{headers:?}: {reply}");
        assert!(reply.contains("unpack ok\n"), "{reply}");
        assert!(reply.contains("ng refs/heads/gone palisade: git_delete\n"));
        assert!(reply.contains("ng refs/heads/fine palisade: another ref"));
    }
    assert_eq!(fixture.forge.requests().len(), 0);
}

#[test]
fn ambiguous_push_is_refused() {
    let fixture = GitFixture::new();
    let (zero, one) = ("0".repeat(40), "1".repeat(40));
    let fine = push_body(&[&format!("{zero} {one} refs/heads/fine")]);
    let two = push_body(&[
        &format!("{zero} {one} refs/heads/fine"),
        &format!("{zero} {one} refs/heads/more\0push-options"),
    ]);
    let space = push_body(&[&format!("{zero} {one} refs/heads/a b")]);
    let compressed = gzip(&fine);
    let twice = [compressed.as_slice(), &compressed].concat();
    let cut = &compressed[..compressed.len() - 4];
    let deep = push_body(&[&format!("{zero} {one} ref/heads/fine")]);
    for (bytes, headers) in [
        (&two[..], &[][..]),
        (&space, &[]),
        (&deep, &[]),
        (b"zzzz", &[]),
        (b"0004", &[]),
        (b"0001", &[]),
        (b"00000000", &[]),
        (b"", &[]),
        (&fine[..fine.len() - 25], &[]),
        (&fine[..60], &[]),
        (&twice, &["content-encoding: gzip"]),
        (cut, &["content-encoding: gzip"]),
        (&fine, &["content-encoding: gzip"]),
        (&fine, &["content-encoding: br"]),
        (&fine, &["content-encoding: deflate"]),
        (&compressed, &["content-encoding: gzip, gzip"]),
        (
            &compressed,
            &["content-encoding: identity", "content-encoding: gzip"],
        ),
    ] {
        let (status, reply) = fixture.post(TARGET, bytes, headers);
        assert!(reply.contains("git_malformed"), "{headers:?}: {reply}");
        assert!(
            status == 400 || reply.contains("ng refs/heads/fine"),
            "{status} {reply}"
        );
    }
    let (status, reply) = fixture.curl(&[
        "-X",
        "POST",
        "-H",
        "content-type: text/plain",
        "-d",
        "0000",
        TARGET,
    ]);
    assert_eq!(status, 400, "{reply}");
    assert_eq!(fixture.forge.requests().len(), 0);
}

#[test]
fn empty_probe_request_passes() {
    let fixture = GitFixture::new();
    let (status, _) = fixture.post(TARGET, b"0000", &[]);
    assert_eq!(status, 200);
    let requests = fixture.forge.requests();
    assert_eq!((requests.len(), requests[0].length), (1, 4));
}

#[test]
fn client_without_report_status_is_refused_by_http_status() {
    let fixture = GitFixture::new();
    let (zero, one) = ("0".repeat(40), "1".repeat(40));
    let mut body = pkt_line(format!("{zero} {one} refs/heads/main").as_bytes());
    body.extend_from_slice(b"0000PACK\0\0\0\x02\0\0\0\0");
    body.extend_from_slice(&[7; 20]);
    let (status, reply) = fixture.post(TARGET, &body, &[]);
    assert_eq!(status, 403, "{reply}");
    assert!(reply.contains("\"reason\":\"git_protected\""), "{reply}");
    assert_eq!(fixture.forge.requests().len(), 0);
}

#[test]
fn decompression_bomb_is_refused() {
    let fixture = GitFixture::with_options(FixtureOptions {
        policy: "git: {push_limits: {warning_bytes: 500, hard_limit_bytes: 1000000}}\n",
        ..FixtureOptions::default()
    });
    let (zero, one) = ("0".repeat(40), "1".repeat(40));
    let mut body = push_body(&[&format!("{zero} {one} refs/heads/fine")]);
    body.resize(200 << 20, 0);
    let bomb = gzip(&body);
    assert!(bomb.len() < 1 << 20);
    let (before, _) = fixture.memory();
    let (status, reply) = fixture.post(TARGET, &bomb, &["content-encoding: gzip"]);
    assert_eq!(status, 413, "{reply}");
    let (after, _) = fixture.memory();
    assert!(after - before < 64 * 1024, "{before} {after}");
    assert_eq!(fixture.forge.requests().len(), 0);
}
