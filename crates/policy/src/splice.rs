//! Edits JSON text in place, without parsing and printing the whole.
//!
//! Parsing and printing would change numbers with many digits, the order of keys and the
//! escaping of characters. So a change is a list of spans of the text with their replacements,
//! and all other bytes stay unchanged.
//!
//! The text is expected to be valid JSON; invalid text is an error, never a panic.

use std::ops::Range;

/// Maximum nesting of values, the same as in serde_json.
const MAX_DEPTH: usize = 128;

/// The text is not JSON, or nested too deeply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the text is not JSON, or nested too deeply")]
pub struct InvalidJson;

/// A JSON value with its span in the text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Node {
    pub(crate) span: Range<usize>,
    pub(crate) content: NodeContent,
}

/// The type of a value, with its children.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NodeContent {
    /// A number, true, false or null.
    Plain,
    Text,
    List(Vec<Node>),
    Map(Vec<Entry>),
}

/// One field of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// From the key's quote to the value's end.
    pub(crate) span: Range<usize>,
    pub(crate) key: String,
    pub(crate) value: Node,
}

impl Node {
    /// Parses `text`, which is one value.
    pub(crate) fn read(text: &str) -> Result<Self, InvalidJson> {
        let mut reader = Reader { text, at: 0 };
        let node = reader.read_value(MAX_DEPTH)?;
        match reader.peek() {
            None => Ok(node),
            Some(_) => Err(InvalidJson),
        }
    }

    /// The value of the field `key`, if this is an object that has it.
    pub(crate) fn field(&self, key: &str) -> Option<&Node> {
        match &self.content {
            NodeContent::Map(entries) => {
                let mut found = entries.iter().filter(|entry| entry.key == key);
                // The last of equal keys counts, as in most parsers.
                found.next_back().map(|entry| &entry.value)
            }
            NodeContent::Plain | NodeContent::Text | NodeContent::List(_) => None,
        }
    }

    fn find_path(&self, path: &[&str]) -> Option<&Node> {
        let mut node = self;
        for key in path {
            node = node.field(key)?;
        }
        Some(node)
    }
}

struct Reader<'a> {
    text: &'a str,
    at: usize,
}

impl Reader<'_> {
    /// Skips white space and returns the next byte without consuming it.
    fn peek(&mut self) -> Option<u8> {
        loop {
            match self.text.as_bytes().get(self.at)? {
                b' ' | b'\t' | b'\n' | b'\r' => self.at += 1,
                byte => return Some(*byte),
            }
        }
    }

    fn expect(&mut self, wanted: u8) -> Result<(), InvalidJson> {
        if self.peek() == Some(wanted) {
            self.at += 1;
            Ok(())
        } else {
            Err(InvalidJson)
        }
    }

    fn read_value(&mut self, remaining_depth: usize) -> Result<Node, InvalidJson> {
        let remaining_depth = remaining_depth.checked_sub(1).ok_or(InvalidJson)?;
        let first = self.peek().ok_or(InvalidJson)?;
        let start = self.at;
        let content = match first {
            b'"' => {
                self.read_string()?;
                NodeContent::Text
            }
            b'[' => NodeContent::List(
                self.read_elements(b']', |reader| reader.read_value(remaining_depth))?,
            ),
            b'{' => NodeContent::Map(
                self.read_elements(b'}', |reader| reader.read_entry(remaining_depth))?,
            ),
            _ => {
                let rest = self.text.get(start..).ok_or(InvalidJson)?;
                let length = rest
                    .bytes()
                    .take_while(|b| b.is_ascii_alphanumeric() || b"+-.".contains(b))
                    .count();
                if length == 0 {
                    return Err(InvalidJson);
                }
                self.at += length;
                NodeContent::Plain
            }
        };
        Ok(Node {
            span: start..self.at,
            content,
        })
    }

    fn read_entry(&mut self, remaining_depth: usize) -> Result<Entry, InvalidJson> {
        if self.peek() != Some(b'"') {
            return Err(InvalidJson);
        }
        let start = self.at;
        let key = self.read_string()?;
        let key = self.text.get(key).ok_or(InvalidJson)?;
        let key = serde_json::from_str(key).map_err(|_| InvalidJson)?;
        self.expect(b':')?;
        let value = self.read_value(remaining_depth)?;
        Ok(Entry {
            span: start..value.span.end,
            key,
            value,
        })
    }

    /// The comma-separated elements between brackets; `end` is the closing one.
    fn read_elements<T>(
        &mut self,
        end: u8,
        mut read_element: impl FnMut(&mut Self) -> Result<T, InvalidJson>,
    ) -> Result<Vec<T>, InvalidJson> {
        self.at += 1;
        let mut all = Vec::new();
        if self.peek() == Some(end) {
            self.at += 1;
            return Ok(all);
        }
        loop {
            all.push(read_element(self)?);
            let next = self.peek();
            self.at += 1;
            match next {
                Some(b',') => {}
                Some(byte) if byte == end => return Ok(all),
                _ => return Err(InvalidJson),
            }
        }
    }

    fn read_string(&mut self) -> Result<Range<usize>, InvalidJson> {
        let start = self.at;
        let mut escaped = false;
        let inner = self.text.as_bytes().get(start + 1..).ok_or(InvalidJson)?;
        for (index, byte) in inner.iter().enumerate() {
            match byte {
                _ if escaped => escaped = false,
                b'\\' => escaped = true,
                b'"' => {
                    self.at = start + index + 2;
                    return Ok(start..self.at);
                }
                _ => {}
            }
        }
        Err(InvalidJson)
    }
}

/// Replacements of spans of one text, in any order. Spans must not overlap.
#[derive(Debug, Default)]
pub(crate) struct TextEdits(Vec<(Range<usize>, String)>);

impl TextEdits {
    /// Replaces `span` by `new`.
    pub(crate) fn replace(&mut self, span: Range<usize>, new: impl Into<String>) {
        self.0.push((span, new.into()));
    }

    /// Removes the entries or items of `all` for which `keeps` is false, with their commas.
    pub(crate) fn retain(&mut self, all: &[Range<usize>], keeps: &[bool]) {
        let mut kept_before = false;
        for (index, (span, keep)) in all.iter().zip(keeps).enumerate() {
            if *keep {
                kept_before = true;
                continue;
            }
            let before = index.checked_sub(1).and_then(|before| all.get(before));
            let removed = match (kept_before, before, all.get(index + 1)) {
                (true, Some(before), _) => before.end..span.end,
                (_, _, Some(after)) => span.start..after.start,
                (_, _, None) => span.clone(),
            };
            self.replace(removed, "");
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The text with all replacements made.
    pub(crate) fn apply(mut self, text: &str) -> Result<String, InvalidJson> {
        self.0.sort_by_key(|(span, _)| (span.start, span.end));
        let added: usize = self.0.iter().map(|(_, new)| new.len()).sum();
        let mut out = String::with_capacity(text.len() + added);
        let mut at = 0;
        for (span, new) in &self.0 {
            out.push_str(text.get(at..span.start).ok_or(InvalidJson)?);
            out.push_str(new);
            at = span.end;
        }
        out.push_str(text.get(at..).ok_or(InvalidJson)?);
        Ok(out)
    }
}

/// The text of the value at `path`, keys from the outermost to the innermost.
pub fn find<'a>(text: &'a str, path: &[&str]) -> Result<Option<&'a str>, InvalidJson> {
    let node = Node::read(text)?;
    Ok(node
        .find_path(path)
        .and_then(|found| text.get(found.span.clone())))
}

/// The text with the value `new`, which is JSON, at `path`. Missing objects on the path are
/// created; a value on the path that is not an object is replaced by one.
pub fn set(text: &str, path: &[&str], new: &str) -> Result<String, InvalidJson> {
    let root = Node::read(text)?;
    let (mut node, mut rest) = (&root, path);
    while let Some((key, inner)) = rest.split_first()
        && let Some(found) = node.field(key)
    {
        (node, rest) = (found, inner);
    }
    let mut edits = TextEdits::default();
    match (&node.content, rest.split_first()) {
        (NodeContent::Map(entries), Some((key, inner))) => {
            let comma = if entries.is_empty() { "" } else { "," };
            let entry = format!("{comma}{}:{}", quote(key), wrap(inner, new));
            let end = node.span.end - 1;
            edits.replace(end..end, entry);
        }
        _ => edits.replace(node.span.clone(), wrap(rest, new)),
    }
    edits.apply(text)
}

/// The text without the field at `path`, and without the object that contained it if that
/// becomes empty. None if there is no such field.
pub fn remove(text: &str, path: &[&str]) -> Result<Option<String>, InvalidJson> {
    let root = Node::read(text)?;
    let Some((last, above)) = path.split_last() else {
        return Ok(None);
    };
    if root.find_path(path).is_none() {
        return Ok(None);
    }
    let has_no_other_key = |node: &Node| match &node.content {
        NodeContent::Map(entries) => entries.iter().all(|entry| entry.key == *last),
        NodeContent::Plain | NodeContent::Text | NodeContent::List(_) => false,
    };
    let (above, last) = match (above.split_last(), root.find_path(above)) {
        (Some((parent, outer)), Some(node)) if has_no_other_key(node) => (outer, parent),
        _ => (above, last),
    };
    let mut edits = TextEdits::default();
    if let Some(Node {
        content: NodeContent::Map(entries),
        ..
    }) = root.find_path(above)
    {
        let spans: Vec<_> = entries.iter().map(|entry| entry.span.clone()).collect();
        let keeps: Vec<_> = entries.iter().map(|entry| entry.key != *last).collect();
        edits.retain(&spans, &keeps);
    }
    edits.apply(text).map(Some)
}

/// `text` as a JSON string.
pub(crate) fn quote(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

fn wrap(path: &[&str], new: &str) -> String {
    path.iter().rev().fold(new.to_owned(), |inner, key| {
        format!("{{{}:{inner}}}", quote(key))
    })
}

#[cfg(test)]
pub(crate) mod tests;
