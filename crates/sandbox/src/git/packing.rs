//! Builds the packs that a push from the operator's repository would send, and packs of objects
//! that upstream has.

use std::collections::HashSet;
use std::fs::File;
use std::io::{Seek, Write};
use std::path::Path;

use git2::{ObjectType, Oid, PackBuilder, TreeWalkMode, TreeWalkResult};
use policy::refs::ObjectId;

use super::error::{GitError, git, io};
use super::host_repository::HostRepository;

impl HostRepository {
    /// Resolves a revision to an object, and to the full name of the ref if the revision is a ref.
    pub fn find(&self, revision: &str) -> Result<(ObjectId, Option<String>), GitError> {
        let (object, reference) = self
            .repo()
            .revparse_ext(revision)
            .map_err(git(format!("find '{revision}'")))?;
        let name =
            reference.map(|reference| String::from_utf8_lossy(reference.name_bytes()).into_owned());
        Ok((from_libgit2(object.id())?, name))
    }

    /// Resolves a ref by its full name.
    pub fn look_up(&self, name: &str) -> Option<ObjectId> {
        let found = self.repo().find_reference(name).ok()?;
        from_libgit2(found.resolve().ok()?.target()?).ok()
    }

    /// Whether one commit descends from another; `None` if one of them is no commit.
    pub fn descends(&self, from: &ObjectId, ancestor: &ObjectId) -> Option<bool> {
        let commit = |id: &ObjectId| {
            let object = self.repo().find_object(to_libgit2(id).ok()?, None).ok()?;
            Some(object.peel_to_commit().ok()?.id())
        };
        let (from, ancestor) = (commit(from)?, commit(ancestor)?);
        if from == ancestor {
            return Some(true);
        }
        self.repo().graph_descendant_of(from, ancestor).ok()
    }

    /// Builds a pack of the objects that are reachable from `new` and not from `has`, and returns
    /// the boundary commits, too.
    pub fn pack(
        &self,
        new: &ObjectId,
        has: &[ObjectId],
    ) -> Result<(File, Vec<ObjectId>), GitError> {
        const OPERATION: &str = "pack the commits";
        let has = has.iter().map(to_libgit2).collect::<Result<Vec<_>, _>>()?;
        let object = self
            .repo()
            .find_object(to_libgit2(new)?, None)
            .map_err(git(OPERATION))?;
        let mut walk = self.repo().revwalk().map_err(git(OPERATION))?;
        let tip = object.peel_to_commit().map_err(git(OPERATION))?;
        let select_commits = |walk: &mut git2::Revwalk<'_>| {
            walk.push(tip.id())?;
            has.iter().try_for_each(|id| walk.hide(*id))
        };
        select_commits(&mut walk).map_err(git(OPERATION))?;
        let pushed = walk.by_ref().collect::<Result<HashSet<Oid>, _>>();
        let pushed = pushed.map_err(git(OPERATION))?;
        let mut below = HashSet::new();
        for id in &pushed {
            let commit = self.repo().find_commit(*id).map_err(git(OPERATION))?;
            below.extend(
                commit
                    .parent_ids()
                    .filter(|parent| !pushed.contains(parent)),
            );
        }
        select_commits(&mut walk).map_err(git(OPERATION))?;
        let mut packer = self.repo().packbuilder().map_err(git(OPERATION))?;
        packer.insert_walk(&mut walk).map_err(git(OPERATION))?;
        // The annotated tags that lead to the commit.
        let mut current = object;
        while current.kind() == Some(ObjectType::Tag) {
            packer
                .insert_object(current.id(), None)
                .map_err(git(OPERATION))?;
            let Some(tag) = current.as_tag() else { break };
            current = tag.target().map_err(git(OPERATION))?;
        }
        let below = below
            .into_iter()
            .map(from_libgit2)
            .collect::<Result<_, _>>()?;
        Ok((write_to_temporary_file(&mut packer)?, below))
    }

    /// Builds a pack of these commits and their trees, and of their blobs if `with_files`.
    pub fn pack_tips(&self, tips: &[ObjectId], with_files: bool) -> Result<File, GitError> {
        const OPERATION: &str = "pack the objects that upstream has";
        let mut packer = self.repo().packbuilder().map_err(git(OPERATION))?;
        for tip in tips {
            let tip = to_libgit2(tip)?;
            if with_files {
                packer.insert_commit(tip).map_err(git(OPERATION))?;
                continue;
            }
            let commit = self.repo().find_commit(tip).map_err(git(OPERATION))?;
            let tree = commit.tree().map_err(git(OPERATION))?;
            packer.insert_object(tip, None).map_err(git(OPERATION))?;
            packer
                .insert_object(tree.id(), None)
                .map_err(git(OPERATION))?;
            let mut failed = None;
            let walked = tree.walk(TreeWalkMode::PreOrder, |_, entry| {
                if entry.kind() == Some(ObjectType::Tree)
                    && let Err(error) = packer.insert_object(entry.id(), None)
                {
                    failed = Some(error);
                    return TreeWalkResult::Abort;
                }
                TreeWalkResult::Ok
            });
            failed.map_or(walked, Err).map_err(git(OPERATION))?;
        }
        write_to_temporary_file(&mut packer)
    }
}

fn to_libgit2(id: &ObjectId) -> Result<Oid, GitError> {
    Oid::from_bytes(id.as_bytes()).map_err(git(format!("find {id}")))
}

fn from_libgit2(id: Oid) -> Result<ObjectId, GitError> {
    ObjectId::parse(id.to_string().as_bytes()).map_err(|_| GitError::BadObject {
        why: "its id has an unknown format".to_owned(),
        id,
    })
}

fn write_to_temporary_file(packer: &mut PackBuilder<'_>) -> Result<File, GitError> {
    let write_error = |error| io("write a pack to", Path::new("a temporary file"))(error);
    let mut file = tempfile::tempfile().map_err(write_error)?;
    let mut failed = None;
    let packed = packer.foreach(|bytes| match file.write_all(bytes) {
        Ok(()) => true,
        Err(error) => {
            failed = Some(error);
            false
        }
    });
    if let Some(error) = failed {
        return Err(write_error(error));
    }
    packed.map_err(git("pack objects"))?;
    file.rewind().map_err(write_error)?;
    Ok(file)
}
