//! What is remembered of the objects: how commits hang together, and what their trees hold at
//! restricted paths. Contents are looked through and forgotten.

use std::collections::HashMap;

use policy::push::{MOST_SIGHTINGS, ObjectFormat, Place, Sighting};
use policy::refs::ObjectId;
use scan::detector::Detector;
use scan::stream::StreamScanner;

use super::error::PackError;
use super::object::{self, Kind};
use super::pack::Visitor;
use super::spelling::Spelling;

/// How many entries at restricted names are remembered; a repository has one per version of
/// its root.
const MOST_MARKS: usize = 4_000_000;

/// A commit.
pub(super) struct Commit {
    pub(super) tree: ObjectId,
    pub(super) parents: Box<[ObjectId]>,
    /// Whether it came with the push; otherwise upstream has it.
    pub(super) is_pushed: bool,
}

/// An entry of a tree whose name is part of a restricted path.
#[derive(Clone, Debug)]
pub(super) struct Mark {
    /// Which part: a place in [`Spelling`].
    pub(super) component: usize,
    pub(super) name: Box<[u8]>,
    pub(super) mode: u32,
    pub(super) id: ObjectId,
}

/// Everything that is remembered.
pub(super) struct Learnt<'d> {
    format: ObjectFormat,
    pub(super) spelling: Spelling,
    pub(super) commits: HashMap<ObjectId, Commit>,
    /// Trees, with what they hold at restricted names. Empty where nothing is restricted.
    pub(super) trees: HashMap<ObjectId, Box<[Mark]>>,
    /// Tags, with what they point at.
    pub(super) tags: HashMap<ObjectId, ObjectId>,
    marks: usize,
    is_pushed: bool,
    scanner: Option<StreamScanner<'d>>,
    pub(super) seen: Seen,
    /// The object at hand, unless it is a file's content.
    kind: Kind,
    whole: Vec<u8>,
    /// Rules that spoke about the object at hand.
    rules: Vec<String>,
}

/// Secrets that were seen.
#[derive(Default)]
pub(super) struct Seen {
    pub(super) sightings: Vec<Sighting>,
    pub(super) is_more: bool,
}

impl Seen {
    fn add(&mut self, rule: String, place: Place) {
        if self.sightings.len() < MOST_SIGHTINGS {
            self.sightings.push(Sighting { rule, place });
        } else {
            self.is_more = true;
        }
    }
}

impl<'d> Learnt<'d> {
    /// Nothing yet. With a `detector`, what is pushed is scanned.
    pub(super) fn new(
        format: ObjectFormat,
        restricted: &[String],
        detector: Option<&'d dyn Detector>,
    ) -> Self {
        Self {
            format,
            spelling: Spelling::of(restricted),
            commits: HashMap::new(),
            trees: HashMap::new(),
            tags: HashMap::new(),
            marks: 0,
            is_pushed: false,
            scanner: detector.map(StreamScanner::new),
            seen: Seen::default(),
            kind: Kind::Blob,
            whole: Vec::new(),
            rules: Vec::new(),
        }
    }

    /// From now on, what is told is the push's own.
    pub(super) fn push_begins(&mut self) {
        self.is_pushed = true;
    }

    /// Scans what is no object: the name of a ref, a push option.
    pub(super) fn text(&mut self, text: &[u8], place: &Place) {
        self.scan(text);
        self.settle(place);
    }

    fn scan(&mut self, bytes: &[u8]) {
        if let Some(scanner) = &mut self.scanner
            && self.is_pushed
        {
            let rules = &mut self.rules;
            scanner.feed(bytes, &mut |finding| note(rules, finding.rule));
        }
    }

    /// Ends what was scanned, and says where it was.
    fn settle(&mut self, place: &Place) {
        if let Some(scanner) = &mut self.scanner
            && self.is_pushed
        {
            let rules = &mut self.rules;
            scanner.finish(&mut |finding| note(rules, finding.rule));
            for rule in rules.drain(..) {
                self.seen.add(rule, place.clone());
            }
        }
    }

    fn learn_tree(&mut self, id: ObjectId, bytes: &[u8]) -> Result<(), PackError> {
        let mut marks = Vec::new();
        for entry in object::entries(bytes, self.format) {
            let entry = entry?;
            // Scanned by themselves: the bytes of ids between them are nobody's choice.
            self.scan(entry.name);
            self.scan(b"\n");
            for component in self.spelling.meanings(entry.name) {
                marks.push(Mark {
                    component,
                    name: entry.name.into(),
                    mode: entry.mode,
                    id: entry.id,
                });
            }
        }
        if self.spelling.paths.is_empty() {
            return Ok(());
        }
        self.marks = self.marks.saturating_add(marks.len());
        if self.marks > MOST_MARKS {
            return Err(PackError::TooMuch {
                what: "the number of restricted names",
                bound: MOST_MARKS as u64,
            });
        }
        self.trees.insert(id, marks.into());
        Ok(())
    }
}

/// A rule is told once for an object, however often it matches.
fn note(rules: &mut Vec<String>, rule: &str) {
    if !rules.iter().any(|known| known == rule) {
        rules.push(rule.to_owned());
    }
}

impl Visitor for Learnt<'_> {
    fn begin(&mut self, kind: Kind) {
        self.kind = kind;
        self.whole.clear();
    }

    fn bytes(&mut self, piece: &[u8]) {
        match self.kind {
            Kind::Blob => self.scan(piece),
            Kind::Commit | Kind::Tree | Kind::Tag => self.whole.extend_from_slice(piece),
        }
    }

    fn end(&mut self, id: ObjectId) -> Result<(), PackError> {
        let whole = std::mem::take(&mut self.whole);
        let place = match self.kind {
            Kind::Blob => Place::Blob { id, path: None },
            Kind::Tree => {
                self.learn_tree(id, &whole)?;
                Place::Tree(id)
            }
            Kind::Commit => {
                let links = object::commit(&whole, self.format)?;
                self.scan(&whole);
                // What upstream has stays upstream's when it is sent again.
                self.commits.entry(id).or_insert(Commit {
                    tree: links.tree,
                    parents: links.parents,
                    is_pushed: self.is_pushed,
                });
                Place::Commit(id)
            }
            Kind::Tag => {
                self.tags.insert(id, object::tag(&whole, self.format)?);
                self.scan(&whole);
                Place::Tag(id)
            }
        };
        self.whole = whole;
        self.settle(&place);
        Ok(())
    }
}
