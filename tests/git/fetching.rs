//! Reading: clone and fetch in every form, and which repositories.

use testkit::said;

use crate::yard::{APP, FORGE, Wish, Yard, gits, told};

#[test]
fn clone_and_fetch_work_in_every_form_with_every_git_and_protocol() {
    let mut yard = Yard::new();
    let first = yard.working_copy("first");
    yard.git_in(&first, &["push", "-q", "origin", "HEAD:refs/heads/feature"]);
    let home = yard.path("");
    for (at, git) in gits().into_iter().enumerate() {
        for version in [0, 1, 2] {
            let yard = yard.speaking(git, version);
            let name = |form: &str| format!("{form}-{at}-{version}");
            let whole = name("whole");
            yard.git_in(&home, &["clone", "-q", &format!("{APP}.git"), &whole]);
            let shallow = name("shallow");
            yard.git_in(&home, &["clone", "-q", "--depth", "1", APP, &shallow]);
            let partial = name("partial");
            let args = ["clone", "-q", "--filter=blob:none", APP, &partial];
            yard.git_in(&home, &args);
            let text = std::fs::read_to_string(home.join(&partial).join("README.md")).unwrap();
            assert_eq!(text, "hello\n");

            // Something new upstream is fetched, with a request that git compresses.
            let branch = format!("HEAD:refs/heads/{}", name("new"));
            yard.rested();
            yard.commit(&first, &name("file"), "new\n");
            yard.git_in(&first, &["push", "-q", "origin", &branch]);
            for clone in [&whole, &shallow] {
                yard.git_in(&home.join(clone), &["fetch", "-q", "origin"]);
            }
            let listed = yard.git_in(&home.join(&whole), &["branch", "-r"]);
            assert!(listed.contains(&name("new")), "{listed}");
        }
    }
}

#[test]
fn a_repository_of_longer_hashes_is_fetched_and_pushed_to() {
    let yard = Yard::new();
    yard.bare("acme/long", &["--object-format=sha256"]);
    let home = yard.path("");
    let dir = yard.path("long");
    yard.git_in(&home, &["init", "-q", "--object-format=sha256", "long"]);
    yard.commit(&dir, "file", "text\n");
    let url = format!("{FORGE}/acme/long.git");
    yard.git_in(&dir, &["push", "-q", &url, "HEAD:refs/heads/feature"]);
    yard.git_in(&home, &["clone", "-q", "-b", "feature", &url, "again"]);
    assert_eq!(
        yard.git_in(&yard.path("again"), &["rev-parse", "HEAD"])
            .len(),
        64
    );
    let refused = yard.try_git(&dir, &["push", &url, "HEAD:refs/heads/main"]);
    assert!(!refused.status.success());
    assert!(said::err(&refused).contains("refs/heads/main is protected"));
}

#[test]
fn a_repository_that_is_not_registered_is_refused_in_every_spelling() {
    let yard = Yard::new();
    yard.bare("acme/other", &[]);
    yard.bare("acme/app.wiki", &[]);
    let home = yard.path("");
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
        let output = yard.try_git(&home, &["ls-remote", &url]);
        let said = said::err(&output);
        assert!(!output.status.success(), "{path}: {}", told(&output));
        let sentence = format!("remote: Repo not authorized: {shown}");
        assert!(said.contains(&sentence), "{path}: {said}");
        assert!(said.contains("git_repo"), "{said}");
    }
    for path in ["acme/other/git-receive-pack", "acme/other/git-upload-pack"] {
        let (status, body) = yard.post(&format!("{FORGE}/{path}"), b"0000", &[]);
        assert_eq!(status, 403, "{body}");
        assert!(body.contains("Repo not authorized: acme/other"), "{body}");
        assert!(body.contains("\"reason\":\"git_repo\""), "{body}");
    }
    // Other doors of a git host are closed.
    for path in [
        "acme/app",
        "acme/app/info/refs",
        "acme/app/HEAD",
        "acme/app/objects/info/packs",
        "acme/app/archive/main.zip",
        "acme%2Fapp/info/refs?service=git-upload-pack",
        "acme/other/info/refs?service=git-upload-pack&service=git-upload-pack",
    ] {
        let (status, body) = yard.curl(&[&format!("{FORGE}/{path}")]);
        assert_eq!(status, 403, "{path}: {body}");
        assert!(body.contains("path_denied"), "{path}: {body}");
    }
    assert!(yard.forge.asked().is_empty(), "{:?}", yard.forge.asked());
    // A trial says the same.
    for (url, verdict) in [
        ("acme/app/info/refs?service=git-upload-pack", "allow"),
        ("acme/other/info/refs?service=git-upload-pack", "deny"),
        ("acme/app/settings", "deny"),
    ] {
        let body = serde_json::json!({"url": format!("{FORGE}/{url}"), "sandbox": "agent"});
        let answer = yard.control("POST", "/v1/policy/try", &body);
        assert_eq!(answer["verdict"], verdict, "{url}: {answer}");
    }
}

#[test]
fn what_is_public_is_read_as_nobody() {
    let yard = Yard::with(Wish {
        git: "  read_public: true\n",
        ..Wish::default()
    });
    let first = yard.working_copy("first");
    let other = yard.bare("acme/other", &[]);
    let other = other.to_str().unwrap().to_owned();
    yard.git_in(&first, &["push", "-q", &other, "HEAD:refs/heads/main"]);
    let asked = yard.forge.asked().len();
    let url = format!("{FORGE}/acme/other");
    let key = "http.extraHeader=Authorization: Bearer of-somebody";
    let cookie = "http.extraHeader=Private-Token: of-somebody";
    let home = yard.path("");
    yard.git_in(
        &home,
        &["-c", key, "-c", cookie, "clone", "-q", &url, "other"],
    );
    let seen = yard.forge.asked().split_off(asked);
    assert!(!seen.is_empty());
    for one in &seen {
        let told = format!("{:?}", one.headers);
        assert!(!told.contains("of-somebody"), "{told}");
        assert!(one.headers.contains_key("user-agent"));
    }
    // Writing is not reading.
    let output = yard.try_git(&first, &["push", &url, "HEAD:refs/heads/feature"]);
    assert!(said::err(&output).contains("Repo not authorized: acme/other"));
    let (status, body) = yard.post(&format!("{url}/info/lfs/objects/batch"), b"{}", &[]);
    assert_eq!(status, 403, "{body}");
    // To the registered one, the client's own credential goes with the request.
    yard.git_in(&home, &["-c", key, "ls-remote", "-q", APP]);
    let last = yard.forge.asked().pop().unwrap();
    assert!(format!("{:?}", last.headers).contains("of-somebody"));
}

#[test]
fn large_files_of_a_registered_repository_pass_and_of_others_do_not() {
    let yard = Yard::new();
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
        let (status, body) = yard.curl(&args);
        assert_eq!(status, expected, "{repo}: {body}");
    }
    assert_eq!(yard.forge.asked().len(), 2);
}
