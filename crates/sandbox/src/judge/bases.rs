//! Packs of what upstream has: what they hold is learnt, and lent to a push that builds on it
//! without sending it.

use std::collections::HashSet;
use std::fs::File;

use policy::push::ObjectFormat;
use policy::refs::ObjectId;

use super::error::PackError;
use super::object::Kind;
use super::pack::{self, Lent, PackBounds, Visitor};

/// The packs, each from a place on.
pub(super) struct Bases<'a> {
    pub(super) files: &'a [(File, u64)],
    pub(super) format: ObjectFormat,
    pub(super) bounds: &'a PackBounds,
}

impl Bases<'_> {
    /// Tells `visitor` of everything in them.
    pub(super) fn tell(&self, visitor: &mut dyn Visitor) -> Result<(), PackError> {
        for (file, begin) in self.files {
            let mut nobody = |_: &HashSet<ObjectId>| Ok(Lent::new());
            pack::read(file, *begin, self.format, self.bounds, &mut nobody, visitor)?;
        }
        Ok(())
    }

    /// Those of the `wanted` objects that are in them.
    pub(super) fn lend(&self, wanted: &HashSet<ObjectId>) -> Result<Lent, PackError> {
        let mut lending = Lending {
            wanted,
            bounds: self.bounds,
            held: 0,
            lent: Lent::new(),
            kind: Kind::Blob,
            bytes: Vec::new(),
        };
        self.tell(&mut lending)?;
        Ok(lending.lent)
    }
}

struct Lending<'a> {
    wanted: &'a HashSet<ObjectId>,
    bounds: &'a PackBounds,
    held: u64,
    lent: Lent,
    kind: Kind,
    bytes: Vec<u8>,
}

impl Visitor for Lending<'_> {
    fn begin(&mut self, kind: Kind) {
        self.kind = kind;
        self.bytes.clear();
    }

    fn bytes(&mut self, piece: &[u8]) {
        // A base that is larger is cut here, and then not lent.
        if (self.bytes.len() as u64) <= self.bounds.whole {
            self.bytes.extend_from_slice(piece);
        }
    }

    fn end(&mut self, id: ObjectId) -> Result<(), PackError> {
        let size = self.bytes.len() as u64;
        if !self.wanted.contains(&id) || size > self.bounds.whole {
            return Ok(());
        }
        self.held = self.held.saturating_add(size);
        if self.held > self.bounds.held {
            return Err(PackError::TooMuch {
                what: "what the pack builds on and leaves out",
                bound: self.bounds.held,
            });
        }
        let bytes = std::mem::take(&mut self.bytes);
        self.lent.insert(id, (self.kind, bytes));
        Ok(())
    }
}
