//! Patterns of segments, with `*` and `**`, for paths and refs alike.

/// One segment of a pattern.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Segment {
    /// `**`: any number of segments, also none.
    Many,
    /// `*`: one segment that is not empty.
    One,
    /// Text without a star.
    Literal(Box<[u8]>),
    /// Text with stars.
    Glob(Box<[Token]>),
}

/// One piece of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Token {
    /// Any run of bytes, also none.
    Run,
    /// This byte.
    Byte(u8),
}

impl Segment {
    /// The segment that `tokens` describe.
    pub(crate) fn new(tokens: &[Token]) -> Self {
        if tokens == [Token::Run] {
            return Segment::One;
        }
        let literal: Option<Vec<u8>> = tokens
            .iter()
            .map(|token| match token {
                Token::Byte(byte) => Some(*byte),
                Token::Run => None,
            })
            .collect();
        match literal {
            Some(bytes) => Segment::Literal(bytes.into()),
            None => Segment::Glob(tokens.into()),
        }
    }

    fn matches(&self, segment: &[u8]) -> bool {
        match self {
            Segment::Many => false,
            Segment::One => !segment.is_empty(),
            Segment::Literal(text) => text.as_ref() == segment,
            Segment::Glob(tokens) => matches_run(tokens, segment),
        }
    }
}

/// Compares a pattern with the segments that `segment_at` gives: the one at a position
/// (the first at zero) and the position of the next. Neither recurses nor allocates.
///
/// After a mismatch only the last `**` has to take one segment more: what an earlier one
/// could take instead, the last one can take as well. So each pair of segments meets at
/// most once, and the whole costs at most pattern length times text length.
pub(crate) fn matches<'a>(
    pattern: &[Segment],
    segment_at: impl Fn(usize) -> Option<(&'a [u8], usize)>,
) -> bool {
    let (mut at, mut place) = (0, 0);
    let mut last_many: Option<(usize, usize)> = None;
    while let Some((segment, next)) = segment_at(at) {
        match pattern.get(place) {
            Some(Segment::Many) if place + 1 == pattern.len() => return true,
            Some(Segment::Many) => {
                place += 1;
                last_many = Some((place, at));
                continue;
            }
            Some(one) if one.matches(segment) => {
                place += 1;
                at = next;
                continue;
            }
            _ => {}
        }
        let Some((after_many, taken)) = last_many else {
            return false;
        };
        let Some((_, next)) = segment_at(taken) else {
            return false;
        };
        last_many = Some((after_many, next));
        (place, at) = (after_many, next);
    }
    pattern
        .get(place..)
        .is_some_and(|left| left.iter().all(|segment| *segment == Segment::Many))
}

/// The same walk over the bytes of one text.
pub(crate) fn matches_run(tokens: &[Token], text: &[u8]) -> bool {
    let (mut at, mut place) = (0, 0);
    let mut last_run: Option<(usize, usize)> = None;
    while let Some(byte) = text.get(at) {
        match tokens.get(place) {
            Some(Token::Run) => {
                place += 1;
                last_run = Some((place, at));
                continue;
            }
            Some(Token::Byte(wanted)) if wanted == byte => {
                place += 1;
                at += 1;
                continue;
            }
            _ => {}
        }
        let Some((after_run, taken)) = last_run else {
            return false;
        };
        last_run = Some((after_run, taken + 1));
        (place, at) = (after_run, taken + 1);
    }
    tokens
        .get(place..)
        .is_some_and(|left| left.iter().all(|token| *token == Token::Run))
}
