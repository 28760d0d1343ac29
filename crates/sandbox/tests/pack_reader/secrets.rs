//! Secrets are found in every part of a push.

use policy::push::{Findings, MAX_SECRET_FINDINGS, ObjectFormat, SecretLocation};
use policy::refs::{RefName, RefUpdate};

use crate::fixture::{Repo, id, read, token};

fn places(found: &Findings) -> Vec<SecretLocation> {
    assert!(
        found.secrets.iter().all(|one| one.rule == "github-token"),
        "{found:?}"
    );
    let shown = serde_json::to_string(found).unwrap();
    assert!(
        !shown.contains(&token()),
        "the findings hold the secret: {shown}"
    );
    found.secrets.iter().map(|one| one.place.clone()).collect()
}

#[tokio::test]
async fn secret_in_a_file_is_found_with_its_path() {
    for format in [ObjectFormat::Sha1, ObjectFormat::Sha256] {
        let repo = Repo::with_format(format);
        let first = repo.commit("first");
        repo.write("a/b/settings.env", &format!("x=1\nTOKEN={}\n", token()));
        let tip = repo.commit("second");
        let pack = repo.pack(&[&tip, &format!("^{first}")]);
        let found = read(&repo.context_from(&first, &tip), pack).await.unwrap();
        let blob = SecretLocation::Blob {
            id: id(&repo.rev("HEAD:a/b/settings.env")),
            path: Some("a/b/settings.env".to_owned()),
        };
        assert_eq!(places(&found), [blob]);
    }
}

#[tokio::test]
async fn secret_in_a_delta_is_found() {
    let repo = Repo::new();
    let long = "some words to make a file long enough\n".repeat(500);
    for version in 0..5 {
        let secret = if version == 2 { token() } else { String::new() };
        repo.write("file", &format!("{long}{version}\n{secret}\n{long}"));
        repo.commit("version");
    }
    let secret = repo.rev("HEAD~2:file");
    for options in [&["--delta-base-offset"][..], &[]] {
        let pack = crate::fixture::file(&repo.pack_bytes(&["HEAD"], options));
        let found = read(&repo.context(&repo.rev("HEAD")), pack).await.unwrap();
        let path = Some("file".to_owned());
        assert_eq!(
            places(&found),
            [SecretLocation::Blob {
                id: id(&secret),
                path
            }]
        );
    }
}

#[tokio::test]
async fn secret_in_removed_file_or_side_parent_is_found() {
    let repo = Repo::new();
    let first = repo.commit("first");
    repo.write("gone", &token());
    repo.commit("add");
    std::fs::remove_file(repo.dir().join("gone")).unwrap();
    let tip = repo.commit("remove");
    let pack = repo.pack(&[&tip, &format!("^{first}")]);
    let found = read(&repo.context_from(&first, &tip), pack).await.unwrap();
    assert_eq!(places(&found).len(), 1);

    let repo = Repo::new();
    let first = repo.commit("first");
    repo.git(&["checkout", "-q", "-b", "side"]);
    repo.write("side", &token());
    repo.commit("side");
    repo.git(&["checkout", "-q", "main"]);
    repo.commit("main");
    repo.git(&["merge", "-q", "-s", "ours", "-m", "merge", "side"]);
    let pack = repo.pack(&["main", &format!("^{first}")]);
    let found = read(&repo.context_from(&first, &repo.rev("main")), pack)
        .await
        .unwrap();
    assert_eq!(places(&found).len(), 1);
}

#[tokio::test]
async fn secret_in_unreachable_object_is_found() {
    let repo = Repo::new();
    let tip = repo.commit("first");
    let loose = repo.git_with(&["hash-object", "-w", "--stdin"], token().as_bytes());
    let tree = repo.rev("HEAD^{tree}");
    let pack = repo.pack_of(&[&tip, &tree, &loose]);
    let found = read(&repo.context(&tip), pack).await.unwrap();
    let place = SecretLocation::Blob {
        id: id(&loose),
        path: None,
    };
    assert_eq!(places(&found), [place]);
}

#[tokio::test]
async fn secret_in_commit_or_tag_text_is_found() {
    let repo = Repo::new();
    let message = repo.commit(&format!("say\n\n{}", token()));
    let found = read(&repo.context(&message), repo.pack(&["HEAD"]))
        .await
        .unwrap();
    assert_eq!(places(&found), [SecretLocation::Commit(id(&message))]);

    let repo = Repo::new();
    let author = format!("{} <a@example.com>", token());
    repo.git(&[
        "commit",
        "-q",
        "--allow-empty",
        "-m",
        "x",
        "--author",
        &author,
    ]);
    let tip = repo.rev("HEAD");
    let found = read(&repo.context(&tip), repo.pack(&["HEAD"]))
        .await
        .unwrap();
    assert_eq!(places(&found), [SecretLocation::Commit(id(&tip))]);

    let repo = Repo::new();
    repo.commit("x");
    repo.git(&["tag", "-a", "v1", "-m", &token()]);
    let tag = repo.rev("v1");
    let found = read(&repo.context(&tag), repo.pack(&["v1"])).await.unwrap();
    assert_eq!(places(&found), [SecretLocation::Tag(id(&tag))]);

    // A commit header that git does not know.
    let repo = Repo::new();
    repo.commit("x");
    let tree = repo.rev("HEAD^{tree}");
    let text = format!(
        "tree {tree}\nauthor A <a@b> 1 +0000\ncommitter A <a@b> 1 +0000\nnote {}\n\nx\n",
        token()
    );
    let odd = repo.git_with(
        &["hash-object", "-t", "commit", "-w", "--stdin"],
        text.as_bytes(),
    );
    let found = read(&repo.context(&odd), repo.pack(&[&odd])).await.unwrap();
    assert_eq!(places(&found), [SecretLocation::Commit(id(&odd))]);
}

#[tokio::test]
async fn secret_in_names_and_push_options_is_found() {
    let repo = Repo::new();
    repo.write(&format!("dir/{}", token()), "x");
    let tip = repo.commit("x");
    let found = read(&repo.context(&tip), repo.pack(&["HEAD"]))
        .await
        .unwrap();
    assert_eq!(
        places(&found),
        [SecretLocation::Tree(id(&repo.rev("HEAD:dir")))]
    );

    let repo = Repo::new();
    let tip = repo.commit("x");
    let mut context = repo.context(&tip);
    context.updates.push(RefUpdate {
        name: RefName::parse(format!("refs/heads/palisade/{}", token()).as_bytes()).unwrap(),
        old: id(&repo.zero()),
        new: id(&tip),
    });
    context.options = vec![
        b"harmless".to_vec(),
        format!("note={}", token()).into_bytes(),
    ];
    let found = read(&context, repo.pack(&["HEAD"])).await.unwrap();
    assert_eq!(
        places(&found),
        [SecretLocation::Ref(1), SecretLocation::Option(1)]
    );
}

#[tokio::test]
async fn old_history_and_unscanned_push_have_no_findings() {
    let repo = Repo::new();
    repo.write("old", &token());
    let old = repo.commit("old");
    repo.write("new", "harmless");
    let tip = repo.commit("new");
    let pack = || repo.pack(&[&tip, &format!("^{old}")]);
    let mut context = repo.context(&tip);
    let found = read(&context, pack()).await.unwrap();
    assert_eq!(places(&found), []);
    // Upstream's own trees and commits are not scanned either.
    let bases = vec![repo.pack(&[&old])];
    let found = crate::fixture::pack_reader()
        .read(&context, Some(pack()), bases)
        .await;
    assert_eq!(places(&found.unwrap()), []);
    context.scan = false;
    let found = read(&context, repo.pack(&[&tip])).await.unwrap();
    assert_eq!(places(&found), []);
}

#[tokio::test]
async fn findings_over_the_maximum_are_truncated() {
    let repo = Repo::new();
    for number in 0..MAX_SECRET_FINDINGS + 1 {
        repo.write(
            &format!("file-{number}"),
            &format!("{number} {}\n{}", token(), token()),
        );
    }
    let tip = repo.commit("x");
    let found = read(&repo.context(&tip), repo.pack(&["HEAD"]))
        .await
        .unwrap();
    assert_eq!(places(&found).len(), MAX_SECRET_FINDINGS);
    assert!(found.more_secrets);
    let named =
        |place: &SecretLocation| matches!(place, SecretLocation::Blob { path: Some(_), .. });
    assert!(places(&found).iter().all(named), "{found:?}");
}
