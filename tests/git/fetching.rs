//! Clone and fetch in every form, and which repositories may be read.

use testkit::output;

use crate::git_fixture::{APP, FORGE, FixtureOptions, GitFixture, describe, gits};

#[test]
fn clone_and_fetch_work_in_every_form() {
    let mut fixture = GitFixture::new();
    let first = fixture.working_copy("first");
    fixture.git_in(&first, &["push", "-q", "origin", "HEAD:refs/heads/feature"]);
    let home = fixture.path("");
    for (at, git) in gits().into_iter().enumerate() {
        for version in [0, 1, 2] {
            let fixture = fixture.use_git(git, version);
            let name = |form: &str| format!("{form}-{at}-{version}");
            let whole = name("whole");
            fixture.git_in(&home, &["clone", "-q", &format!("{APP}.git"), &whole]);
            let shallow = name("shallow");
            fixture.git_in(&home, &["clone", "-q", "--depth", "1", APP, &shallow]);
            let partial = name("partial");
            let args = ["clone", "-q", "--filter=blob:none", APP, &partial];
            fixture.git_in(&home, &args);
            let text = std::fs::read_to_string(home.join(&partial).join("README.md")).unwrap();
            assert_eq!(text, "hello\n");

            // A new upstream branch is fetched, with a request that git compresses.
            let branch = format!("HEAD:refs/heads/{}", name("new"));
            fixture.restart_gate();
            fixture.commit(&first, &name("file"), "new\n");
            fixture.git_in(&first, &["push", "-q", "origin", &branch]);
            for clone in [&whole, &shallow] {
                fixture.git_in(&home.join(clone), &["fetch", "-q", "origin"]);
            }
            let listed = fixture.git_in(&home.join(&whole), &["branch", "-r"]);
            assert!(listed.contains(&name("new")), "{listed}");
        }
    }
}

#[test]
fn sha256_repository_is_fetched_and_pushed() {
    let fixture = GitFixture::new();
    fixture.create_bare("acme/long", &["--object-format=sha256"]);
    let home = fixture.path("");
    let dir = fixture.path("long");
    fixture.git_in(&home, &["init", "-q", "--object-format=sha256", "long"]);
    fixture.commit(&dir, "file", "text\n");
    let url = format!("{FORGE}/acme/long.git");
    fixture.git_in(&dir, &["push", "-q", &url, "HEAD:refs/heads/feature"]);
    fixture.git_in(&home, &["clone", "-q", "-b", "feature", &url, "again"]);
    assert_eq!(
        fixture
            .git_in(&fixture.path("again"), &["rev-parse", "HEAD"])
            .len(),
        64
    );
    let refused = fixture.try_git(&dir, &["push", &url, "HEAD:refs/heads/main"]);
    assert!(!refused.status.success());
    assert!(output::stderr(&refused).contains("refs/heads/main is protected"));
}

#[test]
fn unregistered_repository_is_refused_in_every_spelling() {
    let fixture = GitFixture::new();
    fixture.create_bare("acme/other", &[]);
    fixture.create_bare("acme/app.wiki", &[]);
    let home = fixture.path("");
    for (path, shown) in [
        ("acme/other", "acme/other"),
        ("acme/other.git", "acme/other"),
        ("Acme/OTHER.GIT", "acme/other"),
        ("acme/%6fther", "acme/other"),
        ("acme/app/../other.git", "acme/other"),
        ("acme//other", "acme/other"),
        ("acme/app.wiki.git", "acme/app.wiki"),
        ("gist0123.git", "gist0123.git"),
        ("acme/app/more", "acme/app/more"),
    ] {
        let url = format!("{FORGE}/{path}");
        let output = fixture.try_git(&home, &["ls-remote", &url]);
        let printed = output::stderr(&output);
        assert!(!output.status.success(), "{path}: {}", describe(&output));
        let sentence = format!("remote: Repo not authorized: {shown}");
        assert!(printed.contains(&sentence), "{path}: {printed}");
        assert!(printed.contains("git_repo"), "{printed}");
    }
    for path in ["acme/other/git-receive-pack", "acme/other/git-upload-pack"] {
        let (status, body) = fixture.post(&format!("{FORGE}/{path}"), b"0000", &[]);
        assert_eq!(status, 403, "{body}");
        assert!(body.contains("Repo not authorized: acme/other"), "{body}");
        assert!(body.contains("\"reason\":\"git_repo\""), "{body}");
    }
    // Other endpoints of a git host are refused.
    for path in [
        "acme/app",
        "acme/app/info/refs",
        "acme/app/HEAD",
        "acme/app/objects/info/packs",
        "acme/app/archive/main.zip",
        "acme%2Fapp/info/refs?service=git-upload-pack",
        "acme/other/info/refs?service=git-upload-pack&service=git-upload-pack",
    ] {
        let (status, body) = fixture.curl(&[&format!("{FORGE}/{path}")]);
        assert_eq!(status, 403, "{path}: {body}");
        assert!(body.contains("path_denied"), "{path}: {body}");
    }
    assert!(
        fixture.forge.requests().is_empty(),
        "{:?}",
        fixture.forge.requests()
    );
    // `palisade policy try` reports the same.
    for (url, verdict) in [
        ("acme/app/info/refs?service=git-upload-pack", "allow"),
        ("acme/other/info/refs?service=git-upload-pack", "deny"),
        ("acme/app/settings", "deny"),
    ] {
        let body = serde_json::json!({"url": format!("{FORGE}/{url}"), "sandbox": "agent"});
        let answer = fixture.control("POST", "/v1/policy/try", &body);
        assert_eq!(answer["verdict"], verdict, "{url}: {answer}");
    }
}

#[test]
fn public_repository_is_read_without_credentials() {
    let fixture = GitFixture::with_options(FixtureOptions {
        git: "  read_public: true\n",
        ..FixtureOptions::default()
    });
    let first = fixture.working_copy("first");
    let other = fixture.create_bare("acme/other", &[]);
    let other = other.to_str().unwrap().to_owned();
    fixture.git_in(&first, &["push", "-q", &other, "HEAD:refs/heads/main"]);
    let before = fixture.forge.requests().len();
    let url = format!("{FORGE}/acme/other");
    let key = "http.extraHeader=Authorization: Bearer client-secret";
    let cookie = "http.extraHeader=Private-Token: client-secret";
    let home = fixture.path("");
    fixture.git_in(
        &home,
        &["-c", key, "-c", cookie, "clone", "-q", &url, "other"],
    );
    let seen = fixture.forge.requests().split_off(before);
    assert!(!seen.is_empty());
    for request in &seen {
        let headers = format!("{:?}", request.headers);
        assert!(!headers.contains("client-secret"), "{headers}");
        assert!(request.headers.contains_key("user-agent"));
    }
    // `git.read_public` does not allow writes.
    let output = fixture.try_git(&first, &["push", &url, "HEAD:refs/heads/feature"]);
    assert!(output::stderr(&output).contains("Repo not authorized: acme/other"));
    let (status, body) = fixture.post(&format!("{url}/info/lfs/objects/batch"), b"{}", &[]);
    assert_eq!(status, 403, "{body}");
    // Requests to the registered repository keep the client's own credential.
    fixture.git_in(&home, &["-c", key, "ls-remote", "-q", APP]);
    let last = fixture.forge.requests().pop().unwrap();
    assert!(format!("{:?}", last.headers).contains("client-secret"));
}

#[test]
fn lfs_requests_pass_only_for_registered_repositories() {
    let fixture = GitFixture::new();
    let kind = "content-type: application/vnd.git-lfs+json";
    for (repo, expected) in [
        ("acme/app", 200),
        ("acme/app.git", 200),
        ("acme/other", 403),
    ] {
        let url = format!("{FORGE}/{repo}/info/lfs/objects/batch");
        let args = [
            "-X",
            "POST",
            "-H",
            kind,
            "-d",
            "{\"operation\":\"download\"}",
            &url,
        ];
        let (status, body) = fixture.curl(&args);
        assert_eq!(status, expected, "{repo}: {body}");
    }
    assert_eq!(fixture.forge.requests().len(), 2);
}
