//! Well-formed pushes.

use std::fmt::Write;

use policy::push::{ObjectFormat, RestrictedPathChange};
use policy::refs::{RefName, RefUpdate};
use sandbox::pack_reader::PackReaderError;

use crate::fixture::{Repo, file, id, pack_reader, read};

#[tokio::test]
async fn packs_of_both_formats_and_delta_kinds_are_read() {
    for format in [ObjectFormat::Sha1, ObjectFormat::Sha256] {
        let repo = Repo::with_format(format);
        let mut text = String::new();
        for line in 0..2000 {
            writeln!(
                text,
                "line {line} of a file that is long enough to be worth it"
            )
            .unwrap();
        }
        let mut tips = Vec::new();
        for version in 0..12 {
            repo.write(
                "src/long.txt",
                &text.replace("line 7", &format!("line {version}")),
            );
            tips.push(repo.commit("version"));
        }
        let expected = repo.git(&["rev-list", "--objects", "HEAD"]).lines().count() as u64;
        for options in [&["--delta-base-offset"][..], &[], &["--window=0"]] {
            let pack = file(&repo.pack_bytes(&["HEAD"], options));
            let context = repo.context_from(&tips[3], &tips[11]);
            let found = read(&context, pack).await.unwrap();
            assert_eq!(found.objects, expected);
            assert_eq!((found.secrets.len(), found.more_secrets), (0, false));
            assert_eq!(found.restricted, RestrictedPathChange::Untouched);
            assert_eq!(found.fast_forward, [Some(true)]);
        }
    }
}

#[tokio::test]
async fn fast_forward_is_reported_where_history_is_known() {
    let repo = Repo::new();
    let first = repo.commit("first");
    let second = repo.commit("second");
    repo.git(&["checkout", "-q", "-b", "side", &first]);
    let side = repo.commit("side");
    let everything = || repo.pack(&["main", "side"]);
    let fast_forward = |old: &str, new: &str| {
        let context = repo.context_from(old, new);
        let pack = everything();
        async move { read(&context, pack).await.unwrap().fast_forward }
    };
    assert_eq!(fast_forward(&first, &second).await, [Some(true)]);
    assert_eq!(fast_forward(&second, &side).await, [Some(false)]);
    assert_eq!(fast_forward(&repo.zero(), &side).await, [None]);
    assert_eq!(fast_forward(&side, &repo.zero()).await, [None]);
    // The push has only the new commit, which contains the id of its parent. That id is sufficient.
    let alone = repo.pack(&[&second, &format!("^{first}")]);
    let found = read(&repo.context_from(&first, &second), alone)
        .await
        .unwrap();
    assert_eq!(found.fast_forward, [Some(true)]);
    // The side branch's history is missing; with upstream's base pack it is known.
    let alone = || repo.pack(&[&side, &format!("^{first}")]);
    let context = repo.context_from(&second, &side);
    let found = read(&context, alone()).await.unwrap();
    assert_eq!(found.fast_forward, [None]);
    let bases = vec![repo.base(&second)];
    let found = pack_reader()
        .read(&context, Some(alone()), bases)
        .await
        .unwrap();
    assert_eq!(found.fast_forward, [Some(false)]);
}

#[tokio::test]
async fn push_without_pack_is_read() {
    let repo = Repo::new();
    let tip = repo.commit("first");
    let mut context = repo.context_from(&tip, &repo.zero());
    let found = pack_reader()
        .read(&context, None, Vec::new())
        .await
        .unwrap();
    assert_eq!((found.objects, found.fast_forward), (0, vec![None]));
    context.options = vec![b"ci.skip".to_vec()];
    let empty = repo.pack(&["HEAD", "^HEAD"]);
    assert_eq!(read(&context, empty).await.unwrap().objects, 0);
}

#[tokio::test]
async fn ten_thousand_commits_and_as_many_refs_are_read() {
    let repo = Repo::new();
    let mut script = String::new();
    for number in 1..=10_000 {
        writeln!(script, "commit refs/heads/main\nmark :{number}").unwrap();
        writeln!(
            script,
            "committer A <a@example.com> {} +0000",
            1_700_000_000 + number
        )
        .unwrap();
        writeln!(script, "data 6\nchange").unwrap();
        if number > 1 {
            writeln!(script, "from :{}", number - 1).unwrap();
        }
        let text = format!("number {number}\n");
        writeln!(
            script,
            "M 644 inline src/{}/file\ndata {}\n{text}",
            number % 100,
            text.len()
        )
        .unwrap();
    }
    repo.git_with(&["fast-import", "--quiet"], script.as_bytes());
    let tip = repo.rev("main");
    let mut context = repo.context(&tip);
    context.updates = (0..10_000)
        .map(|number| RefUpdate {
            name: RefName::parse(format!("refs/heads/palisade/{number}").as_bytes()).unwrap(),
            old: id(&repo.zero()),
            new: id(&tip),
        })
        .collect();
    let found = read(&context, repo.pack(&["main"])).await.unwrap();
    assert!(found.objects > 30_000, "{}", found.objects);
    assert_eq!(found.fast_forward.len(), 10_000);
    assert_eq!(found.restricted, RestrictedPathChange::Untouched);
}

#[tokio::test]
async fn thin_pack_without_bases_is_refused_with_advice() {
    let repo = Repo::new();
    let long: String = (0..3000).fold(String::new(), |mut text, line| {
        writeln!(text, "a line with the number {line}").unwrap();
        text
    });
    repo.write("file", &long);
    let first = repo.commit("first");
    repo.write("file", &long.replace("number 77\n", "number 78\n"));
    let second = repo.commit("second");
    let not_first = format!("^{first}");
    let revisions = [second.as_str(), &not_first];
    let thin = repo.pack_bytes(&revisions, &["--thin", "--delta-base-offset"]);
    let whole = repo.pack_bytes(&revisions, &["--delta-base-offset"]);
    assert!(thin.len() < whole.len(), "git made no thin pack");
    let context = repo.context_from(&first, &second);
    assert!(read(&context, file(&whole)).await.is_ok());
    let error = read(&context, file(&thin)).await.unwrap_err();
    assert!(matches!(error, PackReaderError::Malformed(_)), "{error:?}");
    assert!(error.to_string().contains("--no-thin"), "{error}");
    // With upstream's blobs as a base, the thin pack is read like any other.
    let bases = vec![repo.pack(&[&first])];
    let found = pack_reader()
        .read(&context, Some(file(&thin)), bases)
        .await
        .unwrap();
    assert_eq!(found, read(&context, file(&whole)).await.unwrap());
}
