use std::io::Write;
use std::os::unix::fs::symlink;
use std::time::Duration;

use flate2::Compression;
use flate2::write::GzEncoder;
use policy::rego::{Budget, Decision, DecisionDetails};
use serde_json::json;
use tempfile::TempDir;

use super::*;
use crate::section::policies::BundleMode;

const POLICY: &str = "package http.authz\ndefault allow := false\nallow if input.host in data.lists.hosts\nallow if data.open\n";

fn bundle(path: &Path) -> BundleSettings {
    BundleSettings {
        id: "mine".to_owned(),
        path: path.to_owned(),
        entrypoint: "http/authz".to_owned(),
        required: false,
        mode: BundleMode::Enforce,
    }
}

fn directory(files: &[(&str, &str)]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (path, text) in files {
        let path = dir.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    dir
}

fn allows(bundle: &rego::Bundle, host: &str) -> bool {
    let decided = bundle.decide(
        &json!({"host": host}),
        Budget::with_time_limit(Duration::from_secs(5)),
    );
    match decided {
        Decision::Allow(_) => true,
        Decision::Deny(details) => {
            assert_eq!(details, DecisionDetails::default());
            false
        }
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn refused(read: Result<rego::Bundle, BundleReadError>, expected: &str) {
    let error = read.unwrap_err().to_string();
    assert!(error.starts_with("policies.bundles: mine: "), "{error}");
    assert!(error.contains(expected), "{error}");
}

#[test]
fn directory_is_split_into_policy_and_data_by_file_names() {
    for (name, text) in [
        ("lists/data.json", r#"{"hosts": ["a.example"]}"#),
        ("lists/names.yaml", "hosts:\n  - a.example\n"),
        ("data.yml", "lists: {hosts: [a.example]}"),
    ] {
        let dir = directory(&[
            ("rules/policy.rego", POLICY),
            (name, text),
            ("README.md", "no policy"),
            (".hidden/broken.rego", "no policy"),
            (".manifest", "no data"),
        ]);
        let read = read(&bundle(dir.path())).unwrap();
        assert!(allows(&read, "a.example"), "{name}");
        assert!(!allows(&read, "b.example"), "{name}");
    }
}

#[test]
fn example_policy_allows_reads_and_explains_a_refused_write() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../policies/http-authz");
    let example = read(&bundle(&path)).unwrap();
    let decide = |method: &str, host: &str| {
        let input = json!({"method": method, "host": host});
        example.decide(&input, Budget::with_time_limit(Duration::from_secs(5)))
    };
    assert_eq!(
        decide("GET", "a.example"),
        Decision::Allow(DecisionDetails::default())
    );
    assert_eq!(
        decide("POST", "api.github.com"),
        Decision::Allow(DecisionDetails::default())
    );
    let Decision::Deny(details) = decide("POST", "a.example") else {
        panic!("it was not denied");
    };
    assert_eq!(
        details.message.unwrap(),
        "POST to a.example is not allowed: only reading is."
    );
}

#[test]
fn missing_bundle_differs_from_invalid_bundle() {
    let dir = directory(&[("a.rego", "package http.authz\n\nallow if {")]);
    let none = dir.path().join("none");
    assert_eq!(
        read(&bundle(&none)).unwrap_err(),
        BundleReadError::Missing {
            id: "mine".to_owned(),
            path: none
        }
    );
    refused(read(&bundle(dir.path())), "a.rego:3:");
}

#[test]
fn invalid_data_file_is_named_in_the_error() {
    for (files, expected) in [
        (vec![("x/data.json", "{")], "x/data.json cannot be used"),
        (vec![("data.json", "[]")], "must be an object"),
        (vec![("data.yaml", "a: 1\na: 2\n")], "data.yaml"),
        (
            vec![("data.json", r#"{"x": {"a": 1}}"#), ("x/data.yaml", "a: 2")],
            "data.x.a is also in another file",
        ),
        (
            vec![("http/authz/data.json", r#"{"allow": true}"#)],
            "the bundle's data cannot be used",
        ),
    ] {
        let dir = directory(&[&files[..], &[("policy.rego", POLICY)]].concat());
        refused(read(&bundle(dir.path())), expected);
    }
    refused(read(&bundle(directory(&[]).path())), "no .rego file");
}

#[test]
fn links_are_followed_inside_the_bundle_only() {
    // The layout of a ConfigMap that Kubernetes mounts.
    let dir = directory(&[
        ("..2026/policy.rego", POLICY),
        ("..2026/data.json", r#"{"open": true}"#),
    ]);
    symlink("..2026", dir.path().join("..data")).unwrap();
    symlink("..data/policy.rego", dir.path().join("policy.rego")).unwrap();
    symlink("..data/data.json", dir.path().join("data.json")).unwrap();
    assert!(allows(&read(&bundle(dir.path())).unwrap(), "a"));

    let other = directory(&[("secret.json", r#"{"open": true}"#)]);
    symlink(other.path().join("secret.json"), dir.path().join("s.json")).unwrap();
    refused(
        read(&bundle(dir.path())),
        "a link to a file outside of the bundle",
    );
    std::fs::remove_file(dir.path().join("s.json")).unwrap();
    symlink("..2026", dir.path().join("again")).unwrap();
    refused(read(&bundle(dir.path())), "a link to a directory");
    std::fs::remove_file(dir.path().join("again")).unwrap();
    nix::unistd::mkfifo(&dir.path().join("pipe.rego"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    refused(read(&bundle(dir.path())), "not a regular file");
}

fn pack(entries: &[(&str, tar::EntryType, &[u8])]) -> Vec<u8> {
    let mut archive = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::fast()));
    for (name, kind, bytes) in entries {
        let mut header = tar::Header::new_gnu();
        // Writes the name as bytes, because the library refuses the names that the reader must refuse.
        header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
        header.set_entry_type(*kind);
        header.set_size(bytes.len() as u64);
        if !kind.is_file() {
            header.set_link_name("policy.rego").unwrap();
        }
        header.set_mode(0o644);
        header.set_cksum();
        archive.append(&header, *bytes).unwrap();
    }
    archive.into_inner().unwrap().finish().unwrap()
}

fn archive(bytes: &[u8]) -> (TempDir, BundleSettings) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("bundle.tar.gz");
    std::fs::write(&path, bytes).unwrap();
    let bundle = bundle(&path);
    (dir, bundle)
}

#[test]
fn opa_archive_is_read_as_a_bundle() {
    let file = tar::EntryType::Regular;
    let (_dir, bundle) = archive(&pack(&[
        ("/.manifest", file, b"{\"roots\": [\"\"]}"),
        (
            "/data.json",
            file,
            br#"{"lists": {"hosts": ["a.example"]}}"#,
        ),
        ("/rules/policy.rego", file, POLICY.as_bytes()),
        ("/policy.wasm", file, b"\0asm"),
    ]));
    let read = read(&bundle).unwrap();
    assert!(allows(&read, "a.example"));
    assert!(!allows(&read, "b.example"));
}

#[test]
fn a_hostile_archive_is_refused() {
    let file = tar::EntryType::Regular;
    let policy = ("policy.rego", file, POLICY.as_bytes());
    for (entries, expected) in [
        (
            vec![("../up.rego", file, POLICY.as_bytes())],
            "is outside of the bundle",
        ),
        (
            vec![("a/../../up.json", file, b"{}".as_slice())],
            "is outside of the bundle",
        ),
        (
            vec![policy, ("link.rego", tar::EntryType::Symlink, b"")],
            "not a regular file",
        ),
        (
            vec![policy, ("hard.rego", tar::EntryType::Link, b"")],
            "not a regular file",
        ),
        (
            vec![policy, ("pipe.rego", tar::EntryType::Fifo, b"")],
            "not a regular file",
        ),
        (vec![policy, policy], "contains it twice"),
    ] {
        let (_dir, bundle) = archive(&pack(&entries));
        refused(read(&bundle), expected);
    }
    let (_dir, bundle) = archive(b"no archive");
    refused(read(&bundle), "neither a directory nor a .tar.gz");
    let mut cut = pack(&[policy]);
    cut.truncate(cut.len() / 2);
    let (_dir, bundle) = archive(&cut);
    refused(read(&bundle), "the archive is broken");
}

#[test]
fn an_archive_that_unpacks_to_too_much_is_refused() {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    let mut header = tar::Header::new_gnu();
    header.set_path("data.json").unwrap();
    header.set_size(1 << 30);
    header.set_mode(0o644);
    header.set_cksum();
    encoder.write_all(header.as_bytes()).unwrap();
    let zeros = vec![b' '; 1 << 20];
    for _ in 0..100 {
        encoder.write_all(&zeros).unwrap();
    }
    let (_dir, bundle) = archive(&encoder.finish().unwrap());
    refused(read(&bundle), "more than");
}

#[test]
fn tests_of_a_bundle_are_not_part_of_the_policy() {
    let dir = directory(&[
        ("policy.rego", POLICY),
        ("lists/data.json", r#"{"hosts": []}"#),
        ("policy_test.rego", "package http.authz\nallow := true\n"),
    ]);
    assert!(!allows(&read(&bundle(dir.path())).unwrap(), "a.example"));
    let contents = open("mine", dir.path()).unwrap();
    assert_eq!((contents.modules.len(), contents.tests.len()), (1, 1));
    let only = directory(&[("policy_test.rego", POLICY)]);
    refused(read(&bundle(only.path())), "no .rego file");
}
