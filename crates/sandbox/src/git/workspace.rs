//! Creates workspaces: a copy of a checkout with its own repository, in which the sandbox's branch
//! is checked out.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, PermissionsExt, lchown};
use std::path::Path;
use std::sync::atomic::AtomicBool;

use git2::{Index, Oid, Repository};

use super::checkout_cache::{CachedCheckout, CheckoutCache, is_unfinished};
use super::copy::{copy_file, copy_tree, create_directory};
use super::error::{GitError, git, io};
use super::host_repository::HostRepository;
use super::index::index_entry;
use super::manifest::Manifest;
use super::ownership::{chown, chown_all, chown_below, chown_manifest};
use super::remote_url::RemoteUrl;
use super::snapshot::SnapshotBounds;
use crate::create_progress::{CreateProgress, CreateStep};
use crate::name::Slug;

/// The commit and options of a workspace.
#[derive(Clone, Debug)]
pub struct WorkspacePlan {
    /// The commit to check out.
    pub commit: Oid,
    /// Clone depth; full history if `None`.
    pub depth: Option<u32>,
    /// Whether the operator's uncommitted changes are copied, as uncommitted changes.
    pub dirty: bool,
}

/// A user id and a group id.
pub type Owner = (u32, u32);

/// Maximum number of spare workspaces.
const MAX_SPARES: usize = 3;

impl CheckoutCache {
    /// Prepares a spare workspace, which the next [`CheckoutCache::create_workspace`] of the same
    /// plan only renames. There is at most one spare workspace for each plan. Its files belong to
    /// `owner` already, because changing the owner of ten thousand files takes longer than creating
    /// a sandbox.
    pub fn prepare_spare(
        &self,
        host_repository: &HostRepository,
        plan: &WorkspacePlan,
        owner: Option<Owner>,
    ) -> Result<(), GitError> {
        let dir = self.state.join("spares").join(plan.spare_name());
        if dir.exists() {
            return Ok(());
        }
        let checkout = self.get(host_repository, plan.commit)?;
        self.publish("spares", &dir, |temporary| {
            let workspace = temporary.join("workspace");
            fs::create_dir(&workspace).map_err(io("create", &workspace))?;
            let manifest = self.fill_workspace(
                host_repository,
                plan,
                &checkout,
                &workspace,
                owner,
                &CreateProgress::default(),
            )?;
            if let Some((user, group)) = owner {
                let path = temporary.join("owner");
                fs::write(&path, format!("{user} {group}")).map_err(io("write", &path))?;
            }
            manifest.save(&temporary.join("manifest"))
        })?;
        self.remove_old_spares()
    }

    /// The owner of the spare workspace for a plan, if there is one with an owner.
    pub fn spare_owner(&self, plan: &WorkspacePlan) -> Option<Owner> {
        read_owner(&self.state.join("spares").join(plan.spare_name()))
    }

    /// The owners of all spare workspaces.
    pub fn spare_owners(&self) -> Vec<Owner> {
        let spares = fs::read_dir(self.state.join("spares"));
        let spares = spares.into_iter().flatten().flatten();
        spares
            .filter_map(|spare| read_owner(&spare.path()))
            .collect()
    }

    /// Removes the oldest spare workspaces, because old commits are seldom used again.
    fn remove_old_spares(&self) -> Result<(), GitError> {
        let root = self.state.join("spares");
        let mut spares: Vec<_> = fs::read_dir(&root)
            .map_err(io("list", &root))?
            .flatten()
            .filter(|entry| !is_unfinished(&entry.file_name()))
            .map(|entry| {
                (
                    entry.metadata().and_then(|spare| spare.modified()).ok(),
                    entry.path(),
                )
            })
            .collect();
        spares.sort();
        for (_, spare) in spares.iter().rev().skip(MAX_SPARES) {
            self.discard("spares", spare)?;
        }
        Ok(())
    }

    /// Creates a sandbox's workspace at `target`, which is an empty directory or does not exist,
    /// and sets its owner to `owner` (which needs root). On failure `target` is restored.
    pub fn create_workspace(
        &self,
        host_repository: &HostRepository,
        plan: &WorkspacePlan,
        slug: &Slug,
        target: &Path,
        owner: Option<Owner>,
    ) -> Result<Manifest, GitError> {
        self.create_workspace_with_progress(
            host_repository,
            plan,
            slug,
            target,
            owner,
            &CreateProgress::default(),
        )
    }

    /// As [`CheckoutCache::create_workspace`], and reports its progress.
    pub fn create_workspace_with_progress(
        &self,
        host_repository: &HostRepository,
        plan: &WorkspacePlan,
        slug: &Slug,
        target: &Path,
        owner: Option<Owner>,
        progress: &CreateProgress,
    ) -> Result<Manifest, GitError> {
        let found = empty_directory(target)?;
        let made = self.make_workspace(host_repository, plan, slug, target, owner, progress);
        if made.is_err() {
            restore_target(target, found.as_ref());
        }
        made
    }

    fn make_workspace(
        &self,
        host_repository: &HostRepository,
        plan: &WorkspacePlan,
        slug: &Slug,
        target: &Path,
        owner: Option<Owner>,
        progress: &CreateProgress,
    ) -> Result<Manifest, GitError> {
        let manifest = match self.take_spare(plan, target)? {
            Some((manifest, spare_owner)) if spare_owner == owner => manifest,
            Some((manifest, _)) => match owner {
                Some(owner) => chown_manifest(target, &manifest, owner)?,
                None => manifest,
            },
            None => {
                let checkout = self.get_with_progress(host_repository, plan.commit, progress)?;
                match fs::create_dir(target) {
                    Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                    other => other.map_err(io("create", target))?,
                }
                self.fill_workspace(host_repository, plan, &checkout, target, owner, progress)?
            }
        };
        if plan.dirty {
            host_repository.copy_uncommitted(
                plan.commit,
                target,
                owner,
                &SnapshotBounds::default(),
            )?;
        }
        let git_dir = target.join(".git");
        check_out_branch(host_repository, slug, plan.commit, &git_dir)?;
        let open = fs::Permissions::from_mode(0o755);
        fs::set_permissions(target, open).map_err(io("open", target))?;
        if let Some(owner) = owner {
            chown_below(&git_dir, owner)?;
            chown(target, owner)?;
        }
        Ok(manifest)
    }

    fn take_spare(
        &self,
        plan: &WorkspacePlan,
        to: &Path,
    ) -> Result<Option<(Manifest, Option<Owner>)>, GitError> {
        let dir = self.state.join("spares").join(plan.spare_name());
        let Ok(manifest) = Manifest::load(&dir.join("manifest")) else {
            return Ok(None);
        };
        let spare_owner = read_owner(&dir);
        // The rename is atomic: of two concurrent calls, one succeeds. Across file systems it
        // fails, and the caller copies instead.
        let taken = fs::rename(dir.join("workspace"), to).is_ok();
        if taken {
            self.discard("spares", &dir)?;
        }
        Ok(taken.then_some((manifest, spare_owner)))
    }

    fn fill_workspace(
        &self,
        host_repository: &HostRepository,
        plan: &WorkspacePlan,
        checkout: &CachedCheckout,
        to: &Path,
        owner: Option<Owner>,
        progress: &CreateProgress,
    ) -> Result<Manifest, GitError> {
        let template = checkout.dir.join(plan.template_name());
        if !template.exists() {
            progress.begin(CreateStep::History, None);
            self.publish("checkouts", &template, |temporary| {
                write_template(host_repository, plan, &checkout.manifest, temporary)
            })?;
        }
        let tree = checkout.dir.join("tree");
        let manifest = copy_tree(&tree, to, &checkout.manifest, owner, progress)?;
        copy_template(&template, &to.join(".git"), &AtomicBool::new(true))?;
        Ok(manifest)
    }
}

/// Sets the owner of a staged workspace and moves its entries to the sandbox's empty workspace,
/// which may be mounted. `manifest` is the path of its manifest, which is updated.
pub(crate) fn install_staged(
    from: &Path,
    to: &Path,
    manifest: &Path,
    owner: Owner,
) -> Result<(), GitError> {
    let known = Manifest::load(manifest)?;
    chown_all(from, &known, owner)?.save(manifest)?;
    for entry in fs::read_dir(from).map_err(io("list", from))? {
        let entry = entry.map_err(io("list", from))?;
        let target = to.join(entry.file_name());
        fs::rename(entry.path(), &target).map_err(io("move", &target))?;
    }
    fs::remove_dir(from).map_err(io("remove", from))
}

/// Returns the metadata of an existing empty directory; fails for anything else that exists.
fn empty_directory(target: &Path) -> Result<Option<fs::Metadata>, GitError> {
    let found = match fs::symlink_metadata(target) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        other => other.map_err(io("stat", target))?,
    };
    if !found.is_dir() || fs::read_dir(target).map_err(io("list", target))?.count() > 0 {
        let taken = std::io::Error::new(
            ErrorKind::AlreadyExists,
            "the path already exists and is no empty directory",
        );
        return Err(io("create", target)(taken));
    }
    Ok(Some(found))
}

/// Removes a workspace that could not be created, and restores the directory that was there.
fn restore_target(target: &Path, found: Option<&fs::Metadata>) {
    let _ = fs::remove_dir_all(target);
    if let Some(found) = found {
        let _ = fs::create_dir(target);
        let _ = fs::set_permissions(target, found.permissions());
        let _ = lchown(target, Some(found.uid()), Some(found.gid()));
    }
}

impl WorkspacePlan {
    fn spare_name(&self) -> String {
        match self.depth {
            Some(depth) => format!("{}-{depth}", self.commit),
            None => self.commit.to_string(),
        }
    }

    fn template_name(&self) -> String {
        match self.depth {
            Some(depth) => format!("git-{depth}"),
            None => "git".to_owned(),
        }
    }
}

/// The git configuration of a workspace, before the user and the remotes are added.
const CONFIG: &str = "[core]
\trepositoryformatversion = 0
\tfilemode = true
\tbare = false
\tlogallrefupdates = true
\ttrustctime = false
\tcheckStat = minimal
";

/// Creates the repository that is copied into workspaces: the commit's history in one pack (no
/// other objects of the host, and no shared file), and an index.
///
/// The index fits every copy, because copies keep the files' times, and git is configured to ignore
/// inode numbers and owners.
fn write_template(
    host_repository: &HostRepository,
    plan: &WorkspacePlan,
    manifest: &Manifest,
    to: &Path,
) -> Result<(), GitError> {
    for below in [
        "refs/heads",
        "refs/tags",
        "objects/pack",
        "objects/info",
        "info",
    ] {
        let dir = to.join(below);
        fs::create_dir_all(&dir).map_err(io("create", &dir))?;
    }
    let shallow = write_pack(host_repository, plan, &to.join("objects/pack"))?;
    let shallow: String = shallow.iter().map(|id| format!("{id}\n")).collect();
    if !shallow.is_empty() {
        let path = to.join("shallow");
        fs::write(&path, shallow).map_err(io("write", &path))?;
    }
    for (name, text) in [("HEAD", "ref: refs/heads/main\n"), ("config", CONFIG)] {
        let path = to.join(name);
        fs::write(&path, text).map_err(io("write", &path))?;
    }
    let mut index = Index::open(&to.join("index")).map_err(git("make an index"))?;
    for (path, stamp) in &manifest.entries {
        index
            .add(&index_entry(path, stamp))
            .map_err(git("fill an index"))?;
    }
    index.write().map_err(git("write an index"))
}

/// Packs the plan's history and returns the shallow boundary commits.
fn write_pack(
    host_repository: &HostRepository,
    plan: &WorkspacePlan,
    to: &Path,
) -> Result<Vec<Oid>, GitError> {
    let repo = host_repository.repo();
    let failed = || git("pack the history");
    let mut pack = repo.packbuilder().map_err(failed())?;
    pack.set_threads(0);
    // The boundary commits of a shallow repository.
    let boundary = fs::read_to_string(repo.commondir().join("shallow")).unwrap_or_default();
    let boundary: Vec<_> = boundary
        .lines()
        .filter_map(|id| Oid::from_str(id).ok())
        .collect();
    let mut shallow = Vec::new();
    match plan.depth {
        None => {
            let mut walk = repo.revwalk().map_err(failed())?;
            walk.push(plan.commit).map_err(failed())?;
            pack.insert_walk(&mut walk).map_err(failed())?;
            shallow.extend(boundary);
        }
        Some(depth) => {
            let mut generation = vec![plan.commit];
            let mut seen = std::collections::BTreeSet::new();
            for left in (0..depth.max(1)).rev() {
                let mut next = Vec::new();
                for id in generation {
                    if !seen.insert(id) {
                        continue;
                    }
                    pack.insert_commit(id).map_err(failed())?;
                    let commit = find_commit(repo, id)?;
                    if left == 0 && commit.parent_count() > 0 || boundary.contains(&id) {
                        shallow.push(id);
                    }
                    next.extend(
                        commit
                            .parent_ids()
                            .filter(|id| repo.find_commit(*id).is_ok()),
                    );
                }
                generation = next;
            }
        }
    }
    pack.write(to, 0o444).map_err(failed())?;
    Ok(shallow)
}

fn read_owner(spare: &Path) -> Option<Owner> {
    let text = fs::read_to_string(spare.join("owner")).ok()?;
    let (user, group) = text.split_once(' ')?;
    Some((user.parse().ok()?, group.parse().ok()?))
}

fn find_commit(repo: &Repository, id: Oid) -> Result<git2::Commit<'_>, GitError> {
    repo.find_commit(id)
        .map_err(git(format!("find commit {id}")))
}

fn copy_template(from: &Path, to: &Path, can_clone: &AtomicBool) -> Result<(), GitError> {
    create_directory(to)?;
    for entry in fs::read_dir(from).map_err(io("list", from))? {
        let entry = entry.map_err(io("list", from))?;
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        if source.is_dir() {
            copy_template(&source, &target, can_clone)?;
        } else {
            copy_file(&source, &target, 0o644, can_clone)?;
        }
    }
    Ok(())
}

/// Configures the branch, the identity and the remotes of a new copy.
fn check_out_branch(
    host_repository: &HostRepository,
    slug: &Slug,
    commit: Oid,
    git_dir: &Path,
) -> Result<(), GitError> {
    let branch = slug.branch();
    let heads = git_dir.join("refs/heads/palisade");
    create_directory(&heads)?;
    let mut config = CONFIG.to_owned();
    // The agent commits in the name of the operator, who merges the commits and is responsible for
    // them.
    let user = host_repository.signature()?;
    config.push_str(&format!(
        "[user]\n\tname = {}\n\temail = {}\n",
        quoted(user.name_bytes()),
        quoted(user.email_bytes())
    ));
    for (name, url) in remotes(host_repository)? {
        config.push_str(&format!(
            "[remote \"{name}\"]\n\turl = \"{url}\"\n\tfetch = +refs/heads/*:refs/remotes/{name}/*\n"
        ));
    }
    for (path, text) in [
        (
            git_dir.join("refs/heads").join(&branch),
            format!("{commit}\n"),
        ),
        (git_dir.join("HEAD"), format!("ref: refs/heads/{branch}\n")),
        (git_dir.join("config"), config),
    ] {
        fs::write(&path, text).map_err(io("write", &path))?;
        let open = fs::Permissions::from_mode(0o644);
        fs::set_permissions(&path, open).map_err(io("open", &path))?;
    }
    Ok(())
}

/// Quotes a value for git's configuration file.
fn quoted(bytes: &[u8]) -> String {
    let mut text = String::from("\"");
    for c in String::from_utf8_lossy(bytes).chars() {
        match c {
            '"' | '\\' => text.extend(['\\', c]),
            c if c.is_control() => text.push(' '),
            c => text.push(c),
        }
    }
    text.push('"');
    text
}

/// Returns the operator's remotes without credentials.
fn remotes(host_repository: &HostRepository) -> Result<Vec<(String, String)>, GitError> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let remotes = host_repository.remotes()?.into_iter();
    Ok(remotes
        .filter(|(name, _)| name.chars().all(is_plain))
        .filter_map(|(name, url)| Some((name, without_secrets(&url)?)))
        .collect())
}

/// Removes user, password and query from a URL; `None` for a local path.
fn without_secrets(url: &str) -> Option<String> {
    let is_unsafe =
        |c: char| c.is_control() || c.is_whitespace() || matches!(c, '"' | '\\' | '#' | ';');
    if url.chars().any(is_unsafe) {
        return None;
    }
    let RemoteUrl {
        scheme,
        address,
        path,
        ..
    } = RemoteUrl::parse(url.split('?').next()?)?;
    match scheme {
        Some(scheme @ ("https" | "http" | "ssh" | "git")) => {
            Some(format!("{scheme}://{address}/{path}"))
        }
        Some(_) => None,
        None => Some(format!("{address}:{path}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quoted_config_value_stays_on_one_line() {
        for (name, text) in [
            ("A. U. Thor", r#""A. U. Thor""#),
            (
                "x\"\n[core]\n\tfsmonitor = y",
                r#""x\" [core]  fsmonitor = y""#,
            ),
            ("back\\slash", r#""back\\slash""#),
        ] {
            assert_eq!(quoted(name.as_bytes()), text);
        }
    }

    #[test]
    fn remote_url_is_stripped_of_credentials() {
        for (url, left) in [
            (
                "https://me:token@git.example/a/b.git",
                Some("https://git.example/a/b.git"),
            ),
            (
                "https://git.example/a?private_token=x",
                Some("https://git.example/a"),
            ),
            ("ssh://git@git.example:22/a", Some("ssh://git.example:22/a")),
            ("git@git.example:a/b", Some("git.example:a/b")),
            ("https://a@b@git.example/a", Some("https://git.example/a")),
            ("/srv/git/a", None),
            ("file:///srv/git/a", None),
            ("./a:b", None),
            ("ext::sh -c true", None),
            ("ext::sh", None),
            ("https://git.example/a\n[core]", None),
        ] {
            assert_eq!(without_secrets(url).as_deref(), left, "{url:?}");
        }
    }
}
