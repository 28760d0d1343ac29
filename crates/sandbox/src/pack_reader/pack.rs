//! Reads every object of a pack, reachable or not.
//!
//! ```text
//!   first pass   whole objects, streamed        ──▶ begin, bytes …, end
//!                deltas, skipped and recorded
//!   second pass  deltas, from each base down its tree of deltas: the smallest subtree first,
//!                the base is freed with its last child ──▶ begin, bytes, end
//! ```
//!
//! The order of the second pass keeps few objects in memory: a kept base has a subtree at least
//! twice as large as the one entered, so at most twenty of a million objects are kept. Nothing is
//! written; the pack's own file is the object store.

mod input;

use std::collections::{HashMap, HashSet};
use std::fs::File;

use flate2::Decompress;
use policy::push::ObjectFormat;
use policy::refs::ObjectId;
use serde::{Deserialize, Serialize};

use super::delta;
use super::error::PackError;
use super::object::Kind;
use super::object_hash::{Hasher, id_length, read_id};
use input::{CHUNK, Input, inflate};

/// Limits on the contents of one push.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PackBounds {
    /// Maximum number of objects.
    pub objects: u64,
    /// Maximum inflated size of an object.
    pub object: u64,
    /// Maximum size of an object that is held in memory: one that is no blob, or that is a delta or
    /// the base of one.
    pub whole: u64,
    /// Maximum bytes of objects in memory at once.
    pub held: u64,
    /// Maximum inflated size of all objects together.
    pub total: u64,
}

impl Default for PackBounds {
    fn default() -> Self {
        Self {
            objects: 2_000_000,
            object: 1 << 30,
            whole: 128 << 20,
            held: 256 << 20,
            total: 16 << 30,
        }
    }
}

/// Receives the objects of a pack.
pub(super) trait Visitor {
    /// Called at the start of an object.
    fn begin(&mut self, kind: Kind);
    /// Called for each piece of the object's content.
    fn bytes(&mut self, piece: &[u8]);
    /// Called at the end of the object, with its id.
    fn end(&mut self, id: ObjectId) -> Result<(), PackError>;
}

/// Objects of base packs, by id.
pub(super) type BaseObjects = HashMap<ObjectId, (Kind, Vec<u8>)>;

/// Loads those of the named objects that the base packs hold.
pub(super) type LoadBases<'a> =
    dyn FnMut(&HashSet<ObjectId>) -> Result<BaseObjects, PackError> + 'a;

/// Passes every object of the pack, from `begin` to the end of `file`, to `visitor`, and returns
/// their number. Bases that a thin pack leaves out are loaded with `load_bases`, once, and not
/// passed to `visitor`.
pub(super) fn read(
    file: &File,
    begin: u64,
    format: ObjectFormat,
    bounds: &PackBounds,
    load_bases: &mut LoadBases<'_>,
    visitor: &mut dyn Visitor,
) -> Result<u64, PackError> {
    let mut reader = Reader {
        file,
        format,
        bounds,
        visitor,
        inflater: Decompress::new(true),
        piece: vec![0; CHUNK],
        inflated: 0,
        whole_objects: Vec::new(),
        deltas: Vec::new(),
    };
    let count = reader.read_entries(begin)?;
    reader.resolve_deltas(load_bases)?;
    Ok(count)
}

/// An offset that no object of the pack has.
const NO_OFFSET: u64 = u64::MAX;

/// An object that is no delta.
struct WholeObject {
    /// Offset of the entry.
    offset: u64,
    /// Offset of the compressed bytes.
    data: u64,
    size: u64,
    kind: Kind,
    id: ObjectId,
}

/// A delta.
struct Delta {
    offset: u64,
    data: u64,
    size: u64,
    base: Base,
    is_done: bool,
}

enum Base {
    ByOffset(u64),
    ById(ObjectId),
}

struct Reader<'a> {
    file: &'a File,
    format: ObjectFormat,
    bounds: &'a PackBounds,
    visitor: &'a mut dyn Visitor,
    inflater: Decompress,
    piece: Vec<u8>,
    /// Bytes inflated so far.
    inflated: u64,
    /// The objects that are no deltas, sorted by offset.
    whole_objects: Vec<WholeObject>,
    /// The deltas, sorted by offset.
    deltas: Vec<Delta>,
}

impl Reader<'_> {
    fn read_entries(&mut self, begin: u64) -> Result<u64, PackError> {
        let mut input = Input::new(self.file, begin, Some(Hasher::new(self.format)));
        let head: [u8; 12] = input.array()?;
        let [b'P', b'A', b'C', b'K', 0, 0, 0, 2 | 3, count @ ..] = head else {
            return Err(PackError::Malformed("the file has no pack header"));
        };
        let count = u64::from(u32::from_be_bytes(count));
        if count > self.bounds.objects {
            return Err(PackError::TooMuch {
                what: "the number of objects",
                bound: self.bounds.objects,
            });
        }
        for _ in 0..count {
            self.read_entry(&mut input)?;
        }
        let sum = input.hasher.take().map(Hasher::finish);
        let mut trailer = [0; 32];
        let trailer = trailer
            .get_mut(..id_length(self.format))
            .ok_or(PackError::Truncated)?;
        for byte in trailer.iter_mut() {
            *byte = input.byte()?;
        }
        if sum != read_id(trailer) {
            return Err(PackError::Malformed("the checksum is wrong"));
        }
        if !input.is_at_end()? {
            return Err(PackError::Malformed("the file has data after the pack"));
        }
        Ok(count)
    }

    /// Reads one object, or records one delta.
    fn read_entry(&mut self, input: &mut Input<'_>) -> Result<(), PackError> {
        let offset = input.offset();
        let mut byte = input.byte()?;
        let code = (byte >> 4) & 7;
        let mut size = u64::from(byte & 15);
        let mut shift = 4;
        while byte & 0x80 != 0 {
            byte = input.byte()?;
            if shift > 56 {
                return Err(PackError::Malformed("an object's size has no end"));
            }
            size |= u64::from(byte & 0x7f) << shift;
            shift += 7;
        }
        let base = match code {
            6 => Some(Base::ByOffset(base_offset(input, offset)?)),
            7 => Some(Base::ById(input.id(self.format)?)),
            _ => None,
        };
        let kind = match code {
            1 => Kind::Commit,
            2 => Kind::Tree,
            3 => Kind::Blob,
            4 => Kind::Tag,
            6 | 7 => Kind::Blob,
            _ => return Err(PackError::Malformed("an object is of no known type")),
        };
        let max_size = match (&base, kind) {
            (None, Kind::Blob) => self.bounds.object,
            _ => self.bounds.whole,
        };
        if size > max_size {
            return Err(PackError::TooMuch {
                what: "an object's size",
                bound: max_size,
            });
        }
        self.count_inflated(size)?;
        let data = input.offset();
        if let Some(base) = base {
            inflate(input, &mut self.inflater, &mut self.piece, size, |_| {})?;
            self.deltas.push(Delta {
                offset,
                data,
                size,
                base,
                is_done: false,
            });
            return Ok(());
        }
        let mut hasher = object_hasher(self.format, kind, size);
        let visitor = &mut *self.visitor;
        visitor.begin(kind);
        inflate(input, &mut self.inflater, &mut self.piece, size, |piece| {
            hasher.update(piece);
            visitor.bytes(piece);
        })?;
        let id = hasher.finish();
        visitor.end(id)?;
        self.whole_objects.push(WholeObject {
            offset,
            data,
            size,
            kind,
            id,
        });
        Ok(())
    }

    fn count_inflated(&mut self, size: u64) -> Result<(), PackError> {
        self.inflated = self.inflated.saturating_add(size);
        if self.inflated > self.bounds.total {
            return Err(PackError::TooMuch {
                what: "the inflated size of the pack",
                bound: self.bounds.total,
            });
        }
        Ok(())
    }

    /// Inflates an entry again.
    fn inflate_again(&mut self, data: u64, size: u64) -> Result<Vec<u8>, PackError> {
        if size > self.bounds.whole {
            return Err(PackError::TooMuch {
                what: "the size of an object held in memory",
                bound: self.bounds.whole,
            });
        }
        self.count_inflated(size)?;
        let mut bytes = Vec::with_capacity(usize::try_from(size).unwrap_or_default());
        let mut input = Input::new(self.file, data, None);
        inflate(
            &mut input,
            &mut self.inflater,
            &mut self.piece,
            size,
            |piece| bytes.extend_from_slice(piece),
        )?;
        Ok(bytes)
    }

    /// Resolves all deltas: the second pass.
    fn resolve_deltas(&mut self, load_bases: &mut LoadBases<'_>) -> Result<(), PackError> {
        if self.deltas.is_empty() {
            return Ok(());
        }
        let delta_tree = DeltaTree::new(&self.deltas);
        for whole in std::mem::take(&mut self.whole_objects) {
            let children = delta_tree.children(&self.deltas, whole.offset, &whole.id);
            if !children.is_empty() {
                let bytes = self.inflate_again(whole.data, whole.size)?;
                self.resolve_children(&delta_tree, whole.kind, bytes, children)?;
            }
        }
        let missing: HashSet<ObjectId> = self
            .deltas
            .iter()
            .filter(|delta| !delta.is_done)
            .filter_map(|delta| match delta.base {
                Base::ById(id) => Some(id),
                Base::ByOffset(_) => None,
            })
            .collect();
        if !missing.is_empty() {
            for (id, (kind, bytes)) in load_bases(&missing)? {
                let children = delta_tree.children(&self.deltas, NO_OFFSET, &id);
                self.resolve_children(&delta_tree, kind, bytes, children)?;
            }
        }
        // The base of a remaining delta is in no pack, or depends on the delta itself.
        if self.deltas.iter().all(|delta| delta.is_done) {
            Ok(())
        } else {
            Err(PackError::MissingBase)
        }
    }

    /// Resolves the deltas `children` of the object `bytes`, and the deltas that depend on them.
    fn resolve_children(
        &mut self,
        delta_tree: &DeltaTree,
        kind: Kind,
        bytes: Vec<u8>,
        children: Vec<usize>,
    ) -> Result<(), PackError> {
        let mut held = bytes.len() as u64;
        let mut stack = vec![(bytes, children)];
        while let Some((bytes, children)) = stack.last_mut() {
            let Some(child) = children.pop() else {
                held -= bytes.len() as u64;
                stack.pop();
                continue;
            };
            let is_last = children.is_empty();
            let Some(delta) = self.deltas.get_mut(child) else {
                continue;
            };
            // If two objects have the same id, both have this child, which was resolved before.
            if std::mem::replace(&mut delta.is_done, true) {
                continue;
            }
            let (offset, data, size) = (delta.offset, delta.data, delta.size);
            let base = std::mem::take(bytes);
            let object = self
                .inflate_again(data, size)
                .and_then(|delta| delta::apply(&base, &delta, self.bounds.whole))?;
            if is_last {
                held -= base.len() as u64;
                stack.pop();
            } else if let Some((bytes, _)) = stack.last_mut() {
                *bytes = base;
            }
            self.count_inflated(object.len() as u64)?;
            let mut hasher = object_hasher(self.format, kind, object.len() as u64);
            hasher.update(&object);
            let id = hasher.finish();
            self.visitor.begin(kind);
            self.visitor.bytes(&object);
            self.visitor.end(id)?;
            let children = delta_tree.children(&self.deltas, offset, &id);
            if children.is_empty() {
                continue;
            }
            held += object.len() as u64;
            if held > self.bounds.held {
                return Err(PackError::TooMuch {
                    what: "the size of objects held at once",
                    bound: self.bounds.held,
                });
            }
            stack.push((object, children));
        }
        Ok(())
    }
}

/// The deltas by their base.
struct DeltaTree {
    /// Offset of the base and index of the delta; sorted.
    by_offset: Vec<(u64, usize)>,
    /// Id of the base and index of the delta; sorted.
    by_id: Vec<(ObjectId, usize)>,
    /// Number of deltas that depend on each delta by offset, directly or not.
    weights: Vec<u32>,
}

impl DeltaTree {
    fn new(deltas: &[Delta]) -> Self {
        let mut by_offset = Vec::new();
        let mut by_id = Vec::new();
        let mut weights = vec![1_u32; deltas.len()];
        for (index, delta) in deltas.iter().enumerate().rev() {
            match &delta.base {
                Base::ById(id) => by_id.push((*id, index)),
                Base::ByOffset(offset) => {
                    by_offset.push((*offset, index));
                    // A base precedes its deltas, so this delta's weight is complete.
                    let own = weights.get(index).copied().unwrap_or(1);
                    let base = deltas.binary_search_by_key(offset, |delta| delta.offset);
                    if let Some(weight) = base.ok().and_then(|base| weights.get_mut(base)) {
                        *weight = weight.saturating_add(own);
                    }
                }
            }
        }
        by_offset.sort_unstable();
        by_id.sort_unstable();
        Self {
            by_offset,
            by_id,
            weights,
        }
    }

    /// Returns the unresolved deltas of the object at `offset` with this `id`, the heaviest first,
    /// because callers take them from the end.
    fn children(&self, deltas: &[Delta], offset: u64, id: &ObjectId) -> Vec<usize> {
        let with_offset = indices_of(&self.by_offset, &offset);
        let with_id = indices_of(&self.by_id, id);
        let mut children: Vec<usize> = with_offset
            .chain(with_id)
            .filter(|&index| deltas.get(index).is_some_and(|delta| !delta.is_done))
            .collect();
        children.sort_unstable_by_key(|&index| {
            std::cmp::Reverse(self.weights.get(index).copied().unwrap_or_default())
        });
        children
    }
}

/// Returns the indices of a key in a sorted list.
fn indices_of<'a, K: Ord>(list: &'a [(K, usize)], key: &'a K) -> impl Iterator<Item = usize> + 'a {
    let begin = list.partition_point(|(one, _)| one < key);
    let rest = list.get(begin..).unwrap_or_default();
    rest.iter()
        .take_while(move |(one, _)| one == key)
        .map(|(_, index)| *index)
}

/// Creates a hasher for the id of an object, with the object's header as its first input.
fn object_hasher(format: ObjectFormat, kind: Kind, size: u64) -> Hasher {
    let mut hasher = Hasher::new(format);
    hasher.update(format!("{} {size}\0", kind.header_name()).as_bytes());
    hasher
}

/// Reads the offset of a base, relative to `offset` (gitformat-pack(5), 'offset encoding').
fn base_offset(input: &mut Input<'_>, offset: u64) -> Result<u64, PackError> {
    const WRONG: PackError = PackError::Malformed("a delta's base is outside the pack");
    let mut byte = input.byte()?;
    let mut distance = u64::from(byte & 0x7f);
    while byte & 0x80 != 0 {
        byte = input.byte()?;
        let next = distance
            .checked_add(1)
            .and_then(|distance| distance.checked_mul(128));
        distance = next.ok_or(WRONG)? | u64::from(byte & 0x7f);
    }
    match offset.checked_sub(distance) {
        Some(base) if distance > 0 => Ok(base),
        _ => Err(WRONG),
    }
}

#[cfg(test)]
mod tests;
