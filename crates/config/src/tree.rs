//! A YAML file as a tree in which every value has its position in the file.
//!
//! Parsing is strict: input on which YAML parsers differ (duplicate keys, keys that are not text,
//! private tags, several documents) is an error.

mod scalar;

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use saphyr_parser::{Event, Marker, Parser, ScalarStyle, StrInput, Tag};
use serde_json::Number;

use self::scalar::{printable, resolve};
use crate::problem::{Problem, quote};

/// Maximum nesting depth of lists and mappings.
const MAX_DEPTH: usize = 64;

/// Maximum number of nodes after aliases are expanded.
const MAX_NODES: usize = 100_000;

/// Maximum number of bytes of text after aliases are expanded: a thousand aliases of one long
/// string are few nodes and much memory.
const MAX_TEXT: usize = 16 * 1024 * 1024;

/// A position in a file; line and column start at 1.
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
    pub(crate) position: Position,
    /// The environment variable whose value the text contains.
    pub(crate) variable: Option<String>,
}

/// The content of a node.
#[derive(Clone)]
pub(crate) enum Content {
    /// A value that was already reported as invalid; it counts as present and has no value.
    Faulty,
    /// A known key without a value: it takes its default, as if the key were absent.
    Absent,
    Null,
    Bool(bool),
    Number(Number),
    Text(String),
    List(Vec<Node>),
    Map(Vec<Entry>),
}

/// Shows the kind only: the content may be a secret, or the value of an environment variable.
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
    pub(crate) position: Position,
    pub(crate) value: Node,
}

/// A parsed file.
#[derive(Clone, Debug)]
pub(crate) struct Tree {
    /// Shared with the origins of values.
    pub(crate) file: Arc<Path>,
    pub(crate) root: Node,
}

impl Tree {
    /// Parses `bytes`. Errors after which parsing can continue are added to `problems`; None if the
    /// file is not YAML.
    pub(crate) fn parse(file: &Path, bytes: &[u8], problems: &mut Vec<Problem>) -> Option<Self> {
        let text = match printable(bytes) {
            Ok(text) => text,
            Err((position, message)) => {
                problems.push(problem(file, position, message));
                return None;
            }
        };
        let mut builder = Builder {
            file,
            parser: Parser::new_from_str(text),
            anchors: HashMap::new(),
            total_size: Size::default(),
            problems,
        };
        match builder.parse_document() {
            Ok(root) => Some(Self {
                file: file.into(),
                root,
            }),
            Err(ParseError { position, message }) => {
                let mut fault = problem(file, position, message);
                let line = text.lines().nth(position.line.saturating_sub(1));
                if line.is_some_and(|line| line.contains("${")) {
                    fault = fault.with_hint("inside [ ] and { } put quotes around ${…}");
                }
                problems.push(fault);
                None
            }
        }
    }

    /// The node at a JSON pointer.
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

    /// The position of the value at `pointer`, or of the nearest enclosing value.
    pub(crate) fn position(&self, pointer: &str) -> Position {
        let mut pointer = pointer;
        loop {
            if let Some(node) = self.get(pointer) {
                return node.position;
            }
            match pointer.rsplit_once('/') {
                Some((outer, _)) => pointer = outer,
                None => return self.root.position,
            }
        }
    }

    /// The position of the key `key` in the mapping at `pointer`.
    pub(crate) fn key_position(&self, pointer: &str, key: &str) -> Position {
        match self.get(pointer).map(|node| &node.content) {
            Some(Content::Map(entries)) => entries
                .iter()
                .find(|entry| entry.key == key)
                .map_or_else(|| self.position(pointer), |entry| entry.position),
            _ => self.position(pointer),
        }
    }

    /// A problem with the value at `pointer`.
    pub(crate) fn problem(&self, pointer: &str, message: impl Into<String>) -> Problem {
        self.problem_at(self.position(pointer), pointer, message)
    }

    /// A problem at a known position; [`Tree::problem`] has to search for the position.
    pub(crate) fn problem_at(
        &self,
        position: Position,
        pointer: &str,
        message: impl Into<String>,
    ) -> Problem {
        let mut fault = problem(&self.file, position, message.into());
        fault.pointer = pointer.to_owned();
        fault
    }
}

impl Node {
    /// The text of a text node.
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

/// `pointer` extended by one segment.
pub(crate) fn join(pointer: &str, segment: &str) -> String {
    format!(
        "{pointer}/{}",
        segment.replace('~', "~0").replace('/', "~1")
    )
}

/// A pointer in the notation of messages: `egress.domains[2].host`.
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

fn problem(file: &Path, position: Position, message: String) -> Problem {
    Problem {
        file: file.to_owned(),
        line: position.line,
        column: position.column,
        pointer: String::new(),
        message,
        hint: None,
    }
}

/// A syntax error after which there is no tree.
struct ParseError {
    position: Position,
    message: String,
}

impl ParseError {
    fn at(position: Position, message: impl Into<String>) -> Self {
        Self {
            position,
            message: message.into(),
        }
    }

    fn too_deep(position: Position) -> Self {
        Self::at(position, format!("nested deeper than {MAX_DEPTH} levels"))
    }
}

struct Builder<'a> {
    file: &'a Path,
    parser: Parser<'a, StrInput<'a>>,
    anchors: HashMap<usize, (Node, Size)>,
    total_size: Size,
    problems: &'a mut Vec<Problem>,
}

/// The size of a subtree, for the limits.
#[derive(Clone, Copy, Default)]
struct Size {
    nodes: usize,
    text: usize,
    /// Levels below the node itself.
    depth: usize,
}

impl Size {
    fn add_child(&mut self, child: Size) {
        self.nodes += child.nodes;
        self.text += child.text;
        self.depth = self.depth.max(child.depth + 1);
    }
}

impl<'a> Builder<'a> {
    fn parse_document(&mut self) -> Result<Node, ParseError> {
        let mut root = None;
        loop {
            let (event, position) = self.next_event()?;
            match event {
                Event::StreamStart | Event::DocumentEnd | Event::Nothing => {}
                Event::StreamEnd => break,
                Event::DocumentStart(_) if root.is_some() => {
                    return Err(ParseError::at(
                        position,
                        "a second document begins here; a file must contain one document",
                    ));
                }
                Event::DocumentStart(_) => {
                    let (event, position) = self.next_event()?;
                    root = Some(self.parse_node(event, position, 0)?.0);
                }
                _ => return Err(ParseError::at(position, "unexpected content")),
            }
        }
        Ok(root.unwrap_or(Node {
            content: Content::Null,
            position: Position { line: 1, column: 1 },
            variable: None,
        }))
    }

    fn next_event(&mut self) -> Result<(Event<'a>, Position), ParseError> {
        match self.parser.next_event() {
            Some(Ok((event, span))) => Ok((event, span.start.into())),
            Some(Err(error)) => Err(ParseError::at(
                (*error.marker()).into(),
                format!("not YAML: {}", error.info()),
            )),
            None => Ok((Event::StreamEnd, Position::default())),
        }
    }

    fn parse_node(
        &mut self,
        event: Event<'a>,
        position: Position,
        depth: usize,
    ) -> Result<(Node, Size), ParseError> {
        if depth > MAX_DEPTH {
            return Err(ParseError::too_deep(position));
        }
        let mut size = Size {
            nodes: 1,
            ..Size::default()
        };
        let (content, anchor) = match event {
            Event::Alias(id) => return self.expand_alias(id, position, depth),
            Event::Scalar(text, style, anchor, tag) => {
                size.text = text.len();
                self.add_size(size, position)?;
                (
                    self.parse_scalar(&text, style, tag.as_deref(), position),
                    anchor,
                )
            }
            Event::SequenceStart(anchor, tag) => {
                self.add_size(size, position)?;
                self.check_tag(tag.as_deref(), &["seq"], position);
                (Content::List(self.parse_list(depth, &mut size)?), anchor)
            }
            Event::MappingStart(anchor, tag) => {
                self.add_size(size, position)?;
                self.check_tag(tag.as_deref(), &["map"], position);
                (Content::Map(self.parse_map(depth, &mut size)?), anchor)
            }
            _ => return Err(ParseError::at(position, "a value is missing here")),
        };
        let node = Node {
            content,
            position,
            variable: None,
        };
        if anchor > 0 {
            self.add_size(size, position)?;
            self.anchors.insert(anchor, (node.clone(), size));
        }
        Ok((node, size))
    }

    fn parse_list(&mut self, depth: usize, size: &mut Size) -> Result<Vec<Node>, ParseError> {
        let mut items = Vec::new();
        loop {
            match self.next_event()? {
                (Event::SequenceEnd, _) => return Ok(items),
                (event, position) => {
                    let (item, item_size) = self.parse_node(event, position, depth + 1)?;
                    size.add_child(item_size);
                    items.push(item);
                }
            }
        }
    }

    fn parse_map(&mut self, depth: usize, size: &mut Size) -> Result<Vec<Entry>, ParseError> {
        let mut entries: Vec<Entry> = Vec::new();
        let mut seen: HashMap<String, usize> = HashMap::new();
        loop {
            let (event, position) = self.next_event()?;
            if event == Event::MappingEnd {
                return Ok(entries);
            }
            let (key, key_size) = self.parse_node(event, position, depth + 1)?;
            let (event, value_place) = self.next_event()?;
            let (value, value_size) = self.parse_node(event, value_place, depth + 1)?;
            size.add_child(key_size);
            size.add_child(value_size);
            let Content::Text(key) = key.content else {
                if !matches!(key.content, Content::Faulty) {
                    self.report(position, "a key must be text", Some("put it in quotes"));
                }
                continue;
            };
            if let Some(line) = seen.get(&key) {
                let message = format!("the key {} is already on line {line}", quote(&key));
                self.report(position, message, None);
                continue;
            }
            seen.insert(key.clone(), position.line);
            entries.push(Entry {
                key,
                position,
                value,
            });
        }
    }

    /// Copies the value of the anchor. The size is counted before the copy is made, because an alias
    /// bomb consists of copies.
    fn expand_alias(
        &mut self,
        id: usize,
        position: Position,
        depth: usize,
    ) -> Result<(Node, Size), ParseError> {
        let size = match self.anchors.get(&id) {
            Some((_, size)) => *size,
            None => {
                return Err(ParseError::at(
                    position,
                    "this alias is inside its own anchor",
                ));
            }
        };
        if depth + size.depth > MAX_DEPTH {
            return Err(ParseError::too_deep(position));
        }
        self.add_size(size, position)?;
        let node = self.anchors.get(&id).map(|(node, _)| node.clone());
        let node = node.map(|node| Node { position, ..node });
        node.map(|node| (node, size))
            .ok_or_else(|| ParseError::at(position, "this alias has no anchor"))
    }

    fn add_size(&mut self, size: Size, position: Position) -> Result<(), ParseError> {
        self.total_size.nodes += size.nodes;
        self.total_size.text += size.text;
        if self.total_size.nodes > MAX_NODES {
            let message = format!("more than {MAX_NODES} values with aliases expanded");
            return Err(ParseError::at(position, message));
        }
        if self.total_size.text > MAX_TEXT {
            let message = format!("more than {MAX_TEXT} bytes of text with aliases expanded");
            return Err(ParseError::at(position, message));
        }
        Ok(())
    }

    fn parse_scalar(
        &mut self,
        text: &str,
        style: ScalarStyle,
        tag: Option<&Tag>,
        position: Position,
    ) -> Content {
        let tags = ["str", "null", "bool", "int", "float"];
        let plain = style == ScalarStyle::Plain;
        let content = match self.check_tag(tag, &tags, position) {
            TagMeaning::Untagged if plain => resolve(text),
            TagMeaning::Untagged => Some(Content::Text(text.to_owned())),
            TagMeaning::Refused => return Content::Faulty,
            TagMeaning::Core("str") => Some(Content::Text(text.to_owned())),
            TagMeaning::Core(kind) => resolve(text).filter(|content| match content {
                Content::Null => kind == "null",
                Content::Bool(_) => kind == "bool",
                Content::Number(number) => kind == "float" || (kind == "int" && !number.is_f64()),
                _ => false,
            }),
        };
        content.unwrap_or_else(|| {
            // A tagged text may be a secret, so the message does not repeat it; untagged text here
            // is a number.
            let message = match tag {
                Some(_) => "this text does not match its tag".to_owned(),
                None => format!("{} is not a supported number", quote(text)),
            };
            self.report(position, message, None);
            Content::Faulty
        })
    }

    /// The tag of the core schema (YAML 1.2.2, 10.3). Other tags would select types that are not
    /// supported.
    fn check_tag<'t>(
        &mut self,
        tag: Option<&Tag>,
        allowed: &[&'t str],
        position: Position,
    ) -> TagMeaning<'t> {
        let Some(tag) = tag else {
            return TagMeaning::Untagged;
        };
        let core = tag.is_yaml_core_schema();
        let known = allowed.iter().find(|name| **name == tag.suffix);
        match known {
            Some(name) if core => TagMeaning::Core(name),
            _ if tag.handle.is_empty() && tag.suffix == "!" => match allowed.first() {
                Some(name) => TagMeaning::Core(name),
                None => TagMeaning::Untagged,
            },
            _ => {
                let name = if core {
                    format!("!!{}", tag.suffix)
                } else {
                    tag.to_string()
                };
                self.report(
                    position,
                    format!("the tag {} is not supported", quote(&name)),
                    None,
                );
                TagMeaning::Refused
            }
        }
    }

    fn report(&mut self, position: Position, message: impl Into<String>, hint: Option<&str>) {
        let mut fault = problem(self.file, position, message.into());
        fault.hint = hint.map(str::to_owned);
        self.problems.push(fault);
    }
}

/// The meaning of a node's tag.
enum TagMeaning<'t> {
    /// The node has no tag.
    Untagged,
    /// This tag of the core schema.
    Core(&'t str),
    /// An unsupported tag, which has been reported.
    Refused,
}

#[cfg(test)]
mod tests;
