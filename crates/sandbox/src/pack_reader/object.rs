//! Parsers of commits, trees and tags.

use policy::push::ObjectFormat;
use policy::refs::ObjectId;

use super::error::PackError;
use super::object_hash::{id_length, read_id};

/// The type of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Commit,
    Tree,
    Blob,
    Tag,
}

impl Kind {
    /// The type name in an object's header, which is part of its hash.
    pub(super) const fn header_name(self) -> &'static str {
        match self {
            Kind::Commit => "commit",
            Kind::Tree => "tree",
            Kind::Blob => "blob",
            Kind::Tag => "tag",
        }
    }
}

/// One entry of a tree.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry<'a> {
    pub(super) mode: u32,
    pub(super) name: &'a [u8],
    pub(super) id: ObjectId,
}

/// The mode of a directory.
pub(super) const DIRECTORY: u32 = 0o40000;

/// Iterates over the entries of a tree.
pub(super) fn entries(
    tree: &[u8],
    format: ObjectFormat,
) -> impl Iterator<Item = Result<Entry<'_>, PackError>> {
    let mut rest = tree;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let (entry, after) = match parse_entry(rest, format) {
            Some(read) => read,
            None => {
                rest = &[];
                return Some(Err(PackError::Object {
                    kind: "tree",
                    what: "an entry cannot be read",
                }));
            }
        };
        rest = after;
        Some(Ok(entry))
    })
}

fn parse_entry(bytes: &[u8], format: ObjectFormat) -> Option<(Entry<'_>, &[u8])> {
    let space = bytes.iter().take(8).position(|byte| *byte == b' ')?;
    let (mode, rest) = bytes.split_at(space);
    let rest = rest.get(1..)?;
    let mode = str::from_utf8(mode).ok()?;
    if !mode.bytes().all(|digit| matches!(digit, b'0'..=b'7')) {
        return None;
    }
    let mode = u32::from_str_radix(mode, 8).ok()?;
    let end = rest.iter().position(|byte| *byte == 0)?;
    let (name, rest) = rest.split_at(end);
    if name.is_empty() {
        return None;
    }
    let (id, rest) = rest.get(1..)?.split_at_checked(id_length(format))?;
    let id = read_id(id)?;
    Some((Entry { mode, name, id }, rest))
}

/// The tree and the parents of a commit.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct CommitLinks {
    pub(super) tree: ObjectId,
    pub(super) parents: Box<[ObjectId]>,
}

/// Reads the tree and the parents of a commit, which come first and in this order.
pub(super) fn parse_commit(bytes: &[u8], format: ObjectFormat) -> Result<CommitLinks, PackError> {
    let malformed = |what| PackError::Object {
        kind: "commit",
        what,
    };
    let mut rest = bytes;
    let tree = parse_id_field(&mut rest, b"tree ", format).ok_or(malformed("it has no tree"))?;
    let mut parents = Vec::new();
    while rest.starts_with(b"parent ") {
        let parent = parse_id_field(&mut rest, b"parent ", format);
        parents.push(parent.ok_or(malformed("a parent cannot be read"))?);
    }
    if !rest.starts_with(b"author ") {
        return Err(malformed("it has no author"));
    }
    Ok(CommitLinks {
        tree,
        parents: parents.into(),
    })
}

/// Reads the target of a tag.
pub(super) fn parse_tag(bytes: &[u8], format: ObjectFormat) -> Result<ObjectId, PackError> {
    let mut rest = bytes;
    parse_id_field(&mut rest, b"object ", format).ok_or(PackError::Object {
        kind: "tag",
        what: "it points at nothing",
    })
}

fn parse_id_field(rest: &mut &[u8], name: &[u8], format: ObjectFormat) -> Option<ObjectId> {
    let after = rest.strip_prefix(name)?;
    let (hex, after) = after.split_at_checked(2 * id_length(format))?;
    let after = after.strip_prefix(b"\n")?;
    let id = ObjectId::parse(hex).ok()?;
    *rest = after;
    Some(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "0123456789abcdef0123456789abcdef01234567";

    #[test]
    fn commit_parses_to_tree_and_parents() {
        let text = format!("tree {ID}\nparent {ID}\nparent {ID}\nauthor A\n\nparent {ID}\n");
        let links = parse_commit(text.as_bytes(), ObjectFormat::Sha1).unwrap();
        assert_eq!(links.parents.len(), 2);
        assert_eq!(links.tree.to_string(), ID);
        for wrong in [
            String::new(),
            format!("parent {ID}\nauthor A\n"),
            format!("tree {ID}\n"),
            format!("tree {ID} \nauthor A\n"),
            format!("tree {ID}\nparent {ID}0\nauthor A\n"),
            format!("tree {ID}\nnote x\nparent {ID}\nauthor A\n"),
        ] {
            assert!(
                parse_commit(wrong.as_bytes(), ObjectFormat::Sha1).is_err(),
                "{wrong}"
            );
        }
        assert!(parse_commit(text.as_bytes(), ObjectFormat::Sha256).is_err());
    }

    #[test]
    fn truncated_tree_is_an_error() {
        let mut tree = b"100644 a b\0".to_vec();
        tree.extend([1; 20]);
        tree.extend(b"040000 \xff\0");
        tree.extend([2; 20]);
        let read = entries(&tree, ObjectFormat::Sha1);
        let read: Vec<_> = read.map(|entry| entry.unwrap()).collect();
        assert_eq!((read[0].name, read[0].mode), (&b"a b"[..], 0o100_644));
        assert_eq!((read[1].name, read[1].mode), (&b"\xff"[..], DIRECTORY));
        for cut in 1..tree.len() {
            let fails = entries(&tree[..cut], ObjectFormat::Sha1).any(|entry| entry.is_err());
            assert!(fails || cut == 31, "{cut}");
        }
        let mut nameless = b"100644 \0".to_vec();
        nameless.extend([1; 20]);
        assert!(entries(&nameless, ObjectFormat::Sha1).any(|entry| entry.is_err()));
    }
}
