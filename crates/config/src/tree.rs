//! A YAML file as a tree that remembers where everything stood.
//!
//! Strict on purpose. What other readers of YAML differ about (duplicate keys, keys
//! that are not text, private tags, several documents) is a problem here, not a choice.

mod scalar;

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use saphyr_parser::{Event, Marker, Parser, ScalarStyle, StrInput, Tag};
use serde_json::Number;

use self::scalar::{printable, resolve};
use crate::problem::{Problem, quote};

/// How deep lists and mappings may nest.
const DEEPEST: usize = 64;

/// How many nodes a file may have once its aliases are written out.
const MOST_NODES: usize = 100_000;

/// How many bytes of text a file may have once its aliases are written out: a thousand
/// aliases of one long string are few nodes and much memory.
const MOST_TEXT: usize = 16 * 1024 * 1024;

/// A place in a file, both counted from 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Position {
    pub(crate) line: usize,
    pub(crate) column: usize,
}

impl From<Marker> for Position {
    fn from(marker: Marker) -> Self {
        Self {
            line: marker.line(),
            column: marker.col() + 1,
        }
    }
}

/// One value of the file.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub(crate) content: Content,
    pub(crate) place: Position,
    /// The environment variable its text came from.
    pub(crate) variable: Option<String>,
}

/// What a value is.
#[derive(Clone)]
pub(crate) enum Content {
    /// Something that was already reported; it counts as present and has no value.
    Faulty,
    /// A known key without a value: it takes its default, as if it were not written.
    Absent,
    Null,
    Bool(bool),
    Number(Number),
    Text(String),
    List(Vec<Node>),
    Map(Vec<Entry>),
}

/// The kind alone: what stands in a file may be a secret, and what a variable held is not
/// ours to print.
impl std::fmt::Debug for Content {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Content::Faulty => f.write_str("Faulty"),
            Content::Absent => f.write_str("Absent"),
            Content::Null => f.write_str("Null"),
            Content::Bool(_) => f.write_str("Bool"),
            Content::Number(_) => f.write_str("Number"),
            Content::Text(text) => write!(f, "Text({} bytes)", text.len()),
            Content::List(items) => write!(f, "List({} items)", items.len()),
            Content::Map(entries) => write!(f, "Map({} keys)", entries.len()),
        }
    }
}

/// One key of a mapping with its value.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) key: String,
    pub(crate) place: Position,
    pub(crate) value: Node,
}

/// A whole file.
#[derive(Clone, Debug)]
pub(crate) struct Tree {
    /// Shared with everything that says where it stands.
    pub(crate) file: Arc<Path>,
    pub(crate) root: Node,
}

impl Tree {
    /// Parses `bytes`. Mistakes that leave a tree to go on with are added to
    /// `problems`; a file that is not YAML gives none.
    pub(crate) fn parse(file: &Path, bytes: &[u8], problems: &mut Vec<Problem>) -> Option<Self> {
        let text = match printable(bytes) {
            Ok(text) => text,
            Err((place, message)) => {
                problems.push(problem(file, place, message));
                return None;
            }
        };
        let mut builder = Builder {
            file,
            parser: Parser::new_from_str(text),
            anchors: HashMap::new(),
            spent: Size::default(),
            problems,
        };
        match builder.document() {
            Ok(root) => Some(Self {
                file: file.into(),
                root,
            }),
            Err(ParseError { place, message }) => {
                let mut fault = problem(file, place, message);
                let line = text.lines().nth(place.line.saturating_sub(1));
                if line.is_some_and(|line| line.contains("${")) {
                    fault = fault.hinting("inside [ ] and { } put quotes around ${…}");
                }
                problems.push(fault);
                None
            }
        }
    }

    /// The node a JSON pointer names.
    pub(crate) fn get(&self, pointer: &str) -> Option<&Node> {
        segments(pointer).try_fold(&self.root, |node, segment| match &node.content {
            Content::Map(entries) => entries
                .iter()
                .find(|entry| entry.key == segment)
                .map(|entry| &entry.value),
            Content::List(items) => items.get(segment.parse::<usize>().ok()?),
            _ => None,
        })
    }

    /// Where the value at `pointer` stands, or the nearest value around it.
    pub(crate) fn place(&self, pointer: &str) -> Position {
        let mut pointer = pointer;
        loop {
            if let Some(node) = self.get(pointer) {
                return node.place;
            }
            match pointer.rsplit_once('/') {
                Some((outer, _)) => pointer = outer,
                None => return self.root.place,
            }
        }
    }

    /// Where the key `key` of the mapping at `pointer` stands.
    pub(crate) fn key_place(&self, pointer: &str, key: &str) -> Position {
        match self.get(pointer).map(|node| &node.content) {
            Some(Content::Map(entries)) => entries
                .iter()
                .find(|entry| entry.key == key)
                .map_or_else(|| self.place(pointer), |entry| entry.place),
            _ => self.place(pointer),
        }
    }

    /// A problem with the value at `pointer`.
    pub(crate) fn problem(&self, pointer: &str, message: impl Into<String>) -> Problem {
        self.problem_at(self.place(pointer), pointer, message)
    }

    /// The same, for whoever knows the place: finding it takes a walk.
    pub(crate) fn problem_at(
        &self,
        place: Position,
        pointer: &str,
        message: impl Into<String>,
    ) -> Problem {
        let mut fault = problem(&self.file, place, message.into());
        fault.pointer = pointer.to_owned();
        fault
    }
}

impl Node {
    /// The text, if it is one.
    pub(crate) fn text(&self) -> Option<&str> {
        match &self.content {
            Content::Text(text) => Some(text),
            _ => None,
        }
    }
}

/// The parts of a JSON pointer, unescaped.
pub(crate) fn segments(pointer: &str) -> impl Iterator<Item = String> + '_ {
    pointer
        .split('/')
        .skip(1)
        .map(|segment| segment.replace("~1", "/").replace("~0", "~"))
}

/// `pointer` one step further in.
pub(crate) fn join(pointer: &str, segment: &str) -> String {
    format!(
        "{pointer}/{}",
        segment.replace('~', "~0").replace('/', "~1")
    )
}

/// A pointer as a person writes it: `egress.domains[2].host`.
pub(crate) fn dotted(pointer: &str) -> String {
    let mut text = String::new();
    for segment in segments(pointer) {
        if !segment.is_empty() && segment.bytes().all(|b| b.is_ascii_digit()) {
            text.push_str(&format!("[{segment}]"));
        } else {
            if !text.is_empty() {
                text.push('.');
            }
            let quoted = quote(&segment);
            text.push_str(quoted.trim_matches('\''));
        }
    }
    text
}

fn problem(file: &Path, place: Position, message: String) -> Problem {
    Problem {
        file: file.to_owned(),
        line: place.line,
        column: place.column,
        pointer: String::new(),
        message,
        hint: None,
    }
}

/// Why a file gives no tree at all.
struct ParseError {
    place: Position,
    message: String,
}

impl ParseError {
    fn at(place: Position, message: impl Into<String>) -> Self {
        Self {
            place,
            message: message.into(),
        }
    }

    fn too_deep(place: Position) -> Self {
        Self::at(place, format!("nested deeper than {DEEPEST} levels"))
    }
}

struct Builder<'a> {
    file: &'a Path,
    parser: Parser<'a, StrInput<'a>>,
    anchors: HashMap<usize, (Node, Size)>,
    spent: Size,
    problems: &'a mut Vec<Problem>,
}

/// What a subtree costs.
#[derive(Clone, Copy, Default)]
struct Size {
    nodes: usize,
    text: usize,
    /// Levels below the node itself.
    depth: usize,
}

impl Size {
    fn hold(&mut self, child: Size) {
        self.nodes += child.nodes;
        self.text += child.text;
        self.depth = self.depth.max(child.depth + 1);
    }
}

impl<'a> Builder<'a> {
    fn document(&mut self) -> Result<Node, ParseError> {
        let mut root = None;
        loop {
            let (event, place) = self.next()?;
            match event {
                Event::StreamStart | Event::DocumentEnd | Event::Nothing => {}
                Event::StreamEnd => break,
                Event::DocumentStart(_) if root.is_some() => {
                    return Err(ParseError::at(
                        place,
                        "a second document begins here; one file holds one document",
                    ));
                }
                Event::DocumentStart(_) => {
                    let (event, place) = self.next()?;
                    root = Some(self.node(event, place, 0)?.0);
                }
                _ => return Err(ParseError::at(place, "nothing may stand here")),
            }
        }
        Ok(root.unwrap_or(Node {
            content: Content::Null,
            place: Position { line: 1, column: 1 },
            variable: None,
        }))
    }

    fn next(&mut self) -> Result<(Event<'a>, Position), ParseError> {
        match self.parser.next_event() {
            Some(Ok((event, span))) => Ok((event, span.start.into())),
            Some(Err(error)) => Err(ParseError::at(
                (*error.marker()).into(),
                format!("not YAML: {}", error.info()),
            )),
            None => Ok((Event::StreamEnd, Position::default())),
        }
    }

    fn node(
        &mut self,
        event: Event<'a>,
        place: Position,
        depth: usize,
    ) -> Result<(Node, Size), ParseError> {
        if depth > DEEPEST {
            return Err(ParseError::too_deep(place));
        }
        let mut size = Size {
            nodes: 1,
            ..Size::default()
        };
        let (content, anchor) = match event {
            Event::Alias(id) => return self.alias(id, place, depth),
            Event::Scalar(text, style, anchor, tag) => {
                size.text = text.len();
                self.spend(size, place)?;
                (self.scalar(&text, style, tag.as_deref(), place), anchor)
            }
            Event::SequenceStart(anchor, tag) => {
                self.spend(size, place)?;
                self.check_tag(tag.as_deref(), &["seq"], place);
                (Content::List(self.list(depth, &mut size)?), anchor)
            }
            Event::MappingStart(anchor, tag) => {
                self.spend(size, place)?;
                self.check_tag(tag.as_deref(), &["map"], place);
                (Content::Map(self.map(depth, &mut size)?), anchor)
            }
            _ => return Err(ParseError::at(place, "a value is missing here")),
        };
        let node = Node {
            content,
            place,
            variable: None,
        };
        if anchor > 0 {
            self.spend(size, place)?;
            self.anchors.insert(anchor, (node.clone(), size));
        }
        Ok((node, size))
    }

    fn list(&mut self, depth: usize, size: &mut Size) -> Result<Vec<Node>, ParseError> {
        let mut items = Vec::new();
        loop {
            match self.next()? {
                (Event::SequenceEnd, _) => return Ok(items),
                (event, place) => {
                    let (item, item_size) = self.node(event, place, depth + 1)?;
                    size.hold(item_size);
                    items.push(item);
                }
            }
        }
    }

    fn map(&mut self, depth: usize, size: &mut Size) -> Result<Vec<Entry>, ParseError> {
        let mut entries: Vec<Entry> = Vec::new();
        let mut seen: HashMap<String, usize> = HashMap::new();
        loop {
            let (event, place) = self.next()?;
            if event == Event::MappingEnd {
                return Ok(entries);
            }
            let (key, key_size) = self.node(event, place, depth + 1)?;
            let (event, value_place) = self.next()?;
            let (value, value_size) = self.node(event, value_place, depth + 1)?;
            size.hold(key_size);
            size.hold(value_size);
            let Content::Text(key) = key.content else {
                if !matches!(key.content, Content::Faulty) {
                    self.report(place, "a key must be text", Some("put it in quotes"));
                }
                continue;
            };
            if let Some(line) = seen.get(&key) {
                let message = format!("the key {} already stands on line {line}", quote(&key));
                self.report(place, message, None);
                continue;
            }
            seen.insert(key.clone(), place.line);
            entries.push(Entry { key, place, value });
        }
    }

    /// The anchored value again. Paid for before it is copied: copies are what an
    /// alias bomb is made of.
    fn alias(
        &mut self,
        id: usize,
        place: Position,
        depth: usize,
    ) -> Result<(Node, Size), ParseError> {
        let size = match self.anchors.get(&id) {
            Some((_, size)) => *size,
            None => {
                return Err(ParseError::at(
                    place,
                    "this alias stands inside its own anchor",
                ));
            }
        };
        if depth + size.depth > DEEPEST {
            return Err(ParseError::too_deep(place));
        }
        self.spend(size, place)?;
        let node = self.anchors.get(&id).map(|(node, _)| node.clone());
        let node = node.map(|node| Node { place, ..node });
        node.map(|node| (node, size))
            .ok_or_else(|| ParseError::at(place, "this alias has no anchor"))
    }

    fn spend(&mut self, size: Size, place: Position) -> Result<(), ParseError> {
        self.spent.nodes += size.nodes;
        self.spent.text += size.text;
        if self.spent.nodes > MOST_NODES {
            let message = format!("more than {MOST_NODES} values, aliases written out");
            return Err(ParseError::at(place, message));
        }
        if self.spent.text > MOST_TEXT {
            let message = format!("more than {MOST_TEXT} bytes of text, aliases written out");
            return Err(ParseError::at(place, message));
        }
        Ok(())
    }

    fn scalar(
        &mut self,
        text: &str,
        style: ScalarStyle,
        tag: Option<&Tag>,
        place: Position,
    ) -> Content {
        let tags = ["str", "null", "bool", "int", "float"];
        let plain = style == ScalarStyle::Plain;
        let content = match self.check_tag(tag, &tags, place) {
            Tagged::Not if plain => resolve(text),
            Tagged::Not => Some(Content::Text(text.to_owned())),
            Tagged::Refused => return Content::Faulty,
            Tagged::As("str") => Some(Content::Text(text.to_owned())),
            Tagged::As(kind) => resolve(text).filter(|content| match content {
                Content::Null => kind == "null",
                Content::Bool(_) => kind == "bool",
                Content::Number(number) => kind == "float" || (kind == "int" && !number.is_f64()),
                _ => false,
            }),
        };
        content.unwrap_or_else(|| {
            // What is tagged may be anything, a secret too; what is not is a number.
            let message = match tag {
                Some(_) => "this text is not what its tag says".to_owned(),
                None => format!("{} is not a value", quote(text)),
            };
            self.report(place, message, None);
            Content::Faulty
        })
    }

    /// Which of the core schema's tags is meant (YAML 1.2.2, 10.3). Others ask for
    /// types that do not exist here.
    fn check_tag<'t>(
        &mut self,
        tag: Option<&Tag>,
        allowed: &[&'t str],
        place: Position,
    ) -> Tagged<'t> {
        let Some(tag) = tag else { return Tagged::Not };
        let core = tag.is_yaml_core_schema();
        let known = allowed.iter().find(|name| **name == tag.suffix);
        match known {
            Some(name) if core => Tagged::As(name),
            _ if tag.handle.is_empty() && tag.suffix == "!" => match allowed.first() {
                Some(name) => Tagged::As(name),
                None => Tagged::Not,
            },
            _ => {
                let spelt = if core {
                    format!("!!{}", tag.suffix)
                } else {
                    tag.to_string()
                };
                self.report(
                    place,
                    format!("the tag {} has no meaning here", quote(&spelt)),
                    None,
                );
                Tagged::Refused
            }
        }
    }

    fn report(&mut self, place: Position, message: impl Into<String>, hint: Option<&str>) {
        let mut fault = problem(self.file, place, message.into());
        fault.hint = hint.map(str::to_owned);
        self.problems.push(fault);
    }
}

/// What a tag says.
enum Tagged<'t> {
    Not,
    As(&'t str),
    Refused,
}

#[cfg(test)]
mod tests;
