//! Index of the objects that were read: the commit graph, and the tree entries at restricted paths.
//! Contents are scanned for secrets and not kept.

use std::collections::HashMap;

use policy::push::{MAX_SECRET_FINDINGS, ObjectFormat, SecretFinding, SecretLocation};
use policy::refs::ObjectId;
use scan::detector::Detector;
use scan::stream::StreamScanner;

use super::error::PackError;
use super::object::{self, Kind};
use super::pack::Visitor;
use super::restricted_names::RestrictedNames;

/// Maximum number of indexed entries at restricted names; a repository has one for each version of
/// its root tree.
const MAX_RESTRICTED_ENTRIES: usize = 4_000_000;

/// The links of a commit.
pub(super) struct Commit {
    pub(super) tree: ObjectId,
    pub(super) parents: Box<[ObjectId]>,
    /// Whether the commit came with the push; otherwise upstream has it.
    pub(super) is_pushed: bool,
}

/// An entry of a tree whose name is part of a restricted path.
#[derive(Clone, Debug)]
pub(super) struct RestrictedEntry {
    /// Index of the component in [`RestrictedNames`].
    pub(super) component: usize,
    pub(super) name: Box<[u8]>,
    pub(super) mode: u32,
    pub(super) id: ObjectId,
}

/// The index of all objects read so far.
pub(super) struct ObjectIndex<'d> {
    format: ObjectFormat,
    pub(super) restricted_names: RestrictedNames,
    pub(super) commits: HashMap<ObjectId, Commit>,
    /// The entries at restricted names, by tree. Empty if no path is restricted.
    pub(super) trees: HashMap<ObjectId, Box<[RestrictedEntry]>>,
    /// The target of each annotated tag.
    pub(super) tags: HashMap<ObjectId, ObjectId>,
    restricted_entries: usize,
    is_pushed: bool,
    scanner: Option<StreamScanner<'d>>,
    pub(super) sightings: SecretSightings,
    /// The type of the current object.
    kind: Kind,
    /// The content of the current object, unless it is a blob.
    content: Vec<u8>,
    /// Scanner rules that matched the current object.
    rules: Vec<String>,
}

/// Secrets that the scanner found.
#[derive(Default)]
pub(super) struct SecretSightings {
    pub(super) list: Vec<SecretFinding>,
    pub(super) is_truncated: bool,
}

impl SecretSightings {
    fn add(&mut self, rule: String, place: SecretLocation) {
        if self.list.len() < MAX_SECRET_FINDINGS {
            self.list.push(SecretFinding { rule, place });
        } else {
            self.is_truncated = true;
        }
    }
}

impl<'d> ObjectIndex<'d> {
    /// Creates an empty index. With a `detector`, the objects of the push are scanned.
    pub(super) fn new(
        format: ObjectFormat,
        restricted: &[String],
        detector: Option<&'d dyn Detector>,
    ) -> Self {
        Self {
            format,
            restricted_names: RestrictedNames::from_paths(restricted),
            commits: HashMap::new(),
            trees: HashMap::new(),
            tags: HashMap::new(),
            restricted_entries: 0,
            is_pushed: false,
            scanner: detector.map(StreamScanner::new),
            sightings: SecretSightings::default(),
            kind: Kind::Blob,
            content: Vec::new(),
            rules: Vec::new(),
        }
    }

    /// Marks the objects that are read from now on as pushed.
    pub(super) fn begin_push(&mut self) {
        self.is_pushed = true;
    }

    /// Scans a text that is no object: the name of a ref or a push option.
    pub(super) fn scan_text(&mut self, text: &[u8], place: &SecretLocation) {
        self.scan(text);
        self.finish_scan(place);
    }

    fn scan(&mut self, bytes: &[u8]) {
        if let Some(scanner) = &mut self.scanner
            && self.is_pushed
        {
            let rules = &mut self.rules;
            scanner.feed(bytes, &mut |finding| add_rule(rules, finding.rule));
        }
    }

    /// Ends the scan of the current text and records its findings for `place`.
    fn finish_scan(&mut self, place: &SecretLocation) {
        if let Some(scanner) = &mut self.scanner
            && self.is_pushed
        {
            let rules = &mut self.rules;
            scanner.finish(&mut |finding| add_rule(rules, finding.rule));
            for rule in rules.drain(..) {
                self.sightings.add(rule, place.clone());
            }
        }
    }

    fn index_tree(&mut self, id: ObjectId, bytes: &[u8]) -> Result<(), PackError> {
        let mut restricted_entries = Vec::new();
        for entry in object::entries(bytes, self.format) {
            let entry = entry?;
            // Only the names are scanned. An agent cannot choose the bytes of the ids between them.
            self.scan(entry.name);
            self.scan(b"\n");
            for component in self.restricted_names.matching_components(entry.name) {
                restricted_entries.push(RestrictedEntry {
                    component,
                    name: entry.name.into(),
                    mode: entry.mode,
                    id: entry.id,
                });
            }
        }
        if self.restricted_names.paths.is_empty() {
            return Ok(());
        }
        self.restricted_entries = self
            .restricted_entries
            .saturating_add(restricted_entries.len());
        if self.restricted_entries > MAX_RESTRICTED_ENTRIES {
            return Err(PackError::TooMuch {
                what: "the number of restricted names",
                bound: MAX_RESTRICTED_ENTRIES as u64,
            });
        }
        self.trees.insert(id, restricted_entries.into());
        Ok(())
    }
}

/// Adds a rule once for each object, however often it matches.
fn add_rule(rules: &mut Vec<String>, rule: &str) {
    if !rules.iter().any(|known| known == rule) {
        rules.push(rule.to_owned());
    }
}

impl Visitor for ObjectIndex<'_> {
    fn begin(&mut self, kind: Kind) {
        self.kind = kind;
        self.content.clear();
    }

    fn bytes(&mut self, piece: &[u8]) {
        match self.kind {
            Kind::Blob => self.scan(piece),
            Kind::Commit | Kind::Tree | Kind::Tag => self.content.extend_from_slice(piece),
        }
    }

    fn end(&mut self, id: ObjectId) -> Result<(), PackError> {
        let content = std::mem::take(&mut self.content);
        let place = match self.kind {
            Kind::Blob => SecretLocation::Blob { id, path: None },
            Kind::Tree => {
                self.index_tree(id, &content)?;
                SecretLocation::Tree(id)
            }
            Kind::Commit => {
                let links = object::parse_commit(&content, self.format)?;
                self.scan(&content);
                // A commit that upstream has is not counted as pushed if the push sends it again.
                self.commits.entry(id).or_insert(Commit {
                    tree: links.tree,
                    parents: links.parents,
                    is_pushed: self.is_pushed,
                });
                SecretLocation::Commit(id)
            }
            Kind::Tag => {
                self.tags
                    .insert(id, object::parse_tag(&content, self.format)?);
                self.scan(&content);
                SecretLocation::Tag(id)
            }
        };
        self.content = content;
        self.finish_scan(&place);
        Ok(())
    }
}
