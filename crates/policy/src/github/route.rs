//! Parsed paths of the API, and matching with the patterns of the table.

use crate::path::{CleanPath, Reading};

/// The part of the API that a path or an endpoint belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ApiArea {
    /// Below `/repos/OWNER/NAME`.
    Repository,
    /// Anything else.
    Site,
    /// Below `/repos/OWNER/NAME` on the host for uploads.
    Uploads,
    /// Anything else on the host for uploads, which has no endpoints.
    UnknownUpload,
}

/// A path of the API in one reading.
#[derive(Debug)]
pub(super) struct ApiPath<'p> {
    pub(super) area: ApiArea,
    segments: Vec<&'p str>,
    /// Whether the path ends in a slash. No endpoint does, and servers treat it differently.
    has_trailing_slash: bool,
}

/// Iterator over all readings of a path.
pub(super) struct Readings<'p> {
    path: &'p CleanPath,
    is_upload: bool,
    remaining: std::slice::Iter<'static, Reading>,
}

impl<'p> Readings<'p> {
    /// The readings of a path, on the host for uploads if `is_upload`.
    pub(super) fn new(path: &'p CleanPath, is_upload: bool) -> Self {
        let all = if path.has_one_reading() {
            &[Reading::LITERAL]
        } else {
            &Reading::ALL[..]
        };
        Self {
            path,
            is_upload,
            remaining: all.iter(),
        }
    }
}

impl<'p> Iterator for Readings<'p> {
    type Item = ApiPath<'p>;

    fn next(&mut self) -> Option<ApiPath<'p>> {
        let reading = *self.remaining.next()?;
        let mut segments = Vec::with_capacity(8);
        let mut start = 0;
        while let Some((segment, next)) = self.path.segment_at(start, reading) {
            segments.push(segment);
            start = next;
        }
        let area = match (segments.as_slice(), self.is_upload) {
            (["repos", _, _, ..], false) => ApiArea::Repository,
            (["repos", _, _, ..], true) => ApiArea::Uploads,
            (_, false) => ApiArea::Site,
            (_, true) => ApiArea::UnknownUpload,
        };
        Some(ApiPath {
            area,
            has_trailing_slash: self.path.has_trailing_slash() && !segments.is_empty(),
            segments,
        })
    }
}

impl<'p> ApiPath<'p> {
    /// Owner and name, if the path contains a repository.
    pub(super) fn repository(&self) -> Option<(&'p str, &'p str)> {
        match (self.area, self.segments.as_slice()) {
            (ApiArea::Repository | ApiArea::Uploads, [_, owner, name, ..]) => Some((owner, name)),
            _ => None,
        }
    }

    /// Whether the path is `/repositories/N`.
    pub(super) fn is_repository_by_number(&self) -> bool {
        let first = self.segments.first();
        first.is_some_and(|first| first.eq_ignore_ascii_case("repositories"))
    }

    /// Whether a server might treat the path as the GraphQL endpoint.
    pub(super) fn is_graphql(&self) -> bool {
        let first = self.segments.first();
        first.is_some_and(|first| first.eq_ignore_ascii_case("graphql"))
    }

    /// Whether the path after the repository, if it has one, matches one of `patterns`.
    ///
    /// Patterns are words between slashes, compared exactly. `#` is a number, `*` any one
    /// segment, `**` any number of segments, `~` a commit hash, and `@` one or more segments
    /// without a colon, because `OWNER:REF` is a ref of another repository.
    pub(super) fn matches(&self, patterns: &[&str]) -> bool {
        let rest = match self.area {
            ApiArea::Repository | ApiArea::Uploads => self.segments.get(3..).unwrap_or_default(),
            ApiArea::Site | ApiArea::UnknownUpload => &self.segments,
        };
        !self.has_trailing_slash && patterns.iter().any(|pattern| matches(pattern, rest))
    }
}

fn matches(pattern: &str, mut segments: &[&str]) -> bool {
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
        let is_match = match word {
            "#" => segment.len() <= 20 && segment.bytes().all(|b| b.is_ascii_digit()),
            "~" => segment.len() <= 64 && segment.bytes().all(|b| b.is_ascii_hexdigit()),
            "*" => true,
            word => word == *segment,
        };
        if !is_match || segment.is_empty() {
            return false;
        }
        segments = rest;
    }
}
