//! Paths of the API, taken apart, and the patterns of the table.

use crate::path::{CleanPath, Reading};

/// The part of the API a path or an endpoint belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum At {
    /// Below `/repos/OWNER/NAME`.
    Repository,
    /// Anything else.
    Site,
    /// Below `/repos/OWNER/NAME` of the host for uploads.
    Uploads,
    /// Anything else on the host for uploads: there is no endpoint.
    Nowhere,
}

/// A path in one reading.
#[derive(Debug)]
pub(super) struct Place<'p> {
    pub(super) at: At,
    segments: Vec<&'p str>,
    /// No endpoint ends in a slash, and servers differ on what one means.
    has_trailing_slash: bool,
}

/// The path in every reading it has.
pub(super) struct Readings<'p> {
    path: &'p CleanPath,
    is_upload: bool,
    left: std::slice::Iter<'static, Reading>,
}

impl<'p> Readings<'p> {
    /// Those of a path of the API's own host, or of the one for uploads.
    pub(super) fn of(path: &'p CleanPath, is_upload: bool) -> Self {
        let all = if path.has_one_reading() {
            &[Reading::LITERAL]
        } else {
            &Reading::ALL[..]
        };
        Self {
            path,
            is_upload,
            left: all.iter(),
        }
    }
}

impl<'p> Iterator for Readings<'p> {
    type Item = Place<'p>;

    fn next(&mut self) -> Option<Place<'p>> {
        let reading = *self.left.next()?;
        let mut segments = Vec::with_capacity(8);
        let mut start = 0;
        while let Some((segment, next)) = self.path.segment_at(start, reading) {
            segments.push(segment);
            start = next;
        }
        let at = match (segments.as_slice(), self.is_upload) {
            (["repos", _, _, ..], false) => At::Repository,
            (["repos", _, _, ..], true) => At::Uploads,
            (_, false) => At::Site,
            (_, true) => At::Nowhere,
        };
        Some(Place {
            at,
            has_trailing_slash: self.path.has_trailing_slash() && !segments.is_empty(),
            segments,
        })
    }
}

impl<'p> Place<'p> {
    /// Owner and name, where the path names a repository.
    pub(super) fn repository(&self) -> Option<(&'p str, &'p str)> {
        match (self.at, self.segments.as_slice()) {
            (At::Repository | At::Uploads, [_, owner, name, ..]) => Some((owner, name)),
            _ => None,
        }
    }

    /// Whether the path is `/repositories/N`.
    pub(super) fn is_by_number(&self) -> bool {
        let first = self.segments.first();
        first.is_some_and(|first| first.eq_ignore_ascii_case("repositories"))
    }

    /// Whether a server might take it for the GraphQL endpoint.
    pub(super) fn is_graphql(&self) -> bool {
        let first = self.segments.first();
        first.is_some_and(|first| first.eq_ignore_ascii_case("graphql"))
    }

    /// Whether the path, behind the repository if there is one, is one of `patterns`.
    ///
    /// Patterns are words between slashes, compared exactly. `#` is a number, `*` any one
    /// segment, `**` any number of them, `~` a commit's hash, and `@` one or more segments
    /// without a colon: `OWNER:REF` is a ref of another repository.
    pub(super) fn fits(&self, patterns: &[&str]) -> bool {
        let rest = match self.at {
            At::Repository | At::Uploads => self.segments.get(3..).unwrap_or_default(),
            At::Site | At::Nowhere => &self.segments,
        };
        !self.has_trailing_slash && patterns.iter().any(|pattern| fits(pattern, rest))
    }
}

fn fits(pattern: &str, mut segments: &[&str]) -> bool {
    let mut words = pattern.split('/').filter(|word| !word.is_empty());
    loop {
        let Some(word) = words.next() else {
            return segments.is_empty();
        };
        match word {
            "**" => return true,
            "@" => return !segments.is_empty() && !segments.iter().any(|s| s.contains(':')),
            _ => {}
        }
        let Some((segment, rest)) = segments.split_first() else {
            return false;
        };
        let is_it = match word {
            "#" => segment.len() <= 20 && segment.bytes().all(|b| b.is_ascii_digit()),
            "~" => segment.len() <= 64 && segment.bytes().all(|b| b.is_ascii_hexdigit()),
            "*" => true,
            word => word == *segment,
        };
        if !is_it || segment.is_empty() {
            return false;
        }
        segments = rest;
    }
}
