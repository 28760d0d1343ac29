//! Reads a pack: every object in it, whether or not anything points at it.
//!
//! ```text
//!   first pass   whole objects, streamed        ──▶ begin, bytes …, end
//!                differences, skipped and noted
//!   second pass  from each base down its tree of differences
//!                smallest subtree first, and the base goes with its last ──▶ begin, bytes, end
//! ```
//!
//! The order of the second pass keeps few objects in memory: whoever is kept has a subtree at
//! least twice as large as the one entered, so at most twenty of a million. Nothing is written
//! anywhere; the pack's own file is the store.

mod input;

use std::collections::{HashMap, HashSet};
use std::fs::File;

use flate2::Decompress;
use policy::push::ObjectFormat;
use policy::refs::ObjectId;
use serde::{Deserialize, Serialize};

use super::delta;
use super::error::PackError;
use super::hash::{Hasher, id_length, read_id};
use super::object::Kind;
use input::{CHUNK, Input, inflate};

/// What one push may cost to read.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PackBounds {
    /// How many objects it may have.
    pub objects: u64,
    /// The largest object, unpacked.
    pub object: u64,
    /// The largest object that must be held whole: what is not a file, and what is a difference
    /// or has one.
    pub whole: u64,
    /// What may be held at once.
    pub held: u64,
    /// Everything together, unpacked.
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

/// Who is told of the objects.
pub(super) trait Visitor {
    /// An object begins.
    fn begin(&mut self, kind: Kind);
    /// It goes on.
    fn bytes(&mut self, piece: &[u8]);
    /// It has ended, and this is its name.
    fn end(&mut self, id: ObjectId) -> Result<(), PackError>;
}

/// Objects of other packs, by name.
pub(super) type Lent = HashMap<ObjectId, (Kind, Vec<u8>)>;

/// Gives those of the named objects that it has.
pub(super) type Lender<'a> = dyn FnMut(&HashSet<ObjectId>) -> Result<Lent, PackError> + 'a;

/// Tells `visitor` of every object of the pack that begins at `begin` in `file` and ends with
/// it, and returns how many there are. What the pack builds on and leaves out is asked of
/// `lender`, once, and not told.
pub(super) fn read(
    file: &File,
    begin: u64,
    format: ObjectFormat,
    bounds: &PackBounds,
    lender: &mut Lender<'_>,
    visitor: &mut dyn Visitor,
) -> Result<u64, PackError> {
    let mut reader = Reader {
        file,
        format,
        bounds,
        visitor,
        inflater: Decompress::new(true),
        piece: vec![0; CHUNK],
        spent: 0,
        wholes: Vec::new(),
        deltas: Vec::new(),
    };
    let count = reader.pass_over(begin)?;
    reader.resolve(lender)?;
    Ok(count)
}

/// Where nothing of this pack lies.
const NOWHERE: u64 = u64::MAX;

/// An object that stands for itself.
struct Whole {
    /// Where its entry begins.
    offset: u64,
    /// Where its compressed bytes begin.
    data: u64,
    size: u64,
    kind: Kind,
    id: ObjectId,
}

/// A difference.
struct Delta {
    offset: u64,
    data: u64,
    size: u64,
    base: Base,
    is_done: bool,
}

enum Base {
    At(u64),
    Named(ObjectId),
}

struct Reader<'a> {
    file: &'a File,
    format: ObjectFormat,
    bounds: &'a PackBounds,
    visitor: &'a mut dyn Visitor,
    inflater: Decompress,
    piece: Vec<u8>,
    /// Bytes unpacked so far.
    spent: u64,
    /// By offset.
    wholes: Vec<Whole>,
    /// By offset.
    deltas: Vec<Delta>,
}

impl Reader<'_> {
    fn pass_over(&mut self, begin: u64) -> Result<u64, PackError> {
        let mut input = Input::new(self.file, begin, Some(Hasher::new(self.format)));
        let head: [u8; 12] = input.array()?;
        let [b'P', b'A', b'C', b'K', 0, 0, 0, 2 | 3, count @ ..] = head else {
            return Err(PackError::Malformed("it does not begin as one"));
        };
        let count = u64::from(u32::from_be_bytes(count));
        if count > self.bounds.objects {
            return Err(PackError::TooMuch {
                what: "the number of objects",
                bound: self.bounds.objects,
            });
        }
        for _ in 0..count {
            self.entry(&mut input)?;
        }
        let sum = input.hasher.take().map(Hasher::finish);
        let mut trailer = [0; 32];
        let trailer = trailer
            .get_mut(..id_length(self.format))
            .ok_or(PackError::Short)?;
        for byte in trailer.iter_mut() {
            *byte = input.byte()?;
        }
        if sum != read_id(trailer) {
            return Err(PackError::Malformed("its checksum is wrong"));
        }
        if !input.is_at_end()? {
            return Err(PackError::Malformed("something follows it"));
        }
        Ok(count)
    }

    fn entry(&mut self, input: &mut Input<'_>) -> Result<(), PackError> {
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
            6 => Some(Base::At(base_offset(input, offset)?)),
            7 => Some(Base::Named(input.id(self.format)?)),
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
        let largest = match (&base, kind) {
            (None, Kind::Blob) => self.bounds.object,
            _ => self.bounds.whole,
        };
        if size > largest {
            return Err(PackError::TooMuch {
                what: "an object's size",
                bound: largest,
            });
        }
        self.spend(size)?;
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
        let mut hasher = name_hasher(self.format, kind, size);
        let visitor = &mut *self.visitor;
        visitor.begin(kind);
        inflate(input, &mut self.inflater, &mut self.piece, size, |piece| {
            hasher.update(piece);
            visitor.bytes(piece);
        })?;
        let id = hasher.finish();
        visitor.end(id)?;
        self.wholes.push(Whole {
            offset,
            data,
            size,
            kind,
            id,
        });
        Ok(())
    }

    fn spend(&mut self, size: u64) -> Result<(), PackError> {
        self.spent = self.spent.saturating_add(size);
        if self.spent > self.bounds.total {
            return Err(PackError::TooMuch {
                what: "everything in it, unpacked,",
                bound: self.bounds.total,
            });
        }
        Ok(())
    }

    /// The bytes of an entry, again.
    fn load(&mut self, data: u64, size: u64) -> Result<Vec<u8>, PackError> {
        if size > self.bounds.whole {
            return Err(PackError::TooMuch {
                what: "an object that must be held whole",
                bound: self.bounds.whole,
            });
        }
        self.spend(size)?;
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

    fn resolve(&mut self, lender: &mut Lender<'_>) -> Result<(), PackError> {
        if self.deltas.is_empty() {
            return Ok(());
        }
        let family = Family::of(&self.deltas);
        for whole in std::mem::take(&mut self.wholes) {
            let children = family.children(&self.deltas, whole.offset, &whole.id);
            if !children.is_empty() {
                let bytes = self.load(whole.data, whole.size)?;
                self.descend(&family, whole.kind, bytes, children)?;
            }
        }
        let missing: HashSet<ObjectId> = self
            .deltas
            .iter()
            .filter(|delta| !delta.is_done)
            .filter_map(|delta| match delta.base {
                Base::Named(id) => Some(id),
                Base::At(_) => None,
            })
            .collect();
        if !missing.is_empty() {
            for (id, (kind, bytes)) in lender(&missing)? {
                let children = family.children(&self.deltas, NOWHERE, &id);
                self.descend(&family, kind, bytes, children)?;
            }
        }
        // What is left builds on something that nobody has, or on itself.
        if self.deltas.iter().all(|delta| delta.is_done) {
            Ok(())
        } else {
            Err(PackError::Thin)
        }
    }

    fn descend(
        &mut self,
        family: &Family,
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
            // Two objects of one name may both claim a child.
            if std::mem::replace(&mut delta.is_done, true) {
                continue;
            }
            let (offset, data, size) = (delta.offset, delta.data, delta.size);
            let base = std::mem::take(bytes);
            let made = self
                .load(data, size)
                .and_then(|delta| delta::apply(&base, &delta, self.bounds.whole))?;
            if is_last {
                held -= base.len() as u64;
                stack.pop();
            } else if let Some((bytes, _)) = stack.last_mut() {
                *bytes = base;
            }
            self.spend(made.len() as u64)?;
            let mut hasher = name_hasher(self.format, kind, made.len() as u64);
            hasher.update(&made);
            let id = hasher.finish();
            self.visitor.begin(kind);
            self.visitor.bytes(&made);
            self.visitor.end(id)?;
            let children = family.children(&self.deltas, offset, &id);
            if children.is_empty() {
                continue;
            }
            held += made.len() as u64;
            if held > self.bounds.held {
                return Err(PackError::TooMuch {
                    what: "what must be held at once",
                    bound: self.bounds.held,
                });
            }
            stack.push((made, children));
        }
        Ok(())
    }
}

/// Which differences build on what.
struct Family {
    /// Offset of the base, place of the difference; sorted.
    by_offset: Vec<(u64, usize)>,
    /// Name of the base, place of the difference; sorted.
    by_name: Vec<(ObjectId, usize)>,
    /// How many build on each, directly or not, as far as offsets tell.
    weights: Vec<u32>,
}

impl Family {
    fn of(deltas: &[Delta]) -> Self {
        let mut by_offset = Vec::new();
        let mut by_name = Vec::new();
        let mut weights = vec![1_u32; deltas.len()];
        for (place, delta) in deltas.iter().enumerate().rev() {
            match &delta.base {
                Base::Named(id) => by_name.push((*id, place)),
                Base::At(offset) => {
                    by_offset.push((*offset, place));
                    // A base lies before what builds on it, so this one's weight is complete.
                    let own = weights.get(place).copied().unwrap_or(1);
                    let base = deltas.binary_search_by_key(offset, |delta| delta.offset);
                    if let Some(weight) = base.ok().and_then(|base| weights.get_mut(base)) {
                        *weight = weight.saturating_add(own);
                    }
                }
            }
        }
        by_offset.sort_unstable();
        by_name.sort_unstable();
        Self {
            by_offset,
            by_name,
            weights,
        }
    }

    /// What builds on the object at `offset` that is called `id`: the heaviest first, because
    /// they are taken from the end.
    fn children(&self, deltas: &[Delta], offset: u64, id: &ObjectId) -> Vec<usize> {
        let at = with(&self.by_offset, &offset);
        let named = with(&self.by_name, id);
        let mut children: Vec<usize> = at
            .chain(named)
            .filter(|&place| deltas.get(place).is_some_and(|delta| !delta.is_done))
            .collect();
        children.sort_unstable_by_key(|&place| {
            std::cmp::Reverse(self.weights.get(place).copied().unwrap_or_default())
        });
        children
    }
}

/// The places of a key in a sorted list.
fn with<'a, K: Ord>(list: &'a [(K, usize)], key: &'a K) -> impl Iterator<Item = usize> + 'a {
    let begin = list.partition_point(|(one, _)| one < key);
    let rest = list.get(begin..).unwrap_or_default();
    rest.iter()
        .take_while(move |(one, _)| one == key)
        .map(|(_, place)| *place)
}

fn name_hasher(format: ObjectFormat, kind: Kind, size: u64) -> Hasher {
    let mut hasher = Hasher::new(format);
    hasher.update(format!("{} {size}\0", kind.word()).as_bytes());
    hasher
}

/// Where the base is that lies so far before `offset` (gitformat-pack(5), 'offset encoding').
fn base_offset(input: &mut Input<'_>, offset: u64) -> Result<u64, PackError> {
    const WRONG: PackError = PackError::Malformed("a base lies outside it");
    let mut byte = input.byte()?;
    let mut back = u64::from(byte & 0x7f);
    while byte & 0x80 != 0 {
        byte = input.byte()?;
        let next = back.checked_add(1).and_then(|back| back.checked_mul(128));
        back = next.ok_or(WRONG)? | u64::from(byte & 0x7f);
    }
    match offset.checked_sub(back) {
        Some(base) if back > 0 => Ok(base),
        _ => Err(WRONG),
    }
}

#[cfg(test)]
mod tests;
