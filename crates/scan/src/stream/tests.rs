use proptest::prelude::*;

use super::*;
use crate::formats::FormatDetector;

fn secret() -> String {
    format!("{}{}", "ghp_", "q7Rk2VbX9sLm4ZtYc1WdNf8HgJpA3uE5oTi6")
}

/// Findings of `text`, split into chunks of these lengths, in turn.
fn in_pieces(
    detector: &FormatDetector,
    text: &[u8],
    lengths: &[usize],
) -> Vec<(String, std::ops::Range<u64>)> {
    let mut stream = StreamScanner::new(detector);
    let mut all = Vec::new();
    let mut found = |finding: ScanFinding<'_>| all.push((finding.rule.to_owned(), finding.span));
    let mut rest = text;
    for length in lengths.iter().cycle() {
        let (piece, later) = rest.split_at((*length).clamp(1, rest.len().max(1)).min(rest.len()));
        stream.feed(piece, &mut found);
        rest = later;
        if rest.is_empty() {
            break;
        }
    }
    stream.finish(&mut found);
    all
}

#[test]
fn secret_across_any_boundary_is_found_once() {
    let detector = FormatDetector::built_in().unwrap();
    let window = WINDOW + 2 * detector.reach();
    let secret = secret();
    for boundary in [window - detector.reach(), window, window + WINDOW] {
        for shift in 0..=secret.len() + 2 {
            let start = boundary - shift;
            let mut text = vec![b' '; start];
            text.extend(secret.bytes());
            text.resize(3 * window, b' ');
            let expected = [(
                "github-token".to_owned(),
                start as u64..(start + secret.len()) as u64,
            )];
            assert_eq!(
                in_pieces(&detector, &text, &[usize::MAX]),
                expected,
                "{boundary} - {shift}"
            );
        }
    }
}

#[test]
fn secret_across_two_streams_is_not_found() {
    let detector = FormatDetector::built_in().unwrap();
    let secret = secret();
    let (front, back) = secret.split_at(20);
    let mut stream = StreamScanner::new(&detector);
    let mut count = 0;
    for piece in [front, back] {
        stream.feed(piece.as_bytes(), &mut |_| count += 1);
        stream.finish(&mut |_| count += 1);
    }
    assert_eq!(count, 0);
    stream.feed(secret.as_bytes(), &mut |finding| {
        assert_eq!(finding.span.start, 0);
    });
    stream.finish(&mut |finding| {
        count += 1;
        assert_eq!(finding.span.start, 0);
    });
    assert_eq!(count, 1);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// However a text is split, the findings are those of the whole text.
    #[test]
    fn findings_do_not_depend_on_the_chunks(
        gaps in proptest::collection::vec(0_usize..40_000, 1..12),
        lengths in proptest::collection::vec(1_usize..90_000, 1..5),
        filler in "[ a-z_:/-]{1,9}",
    ) {
        let detector = FormatDetector::built_in().unwrap();
        let mut text = Vec::new();
        for gap in gaps {
            text.extend(filler.bytes().cycle().take(gap));
            text.extend(b" ");
            text.extend(secret().bytes());
            text.extend(b" ");
        }
        let mut whole = Vec::new();
        detector.scan(&text, &mut |finding| whole.push((finding.rule.to_owned(), finding.span)));
        prop_assert!(!whole.is_empty());
        prop_assert_eq!(in_pieces(&detector, &text, &lengths), whole);
    }
}
