//! Packs of objects that upstream has. Their contents are indexed, and serve as delta bases for
//! thin packs.

use std::collections::HashSet;
use std::fs::File;

use policy::push::ObjectFormat;
use policy::refs::ObjectId;

use super::error::PackError;
use super::object::Kind;
use super::pack::{self, BaseObjects, PackBounds, Visitor};

/// The open packs, each with its offset in the file.
pub(super) struct BasePacks<'a> {
    pub(super) files: &'a [(File, u64)],
    pub(super) format: ObjectFormat,
    pub(super) bounds: &'a PackBounds,
}

impl BasePacks<'_> {
    /// Passes every object of the packs to `visitor`.
    pub(super) fn visit(&self, visitor: &mut dyn Visitor) -> Result<(), PackError> {
        for (file, begin) in self.files {
            let mut no_bases = |_: &HashSet<ObjectId>| Ok(BaseObjects::new());
            pack::read(
                file,
                *begin,
                self.format,
                self.bounds,
                &mut no_bases,
                visitor,
            )?;
        }
        Ok(())
    }

    /// Loads those of the `wanted` objects that the packs hold.
    pub(super) fn load(&self, wanted: &HashSet<ObjectId>) -> Result<BaseObjects, PackError> {
        let mut collector = BaseCollector {
            wanted,
            bounds: self.bounds,
            held: 0,
            objects: BaseObjects::new(),
            kind: Kind::Blob,
            bytes: Vec::new(),
        };
        self.visit(&mut collector)?;
        Ok(collector.objects)
    }
}

struct BaseCollector<'a> {
    wanted: &'a HashSet<ObjectId>,
    bounds: &'a PackBounds,
    held: u64,
    objects: BaseObjects,
    kind: Kind,
    bytes: Vec<u8>,
}

impl Visitor for BaseCollector<'_> {
    fn begin(&mut self, kind: Kind) {
        self.kind = kind;
        self.bytes.clear();
    }

    fn bytes(&mut self, piece: &[u8]) {
        // An object over the limit is truncated here and then not collected.
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
                what: "the size of the bases of a thin pack",
                bound: self.bounds.held,
            });
        }
        let bytes = std::mem::take(&mut self.bytes);
        self.objects.insert(id, (self.kind, bytes));
        Ok(())
    }
}
