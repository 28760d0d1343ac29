//! Glob matching of segments with `*` and `**`, for paths and refs.

/// One segment of a pattern.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Segment {
    /// `**`: any number of segments, including none.
    DoubleStar,
    /// `*`: one segment that is not empty.
    Star,
    /// Text without a star.
    Literal(Box<[u8]>),
    /// Text with stars.
    Glob(Box<[Token]>),
}

/// One token of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Token {
    /// `*` in a segment: any run of bytes, including none.
    Star,
    /// A literal byte.
    Byte(u8),
}

impl Segment {
    /// The segment that consists of `tokens`.
    pub(crate) fn new(tokens: &[Token]) -> Self {
        if tokens == [Token::Star] {
            return Segment::Star;
        }
        let literal: Option<Vec<u8>> = tokens
            .iter()
            .map(|token| match token {
                Token::Byte(byte) => Some(*byte),
                Token::Star => None,
            })
            .collect();
        match literal {
            Some(bytes) => Segment::Literal(bytes.into()),
            None => Segment::Glob(tokens.into()),
        }
    }

    fn matches(&self, segment: &[u8]) -> bool {
        match self {
            Segment::DoubleStar => false,
            Segment::Star => !segment.is_empty(),
            Segment::Literal(text) => text.as_ref() == segment,
            Segment::Glob(tokens) => matches_tokens(tokens, segment),
        }
    }
}

/// Matches a pattern against the segments that `segment_at` returns: the segment at an offset
/// (the first at zero) and the offset of the next. Neither recurses nor allocates.
///
/// After a mismatch only the last `**` is extended by one segment: whatever an earlier `**` could
/// match instead, the last one can match too. So each pair of segments is compared at most once,
/// and the cost is at most pattern length times text length.
pub(crate) fn matches<'a>(
    pattern: &[Segment],
    segment_at: impl Fn(usize) -> Option<(&'a [u8], usize)>,
) -> bool {
    let (mut at, mut index) = (0, 0);
    let mut last_many: Option<(usize, usize)> = None;
    while let Some((segment, next)) = segment_at(at) {
        match pattern.get(index) {
            Some(Segment::DoubleStar) if index + 1 == pattern.len() => return true,
            Some(Segment::DoubleStar) => {
                index += 1;
                last_many = Some((index, at));
                continue;
            }
            Some(one) if one.matches(segment) => {
                index += 1;
                at = next;
                continue;
            }
            _ => {}
        }
        let Some((after_many, matched_to)) = last_many else {
            return false;
        };
        let Some((_, next)) = segment_at(matched_to) else {
            return false;
        };
        last_many = Some((after_many, next));
        (index, at) = (after_many, next);
    }
    pattern
        .get(index..)
        .is_some_and(|left| left.iter().all(|segment| *segment == Segment::DoubleStar))
}

/// Matches tokens against the bytes of one text, with the algorithm of [`matches`].
pub(crate) fn matches_tokens(tokens: &[Token], text: &[u8]) -> bool {
    let (mut at, mut index) = (0, 0);
    let mut last_run: Option<(usize, usize)> = None;
    while let Some(byte) = text.get(at) {
        match tokens.get(index) {
            Some(Token::Star) => {
                index += 1;
                last_run = Some((index, at));
                continue;
            }
            Some(Token::Byte(wanted)) if wanted == byte => {
                index += 1;
                at += 1;
                continue;
            }
            _ => {}
        }
        let Some((after_run, matched_to)) = last_run else {
            return false;
        };
        last_run = Some((after_run, matched_to + 1));
        (index, at) = (after_run, matched_to + 1);
    }
    tokens
        .get(index..)
        .is_some_and(|left| left.iter().all(|token| *token == Token::Star))
}
