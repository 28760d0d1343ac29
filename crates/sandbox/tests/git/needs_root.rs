//! Tests that need root: workspaces that belong to a sandbox's own ids.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use sandbox::git::workspace::{Owner, WorkspacePlan};
use sandbox::name::Slug;

use crate::repo::{Repo, SandboxFixture, git};

const OWNER: Owner = (1_073_742_824, 1_073_742_825);

fn is_root(repo: &Repo) -> bool {
    std::fs::metadata(&repo.dir).unwrap().uid() == 0
}

fn owners(dir: &Path, call: &mut dyn FnMut(&Path, Owner)) {
    let metadata = std::fs::symlink_metadata(dir).unwrap();
    call(dir, (metadata.uid(), metadata.gid()));
    if metadata.is_dir() {
        for entry in std::fs::read_dir(dir).unwrap() {
            owners(&entry.unwrap().path(), call);
        }
    }
}

#[test]
fn workspace_files_have_sandbox_owner_and_valid_manifest() {
    let repo = Repo::with_files();
    if !is_root(&repo) {
        // Without root there is one id, and no owner to change.
        return;
    }
    let host_repository = repo.host_repository();
    let plan = WorkspacePlan {
        commit: repo.rev("HEAD"),
        depth: None,
        dirty: false,
    };
    let checkouts = repo.checkouts();
    for (name, spare) in [
        ("copied", None),
        ("spare-without-owner", Some(None)),
        ("spare-with-owner", Some(Some(OWNER))),
        (
            "spare-with-other-owner",
            Some(Some((OWNER.0 + 1, OWNER.1 + 1))),
        ),
    ] {
        if let Some(owner) = spare {
            checkouts
                .prepare_spare(&host_repository, &plan, owner)
                .unwrap();
            assert_eq!(checkouts.spare_owner(&plan), owner);
            assert_eq!(checkouts.spare_owners(), Vec::from_iter(owner));
        }
        let dir = repo.temp.path().join(name);
        std::fs::create_dir(&dir).unwrap();
        std::os::unix::fs::chown(&dir, Some(OWNER.0), Some(OWNER.1)).unwrap();
        let slug = Slug::from_name(name).unwrap();
        host_repository
            .create_branch(&slug, plan.commit, "made")
            .unwrap();
        let manifest = checkouts
            .create_workspace(&host_repository, &plan, &slug, &dir, Some(OWNER))
            .unwrap();
        let mut count = 0;
        owners(&dir, &mut |path, owner| {
            count += 1;
            assert_eq!(owner, OWNER, "{}", path.display());
        });
        assert!(count > 20);
        let safe = format!("safe.directory={}", dir.display());
        assert_eq!(git(&dir, &["-c", &safe, "status", "--porcelain"]), "");
        let mut fixture = SandboxFixture {
            host_repository: repo.host_repository(),
            slug,
            dir,
            manifest,
        };
        crate::snapshot::wait_for_clock_tick(&fixture.manifest);
        // The first snapshot reads files again that are newer than the clock's tick.
        fixture.snapshot("nothing");
        let second = fixture.snapshot("nothing");
        assert_eq!((second.moved, second.read), (false, 0));
    }
}

#[test]
fn worker_reads_files_closed_to_others() {
    use std::os::unix::fs::PermissionsExt;
    let repo = Repo::with_files();
    if !is_root(&repo) {
        return;
    }
    let fixture = repo.sandbox("fix");
    fixture.write("closed", "x");
    let path = fixture.dir.join("closed");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    owners(&fixture.dir, &mut |path, _| {
        std::os::unix::fs::lchown(path, Some(OWNER.0), Some(OWNER.1)).unwrap();
    });
    let report = crate::worker::snapshot(&repo, &fixture, None);
    assert!(report.moved && report.left_out == 0, "{report:?}");
    assert_eq!(git(&repo.dir, &["show", "palisade/fix:closed"]), "x");
}
