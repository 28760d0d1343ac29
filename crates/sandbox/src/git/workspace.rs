//! A workspace: a copy of a checkout with a repository of its own, in which the sandbox's
//! branch is checked out.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, PermissionsExt, lchown};
use std::path::Path;
use std::sync::atomic::AtomicBool;

use git2::{Index, Oid, Repository};

use super::checkout::{Checkout, Checkouts, is_unfinished};
use super::copy::{copy_file, copy_tree, create_directory};
use super::error::{GitError, git, io};
use super::home::Home;
use super::index::index_entry;
use super::manifest::Manifest;
use super::ownership::{give, give_all, give_below, give_tree};
use super::remote_url::RemoteUrl;
use super::snapshot::Bounds;
use crate::name::Slug;
use crate::progress::{Progress, Step};

/// What a workspace starts from.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The commit to check out.
    pub commit: Oid,
    /// How many generations of history come along; all of them if not said.
    pub depth: Option<u32>,
    /// Whether the uncommitted changes of the operator's worktree come along, as uncommitted
    /// changes.
    pub dirty: bool,
}

/// A user and a group that files are given to.
pub type Owner = (u32, u32);

const MOST_SPARES: usize = 3;

impl Checkouts {
    /// Prepares a copy ahead, which the next [`Checkouts::create_workspace`] of the same plan
    /// only renames. There is at most one per plan. It is given to `owner` already: giving ten
    /// thousand files away takes longer than making a sandbox.
    pub fn prepare_spare(
        &self,
        home: &Home,
        plan: &Plan,
        owner: Option<Owner>,
    ) -> Result<(), GitError> {
        let dir = self.state.join("spares").join(plan.name());
        if dir.exists() {
            return Ok(());
        }
        let checkout = self.get(home, plan.commit)?;
        self.publish("spares", &dir, |fresh| {
            let workspace = fresh.join("workspace");
            fs::create_dir(&workspace).map_err(io("create", &workspace))?;
            let manifest = self.fill(
                home,
                plan,
                &checkout,
                &workspace,
                owner,
                &Progress::default(),
            )?;
            if let Some((user, group)) = owner {
                let path = fresh.join("owner");
                fs::write(&path, format!("{user} {group}")).map_err(io("write", &path))?;
            }
            manifest.save(&fresh.join("manifest"))
        })?;
        self.keep_few_spares()
    }

    /// Whose the spare of a plan is, where there is one and it was given away.
    pub fn spare_owner(&self, plan: &Plan) -> Option<Owner> {
        read_owner(&self.state.join("spares").join(plan.name()))
    }

    /// Everybody who was promised a spare.
    pub fn spare_owners(&self) -> Vec<Owner> {
        let spares = fs::read_dir(self.state.join("spares"));
        let spares = spares.into_iter().flatten().flatten();
        spares
            .filter_map(|spare| read_owner(&spare.path()))
            .collect()
    }

    /// Old commits are seldom started from again.
    fn keep_few_spares(&self) -> Result<(), GitError> {
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
        for (_, spare) in spares.iter().rev().skip(MOST_SPARES) {
            self.discard("spares", spare)?;
        }
        Ok(())
    }

    /// Makes the workspace of a sandbox at `target`, which is an empty directory or not there
    /// yet, and gives all of it to `owner` (which takes a root gate). On failure `target` is
    /// as it was.
    pub fn create_workspace(
        &self,
        home: &Home,
        plan: &Plan,
        slug: &Slug,
        target: &Path,
        owner: Option<Owner>,
    ) -> Result<Manifest, GitError> {
        self.create_watched(home, plan, slug, target, owner, &Progress::default())
    }

    /// As [`Checkouts::create_workspace`], and tells how far it is.
    pub fn create_watched(
        &self,
        home: &Home,
        plan: &Plan,
        slug: &Slug,
        target: &Path,
        owner: Option<Owner>,
        progress: &Progress,
    ) -> Result<Manifest, GitError> {
        let found = empty_directory(target)?;
        let made = self.make_workspace(home, plan, slug, target, owner, progress);
        if made.is_err() {
            clear(target, found.as_ref());
        }
        made
    }

    fn make_workspace(
        &self,
        home: &Home,
        plan: &Plan,
        slug: &Slug,
        target: &Path,
        owner: Option<Owner>,
        progress: &Progress,
    ) -> Result<Manifest, GitError> {
        let manifest = match self.take_spare(plan, target)? {
            Some((manifest, whose)) if whose == owner => manifest,
            Some((manifest, _)) => match owner {
                Some(owner) => give_tree(target, &manifest, owner)?,
                None => manifest,
            },
            None => {
                let checkout = self.get_watched(home, plan.commit, progress)?;
                match fs::create_dir(target) {
                    Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                    other => other.map_err(io("create", target))?,
                }
                self.fill(home, plan, &checkout, target, owner, progress)?
            }
        };
        if plan.dirty {
            home.take_along(plan.commit, target, owner, &Bounds::default())?;
        }
        let git_dir = target.join(".git");
        check_out_branch(home, slug, plan.commit, &git_dir)?;
        let open = fs::Permissions::from_mode(0o755);
        fs::set_permissions(target, open).map_err(io("open", target))?;
        if let Some(owner) = owner {
            give_below(&git_dir, owner)?;
            give(target, owner)?;
        }
        Ok(manifest)
    }

    fn take_spare(
        &self,
        plan: &Plan,
        to: &Path,
    ) -> Result<Option<(Manifest, Option<Owner>)>, GitError> {
        let dir = self.state.join("spares").join(plan.name());
        let Ok(manifest) = Manifest::load(&dir.join("manifest")) else {
            return Ok(None);
        };
        let whose = read_owner(&dir);
        // The rename is the claim: of two that try, one finds nothing any more. On another
        // file system it cannot be renamed, and a copy is made instead.
        let taken = fs::rename(dir.join("workspace"), to).is_ok();
        if taken {
            self.discard("spares", &dir)?;
        }
        Ok(taken.then_some((manifest, whose)))
    }

    fn fill(
        &self,
        home: &Home,
        plan: &Plan,
        checkout: &Checkout,
        to: &Path,
        owner: Option<Owner>,
        progress: &Progress,
    ) -> Result<Manifest, GitError> {
        let template = checkout.dir.join(plan.template());
        if !template.exists() {
            progress.begin(Step::History, None);
            self.publish("checkouts", &template, |fresh| {
                write_template(home, plan, &checkout.manifest, fresh)
            })?;
        }
        let tree = checkout.dir.join("tree");
        let manifest = copy_tree(&tree, to, &checkout.manifest, owner, progress)?;
        copy_template(&template, &to.join(".git"), &AtomicBool::new(true))?;
        Ok(manifest)
    }
}

/// Gives a workspace away and moves what is in it to where the sandbox has an empty one,
/// which it may have mounted somewhere. `manifest` is where it says what there is, before and
/// after.
pub(crate) fn settle(
    from: &Path,
    to: &Path,
    manifest: &Path,
    owner: Owner,
) -> Result<(), GitError> {
    let known = Manifest::load(manifest)?;
    give_all(from, &known, owner)?.save(manifest)?;
    for entry in fs::read_dir(from).map_err(io("list", from))? {
        let entry = entry.map_err(io("list", from))?;
        let target = to.join(entry.file_name());
        fs::rename(entry.path(), &target).map_err(io("move", &target))?;
    }
    fs::remove_dir(from).map_err(io("remove", from))
}

/// What a target is, if it is there; one that holds something, or is no directory, is refused.
fn empty_directory(target: &Path) -> Result<Option<fs::Metadata>, GitError> {
    let found = match fs::symlink_metadata(target) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        other => other.map_err(io("look at", target))?,
    };
    if !found.is_dir() || fs::read_dir(target).map_err(io("list", target))?.count() > 0 {
        let taken = std::io::Error::new(ErrorKind::AlreadyExists, "something is there already");
        return Err(io("create", target)(taken));
    }
    Ok(Some(found))
}

/// Leaves nothing behind of a workspace that did not come about.
fn clear(target: &Path, found: Option<&fs::Metadata>) {
    let _ = fs::remove_dir_all(target);
    if let Some(found) = found {
        let _ = fs::create_dir(target);
        let _ = fs::set_permissions(target, found.permissions());
        let _ = lchown(target, Some(found.uid()), Some(found.gid()));
    }
}

impl Plan {
    fn name(&self) -> String {
        match self.depth {
            Some(depth) => format!("{}-{depth}", self.commit),
            None => self.commit.to_string(),
        }
    }

    fn template(&self) -> String {
        match self.depth {
            Some(depth) => format!("git-{depth}"),
            None => "git".to_owned(),
        }
    }
}

const CONFIG: &str = "[core]
\trepositoryformatversion = 0
\tfilemode = true
\tbare = false
\tlogallrefupdates = true
\ttrustctime = false
\tcheckStat = minimal
";

/// Makes the repository that workspaces get a copy of: the commit's history in one pack of
/// its own (nothing else of the host's objects, and no shared file), and an index.
///
/// The index fits every copy because copies keep the files' times; git is told not to look
/// at inode numbers, owners and the like.
fn write_template(
    home: &Home,
    plan: &Plan,
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
    let shallow = write_pack(home, plan, &to.join("objects/pack"))?;
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

/// Packs the plan's history and returns the commits whose parents stay behind.
fn write_pack(home: &Home, plan: &Plan, to: &Path) -> Result<Vec<Oid>, GitError> {
    let repo = home.repo();
    let failed = || git("pack the history");
    let mut pack = repo.packbuilder().map_err(failed())?;
    pack.set_threads(0);
    // A shallow repository has an end of its own.
    let ends = fs::read_to_string(repo.commondir().join("shallow")).unwrap_or_default();
    let ends: Vec<_> = ends
        .lines()
        .filter_map(|id| Oid::from_str(id).ok())
        .collect();
    let mut shallow = Vec::new();
    match plan.depth {
        None => {
            let mut walk = repo.revwalk().map_err(failed())?;
            walk.push(plan.commit).map_err(failed())?;
            pack.insert_walk(&mut walk).map_err(failed())?;
            shallow.extend(ends);
        }
        Some(depth) => {
            let mut layer = vec![plan.commit];
            let mut seen = std::collections::BTreeSet::new();
            for left in (0..depth.max(1)).rev() {
                let mut next = Vec::new();
                for id in layer {
                    if !seen.insert(id) {
                        continue;
                    }
                    pack.insert_commit(id).map_err(failed())?;
                    let commit = find(repo, id)?;
                    if left == 0 && commit.parent_count() > 0 || ends.contains(&id) {
                        shallow.push(id);
                    }
                    next.extend(
                        commit
                            .parent_ids()
                            .filter(|id| repo.find_commit(*id).is_ok()),
                    );
                }
                layer = next;
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

fn find(repo: &Repository, id: Oid) -> Result<git2::Commit<'_>, GitError> {
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

/// Gives a fresh copy its branch and its remotes.
fn check_out_branch(home: &Home, slug: &Slug, commit: Oid, git_dir: &Path) -> Result<(), GitError> {
    let branch = slug.branch();
    let heads = git_dir.join("refs/heads/palisade");
    create_directory(&heads)?;
    let mut config = CONFIG.to_owned();
    // Whoever merges it is answerable for it: the agent commits in the operator's name.
    let who = home.signature()?;
    config.push_str(&format!(
        "[user]\n\tname = {}\n\temail = {}\n",
        quoted(who.name_bytes()),
        quoted(who.email_bytes())
    ));
    for (name, url) in remotes(home)? {
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

/// A value as git's configuration reads it back.
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

/// The operator's remotes as an agent may know them.
fn remotes(home: &Home) -> Result<Vec<(String, String)>, GitError> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let remotes = home.remotes()?.into_iter();
    Ok(remotes
        .filter(|(name, _)| name.chars().all(plain))
        .filter_map(|(name, url)| Some((name, without_secrets(&url)?)))
        .collect())
}

/// A URL without user, password and query; nothing for a path on this machine.
fn without_secrets(url: &str) -> Option<String> {
    let odd = |c: char| c.is_control() || c.is_whitespace() || matches!(c, '"' | '\\' | '#' | ';');
    if url.chars().any(odd) {
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
    fn a_name_cannot_leave_its_line() {
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
    fn a_remote_loses_its_secrets() {
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
