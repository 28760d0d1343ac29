use proptest::prelude::*;

use super::*;

fn clean(text: &str) -> CleanPath {
    CleanPath::parse(text).unwrap_or_else(|why| panic!("{text:?}: {why}"))
}

#[test]
fn path_is_normalised_to_one_spelling() {
    for (given, wire) in [
        ("/", "/"),
        ("//", "/"),
        ("/.", "/"),
        ("/a/..", "/"),
        ("/a", "/a"),
        ("/a/", "/a/"),
        ("/a//b", "/a/b"),
        ("//a///b//", "/a/b/"),
        ("/a/./b", "/a/b"),
        ("/a/b/.", "/a/b/"),
        ("/a/b/..", "/a/"),
        ("/a/b/../c", "/a/c"),
        ("/a/%2e%2E/b", "/b"),
        ("/a/.%2e/b", "/b"),
        ("/a%2Fb/../c", "/c"),
        ("/x/a%2Fb/../c", "/x/c"),
        ("/%61%7e%5F%2d", "/a~_-"),
        ("/%c3%a9", "/%C3%A9"),
        ("/é", "/%C3%A9"),
        ("/a%20b", "/a%20b"),
        ("/a\"<>^`{|}[]", "/a%22%3C%3E%5E%60%7B%7C%7D%5B%5D"),
        ("/100%25", "/100%25"),
        ("/100%25/ab", "/100%25/ab"),
        ("/%25zz", "/%25zz"),
        ("/a%3fb", "/a%3Fb"),
        ("/a%23b", "/a%23b"),
        ("/@s%2fp", "/@s%2Fp"),
        ("/m:v1", "/m:v1"),
        ("/m%3av1", "/m%3Av1"),
        ("/a+b%2Bc", "/a+b%2Bc"),
        ("/a;v=1/b", "/a;v=1/b"),
        ("/...", "/..."),
        ("/..a", "/..a"),
        ("/.well-known", "/.well-known"),
        ("/(a)!$&'*,=", "/(a)!$&'*,="),
    ] {
        assert_eq!(clean(given).wire(), wire, "{given:?}");
    }
}

#[test]
fn malformed_path_is_rejected_with_reason() {
    use BadPath as B;
    for (given, why) in [
        ("", B::NotAbsolute),
        ("*", B::NotAbsolute),
        ("a", B::NotAbsolute),
        ("?q", B::NotAbsolute),
        ("http://a/b", B::NotAbsolute),
        ("/..", B::AboveRoot),
        ("/../a", B::AboveRoot),
        ("/a/../..", B::AboveRoot),
        ("/a//../..", B::AboveRoot),
        ("/%2e%2e/a", B::AboveRoot),
        ("/a\\b", B::Backslash),
        ("/a%5cb", B::Backslash),
        ("/..\\..", B::Backslash),
        ("/a\0", B::Control),
        ("/a%00b", B::Control),
        ("/a%0d%0aHost:", B::Control),
        ("/a\r\nb", B::Control),
        ("/a\tb", B::Control),
        ("/a%7F", B::Control),
        ("/a\u{85}", B::Control),
        ("/a%c2%85", B::Control),
        ("/a b", B::Whitespace),
        ("/a#b", B::Fragment),
        ("/a?q#b", B::Fragment),
        ("/a?q\nb", B::Control),
        ("/a?q b", B::Whitespace),
        ("/a%", B::BadPercent),
        ("/a%4", B::BadPercent),
        ("/a%4g", B::BadPercent),
        ("/a%/b", B::BadPercent),
        ("/a%u002f", B::BadPercent),
        ("/%2541", B::DoubleEncoded),
        ("/%252e%252e/", B::DoubleEncoded),
        ("/%25%32%65", B::DoubleEncoded),
        ("/%2525", B::DoubleEncoded),
        ("/%252fa/../b", B::DoubleEncoded),
        ("/%ff", B::NotUtf8),
        ("/%c0%af", B::NotUtf8),
        ("/%c0%ae%c0%ae/", B::NotUtf8),
        ("/a/..;/b", B::HiddenSegment),
        ("/a/.;x/b", B::HiddenSegment),
        ("/a/..%3bx/b", B::HiddenSegment),
        ("/a/%2e%2e;/b", B::HiddenSegment),
        ("/;x/admin", B::HiddenSegment),
        ("/a%2F..", B::EncodedSlash),
        ("/a%2f..%2fb", B::EncodedSlash),
        ("/..%2fa", B::EncodedSlash),
        ("/%2e%2e%2fa", B::EncodedSlash),
        ("/a%2F.%2Fb", B::EncodedSlash),
        ("/a%2F..;x%2Fb", B::EncodedSlash),
        ("/%2Fa", B::EncodedSlash),
        ("/a%2F", B::EncodedSlash),
        ("/a%2F%2Fb", B::EncodedSlash),
        ("/%2F", B::EncodedSlash),
        ("/admin;x%2Fb/users%2Fdelete", B::EncodedSlash),
        ("/a;%2Fb", B::EncodedSlash),
        ("/a%3Bx%2fb", B::EncodedSlash),
        ("/a;x/b%3Bc", B::MixedParameters),
        ("/a%3bx/b;c", B::MixedParameters),
        ("/a;x%3By", B::MixedParameters),
    ] {
        assert_eq!(CleanPath::parse(given), Err(why), "{given:?}");
    }
}

#[test]
fn query_is_kept_unchanged() {
    for (given, path, query) in [
        ("/a", "/a", None),
        ("/a?", "/a", Some("")),
        ("/a/../b?x=%2e%2E//\\&y=?é", "/b", Some("x=%2e%2E//\\&y=?é")),
    ] {
        let clean = clean(given);
        assert_eq!((clean.wire(), clean.query()), (path, query));
        let again = query.map_or(path.to_owned(), |q| format!("{path}?{q}"));
        assert_eq!(clean.target(), again);
    }
}

#[test]
fn debug_output_omits_query() {
    let path = clean("/a%20b?token=hunter2");
    assert_eq!(format!("{path:?}"), "CleanPath(\"/a%20b?…\")");
    assert_eq!(format!("{:?}", clean("/a")), "CleanPath(\"/a\")");
}

#[test]
fn encoded_slash_is_character_or_separator_by_reading() {
    let path = clean("/x/@s%2Fp%2Fq/y/");
    assert_eq!(path.segments().collect::<Vec<_>>(), ["x", "@s/p/q", "y"]);
    assert_eq!(path.text(), "/x/@s/p/q/y/");
    assert!(path.has_encoded_slash() && path.has_trailing_slash());
    let split = Reading {
        splits_encoded_slashes: true,
        drops_parameters: false,
    };
    let (first, next) = path.segment_at(2, split).unwrap();
    assert_eq!(
        (first, path.segment_at(next, split).unwrap().0),
        ("@s", "p")
    );
    assert_eq!(clean("/").segments().count(), 0);
}

/// Paths of segments that are relevant to normalisation.
fn tricky() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        Just("."),
        Just(".."),
        Just("%2e"),
        Just("%2F"),
        Just("%2f"),
        Just("/"),
        Just("//"),
        Just("%5c"),
        Just("\\"),
        Just("%25"),
        Just("%"),
        Just("41"),
        Just(";"),
        Just("%3b"),
        Just("a"),
        Just("é"),
        Just("%C3%A9"),
        Just("%ff"),
        Just("%00"),
        Just(":"),
        Just("%3A"),
        Just("?"),
        Just("*"),
        Just("\u{1}"),
    ];
    proptest::collection::vec(piece, 0..12).prop_map(|pieces| format!("/{}", pieces.concat()))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn target_parses_back_to_same_path(text in prop_oneof![tricky(), "/\\PC{0,30}"]) {
        if let Ok(path) = CleanPath::parse(&text) {
            let again = CleanPath::parse(path.target()).unwrap();
            prop_assert_eq!(again.target(), path.target());
            prop_assert_eq!(again, path);
        }
    }

    #[test]
    fn path_on_fast_path_is_unchanged_by_decoding(text in "/[a./;:@*]{0,8}") {
        if is_clean(&text) {
            let mut builder = PathBuilder::with_capacity(0);
            for segment in text[1..].split('/') {
                builder.push(segment).unwrap();
            }
            prop_assert_eq!(builder.finish(None).unwrap(), clean(&text));
            let parsed = clean(&text);
            prop_assert_eq!(parsed.text(), text);
        }
    }

    /// Some servers split at encoded slashes first, others drop parameters first. Both must get
    /// the same segments, or a deny rule would hold for only one of them.
    #[test]
    fn splitting_and_dropping_parameters_commute(text in prop_oneof![tricky(), "/(a|b|;|%3B|%2F|/){0,10}"]) {
        if let Ok(path) = CleanPath::parse(&text) {
            let bare = |segment: &str| segment.split(';').next().unwrap().to_owned();
            let dropped_first: Vec<String> = path
                .segments()
                .flat_map(|segment| {
                    let segment = bare(segment);
                    segment.split('/').map(str::to_owned).collect::<Vec<_>>()
                })
                .collect();
            let both = Reading { splits_encoded_slashes: true, drops_parameters: true };
            let (mut split_first, mut at) = (Vec::new(), 0);
            while let Some((segment, next)) = path.segment_at(at, both) {
                split_first.push(segment.to_owned());
                at = next;
            }
            prop_assert_eq!(dropped_first, split_first);
            prop_assert!(!(path.wire().contains(';') && path.wire().contains("%3B")));
        }
    }

    #[test]
    fn wire_form_contains_no_dot_segments_or_backslashes(text in prop_oneof![tricky(), "/\\PC{0,30}"]) {
        if let Ok(path) = CleanPath::parse(&text) {
            let wire = path.wire();
            prop_assert!(wire.starts_with('/') && !wire.contains("//") && wire.is_ascii());
            prop_assert!(wire.bytes().all(|b| b.is_ascii_graphic() && b != b'\\'));
            prop_assert!(!wire.to_ascii_lowercase().contains("%5c"));
            for segment in wire.replace("%2F", "/").split('/') {
                let bare = segment.split(';').next().unwrap();
                prop_assert!(!matches!(bare, "." | ".."), "{wire}");
            }
        }
    }

    #[test]
    fn every_encoding_of_unreserved_path_is_equal(
        text in "(/[a-z0-9._~-]{1,6}){1,4}",
        choose in proptest::collection::vec(any::<bool>(), 30),
    ) {
        prop_assume!(!text.split('/').any(|s| s == "." || s == ".."));
        let encoded: String = text
            .chars()
            .zip(choose.iter().cycle())
            .map(|(c, yes)| if *yes && c != '/' { format!("%{:02x}", c as u32) } else { c.to_string() })
            .collect();
        prop_assert_eq!(clean(&encoded), clean(&text));
        let parsed = clean(&encoded);
        prop_assert_eq!(parsed.wire(), text);
    }
}
