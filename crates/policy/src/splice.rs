//! JSON text, changed in places.
//!
//! What passes through the gate is not ours to rewrite: a number of thirty digits, the order
//! of keys and the way a letter is escaped survive only where nobody parses and prints them
//! again. So a change is a list of spans of the text, and everything beside them stays
//! byte for byte.
//!
//! The text is valid JSON already; what is not is an error here, never a panic.

use std::ops::Range;

/// How deep values may nest: as deep as what serde_json parses.
const DEEPEST: usize = 128;

/// The text is no JSON, or nested too deep.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the text is no JSON, or nested too deep")]
pub struct NoJson;

/// A value in a text, with where it stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Node {
    pub(crate) span: Range<usize>,
    pub(crate) inside: Inside,
}

/// What a value is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Inside {
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
    /// Reads `text`, which is one value.
    pub(crate) fn read(text: &str) -> Result<Self, NoJson> {
        let mut reader = Reader { text, at: 0 };
        let node = reader.value(DEEPEST)?;
        match reader.next() {
            None => Ok(node),
            Some(_) => Err(NoJson),
        }
    }

    /// The field `key`, where this is an object that has it.
    pub(crate) fn field(&self, key: &str) -> Option<&Node> {
        match &self.inside {
            Inside::Map(entries) => {
                let mut found = entries.iter().filter(|entry| entry.key == key);
                // The last of equal keys counts, as in most readers.
                found.next_back().map(|entry| &entry.value)
            }
            Inside::Plain | Inside::Text | Inside::List(_) => None,
        }
    }

    fn at(&self, path: &[&str]) -> Option<&Node> {
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
    /// The next byte that is no space.
    fn next(&mut self) -> Option<u8> {
        loop {
            match self.text.as_bytes().get(self.at)? {
                b' ' | b'\t' | b'\n' | b'\r' => self.at += 1,
                byte => return Some(*byte),
            }
        }
    }

    fn take(&mut self, wanted: u8) -> Result<(), NoJson> {
        if self.next() == Some(wanted) {
            self.at += 1;
            Ok(())
        } else {
            Err(NoJson)
        }
    }

    fn value(&mut self, left: usize) -> Result<Node, NoJson> {
        let left = left.checked_sub(1).ok_or(NoJson)?;
        let first = self.next().ok_or(NoJson)?;
        let start = self.at;
        let inside = match first {
            b'"' => {
                self.string()?;
                Inside::Text
            }
            b'[' => Inside::List(self.all(b']', |reader| reader.value(left))?),
            b'{' => Inside::Map(self.all(b'}', |reader| reader.entry(left))?),
            _ => {
                let rest = self.text.get(start..).ok_or(NoJson)?;
                let length = rest
                    .bytes()
                    .take_while(|b| b.is_ascii_alphanumeric() || b"+-.".contains(b))
                    .count();
                if length == 0 {
                    return Err(NoJson);
                }
                self.at += length;
                Inside::Plain
            }
        };
        Ok(Node {
            span: start..self.at,
            inside,
        })
    }

    fn entry(&mut self, left: usize) -> Result<Entry, NoJson> {
        if self.next() != Some(b'"') {
            return Err(NoJson);
        }
        let start = self.at;
        let key = self.string()?;
        let key = self.text.get(key).ok_or(NoJson)?;
        let key = serde_json::from_str(key).map_err(|_| NoJson)?;
        self.take(b':')?;
        let value = self.value(left)?;
        Ok(Entry {
            span: start..value.span.end,
            key,
            value,
        })
    }

    /// What stands between brackets.
    fn all<T>(
        &mut self,
        end: u8,
        mut one: impl FnMut(&mut Self) -> Result<T, NoJson>,
    ) -> Result<Vec<T>, NoJson> {
        self.at += 1;
        let mut all = Vec::new();
        if self.next() == Some(end) {
            self.at += 1;
            return Ok(all);
        }
        loop {
            all.push(one(self)?);
            let next = self.next();
            self.at += 1;
            match next {
                Some(b',') => {}
                Some(byte) if byte == end => return Ok(all),
                _ => return Err(NoJson),
            }
        }
    }

    fn string(&mut self) -> Result<Range<usize>, NoJson> {
        let start = self.at;
        let mut escaped = false;
        let inner = self.text.as_bytes().get(start + 1..).ok_or(NoJson)?;
        for (place, byte) in inner.iter().enumerate() {
            match byte {
                _ if escaped => escaped = false,
                b'\\' => escaped = true,
                b'"' => {
                    self.at = start + place + 2;
                    return Ok(start..self.at);
                }
                _ => {}
            }
        }
        Err(NoJson)
    }
}

/// Changes of one text, in any order, none within another.
#[derive(Debug, Default)]
pub(crate) struct Edits(Vec<(Range<usize>, String)>);

impl Edits {
    /// Puts `new` where `span` is.
    pub(crate) fn put(&mut self, span: Range<usize>, new: impl Into<String>) {
        self.0.push((span, new.into()));
    }

    /// Takes out the entries or items of `all` for which `keeps` is false, with the commas
    /// they need no more.
    pub(crate) fn keep(&mut self, all: &[Range<usize>], keeps: &[bool]) {
        let mut kept_before = false;
        for (index, (span, keep)) in all.iter().zip(keeps).enumerate() {
            if *keep {
                kept_before = true;
                continue;
            }
            let before = index.checked_sub(1).and_then(|before| all.get(before));
            let gone = match (kept_before, before, all.get(index + 1)) {
                (true, Some(before), _) => before.end..span.end,
                (_, _, Some(after)) => span.start..after.start,
                (_, _, None) => span.clone(),
            };
            self.put(gone, "");
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The text with every change in it.
    pub(crate) fn apply(mut self, text: &str) -> Result<String, NoJson> {
        self.0.sort_by_key(|(span, _)| (span.start, span.end));
        let added: usize = self.0.iter().map(|(_, new)| new.len()).sum();
        let mut out = String::with_capacity(text.len() + added);
        let mut at = 0;
        for (span, new) in &self.0 {
            out.push_str(text.get(at..span.start).ok_or(NoJson)?);
            out.push_str(new);
            at = span.end;
        }
        out.push_str(text.get(at..).ok_or(NoJson)?);
        Ok(out)
    }
}

/// The text of the value at `path`, keys from the outermost to the innermost.
pub fn find<'a>(text: &'a str, path: &[&str]) -> Result<Option<&'a str>, NoJson> {
    let node = Node::read(text)?;
    Ok(node.at(path).and_then(|found| text.get(found.span.clone())))
}

/// The text with `new`, which is JSON, at `path`. Objects on the way there are made where
/// they are missing; what stands in the way and is none is replaced by one.
pub fn set(text: &str, path: &[&str], new: &str) -> Result<String, NoJson> {
    let root = Node::read(text)?;
    let (mut node, mut rest) = (&root, path);
    while let Some((key, inner)) = rest.split_first()
        && let Some(found) = node.field(key)
    {
        (node, rest) = (found, inner);
    }
    let mut edits = Edits::default();
    match (&node.inside, rest.split_first()) {
        (Inside::Map(entries), Some((key, inner))) => {
            let comma = if entries.is_empty() { "" } else { "," };
            let entry = format!("{comma}{}:{}", quote(key), wrap(inner, new));
            let end = node.span.end - 1;
            edits.put(end..end, entry);
        }
        _ => edits.put(node.span.clone(), wrap(rest, new)),
    }
    edits.apply(text)
}

/// The text without the field at `path`, and without the object it was in where nothing else
/// is in it. Nothing where there is no such field.
pub fn remove(text: &str, path: &[&str]) -> Result<Option<String>, NoJson> {
    let root = Node::read(text)?;
    let Some((last, above)) = path.split_last() else {
        return Ok(None);
    };
    if root.at(path).is_none() {
        return Ok(None);
    }
    let only_one = |node: &Node| match &node.inside {
        Inside::Map(entries) => entries.iter().all(|entry| entry.key == *last),
        Inside::Plain | Inside::Text | Inside::List(_) => false,
    };
    let (above, last) = match (above.split_last(), root.at(above)) {
        (Some((parent, outer)), Some(node)) if only_one(node) => (outer, parent),
        _ => (above, last),
    };
    let mut edits = Edits::default();
    if let Some(Node {
        inside: Inside::Map(entries),
        ..
    }) = root.at(above)
    {
        let spans: Vec<_> = entries.iter().map(|entry| entry.span.clone()).collect();
        let keeps: Vec<_> = entries.iter().map(|entry| entry.key != *last).collect();
        edits.keep(&spans, &keeps);
    }
    edits.apply(text).map(Some)
}

/// A string as JSON writes it.
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
