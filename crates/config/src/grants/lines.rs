//! Edits of the text of grants.yaml: adds and removes list items as whole lines, and leaves
//! comments and everything else as they are.

use crate::tree::{Content, Entry, Node, Tree};

/// The text with the item `entry` added to the list `domains` of all sandboxes or of one, and
/// without the items `removed`. None if the file has another form than block lists.
pub(super) fn edit(
    tree: &Tree,
    text: &str,
    sandbox: Option<&str>,
    removed: &[usize],
    entry: Option<&str>,
) -> Option<String> {
    let mut lines: Vec<String> = text.split('\n').map(str::to_owned).collect();
    // The empty text after the last line break.
    if lines.last().is_some_and(String::is_empty) {
        lines.pop();
    }
    let keys: Vec<&str> = match sandbox {
        None => vec!["domains"],
        Some(id) => vec!["sandboxes", id, "domains"],
    };
    let found = Found::find(tree, &keys)?;
    // From the end, so that earlier line numbers stay valid.
    if let Some(entry) = entry {
        insert(&mut lines, &found, &keys, entry)?;
    }
    for index in removed.iter().rev() {
        remove(&mut lines, &found, *index)?;
    }
    let mut text = lines.join("\n");
    text.push('\n');
    Some(text)
}

/// How far the keys of a list exist in a file.
struct Found<'t> {
    /// Number of keys that exist.
    depth: usize,
    /// The last key that exists; none if the file has none of them.
    last: Option<&'t Entry>,
    /// The first line after the value of the last key that belongs to another key.
    end: Option<usize>,
}

impl<'t> Found<'t> {
    fn find(tree: &'t Tree, keys: &[&str]) -> Option<Self> {
        let mut found = Found {
            depth: 0,
            last: None,
            end: None,
        };
        let mut node: &Node = &tree.root;
        for key in keys {
            let entries = match &node.content {
                Content::Map(entries) => entries,
                Content::Absent | Content::Null => break,
                _ => return None,
            };
            let Some(at) = entries.iter().position(|entry| entry.key == *key) else {
                break;
            };
            let entry = entries.get(at)?;
            found.depth += 1;
            found.last = Some(entry);
            if let Some(next) = entries.get(at + 1) {
                found.end = Some(next.position.line);
            }
            node = &entry.value;
        }
        Some(found)
    }

    fn items(&self) -> &'t [Node] {
        match self.last.map(|entry| &entry.value.content) {
            Some(Content::List(items)) => items,
            _ => &[],
        }
    }

    /// The index after the last line with content before `limit`, which is a line number.
    fn end_of_content(lines: &[String], limit: Option<usize>) -> usize {
        let limit = limit.map_or(lines.len(), |line| line.saturating_sub(1).min(lines.len()));
        let before = lines.get(..limit).unwrap_or_default();
        let last = before.iter().rposition(|line| {
            let line = line.trim();
            !line.is_empty() && !line.starts_with('#')
        });
        last.map_or(0, |at| at + 1)
    }
}

fn indentation(line: &str) -> usize {
    line.chars().take_while(|c| *c == ' ').count()
}

fn insert(lines: &mut Vec<String>, found: &Found<'_>, keys: &[&str], entry: &str) -> Option<()> {
    if found.depth == keys.len()
        && let Some(first) = found.items().first()
    {
        let first = lines.get(first.position.line.checked_sub(1)?)?;
        if !first.trim_start().starts_with("- ") {
            return None;
        }
        let item = format!("{}- {entry}", " ".repeat(indentation(first)));
        let at = Found::end_of_content(lines, found.end);
        lines.insert(at, item);
        return Some(());
    }
    // The missing keys and the item, below the last key that exists.
    let mut depth = match found.last {
        None => 0,
        Some(entry) => entry.position.column.checked_sub(1)? + 2,
    };
    if let Some(last) = found.last {
        let at = last.position.line.checked_sub(1)?;
        let line = lines.get_mut(at)?;
        // `domains: []`
        if let Some(open) = line.rfind("[]").filter(|_| found.depth == keys.len()) {
            let comment = line.get(open + 2..)?.trim();
            if !comment.is_empty() && !comment.starts_with('#') {
                return None;
            }
            let comment = comment.to_owned();
            let key = line.get(..open)?.trim_end().to_owned();
            *line = match comment.as_str() {
                "" => key,
                comment => format!("{key} {comment}"),
            };
        }
    }
    let missing = keys.get(found.depth..)?;
    let mut added = Vec::new();
    for key in missing {
        added.push(format!("{}{key}:", " ".repeat(depth)));
        depth += 2;
    }
    added.push(format!("{}- {entry}", " ".repeat(depth)));
    let at = match found.last {
        None => lines.len(),
        Some(_) => Found::end_of_content(lines, found.end),
    };
    lines.splice(at..at, added);
    Some(())
}

/// Removes an item. Comments in front of it and of the next item stay.
fn remove(lines: &mut Vec<String>, found: &Found<'_>, index: usize) -> Option<()> {
    let items = found.items();
    let start = items.get(index)?.position.line.checked_sub(1)?;
    if !lines.get(start)?.trim_start().starts_with("- ") {
        return None;
    }
    let depth = indentation(lines.get(start)?);
    let next = lines.iter().skip(start + 1).position(|line| {
        let line_depth = indentation(line);
        let text = line.trim();
        !text.is_empty() && (line_depth <= depth || text.starts_with('#'))
    });
    let end = next.map_or(lines.len(), |after| start + 1 + after);
    // Blank lines in front of the next item stay.
    let body = lines.get(start..end)?;
    let blank = body.iter().rev().take_while(|line| line.trim().is_empty());
    let end = end - blank.count();
    lines.drain(start..end);
    Some(())
}

/// The lines that differ, each after `-` or `+`. The texts differ by few lines.
pub(super) fn difference(before: &str, after: &str) -> Vec<String> {
    let (before, after): (Vec<&str>, Vec<&str>) =
        (before.lines().collect(), after.lines().collect());
    let same_start = before
        .iter()
        .zip(&after)
        .take_while(|(a, b)| a == b)
        .count();
    let (before, after) = (
        before.get(same_start..).unwrap_or_default(),
        after.get(same_start..).unwrap_or_default(),
    );
    let ends = before.iter().rev().zip(after.iter().rev());
    let same_end = ends.take_while(|(a, b)| a == b).count();
    let changed = |lines: &[&str], sign: char| -> Vec<String> {
        let lines = lines.get(..lines.len() - same_end).unwrap_or_default();
        lines.iter().map(|line| format!("{sign} {line}")).collect()
    };
    let (removed, added) = (changed(before, '-'), changed(after, '+'));
    // Lines between two changes are in both.
    let kept = |line: &String, others: &[String]| {
        others.iter().any(|other| other.get(1..) == line.get(1..))
    };
    let removed_only = removed.iter().filter(|line| !kept(line, &added));
    let added_only = added.iter().filter(|line| !kept(line, &removed));
    removed_only.chain(added_only).cloned().collect()
}
