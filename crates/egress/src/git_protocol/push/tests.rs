use proptest::prelude::*;

use super::*;

const A: &str = "1111111111111111111111111111111111111111";
const B: &str = "2222222222222222222222222222222222222222";
const ZERO: &str = "0000000000000000000000000000000000000000";
const CAPS: &str = " report-status-v2 side-band-64k object-format=sha1 agent=git/2.47";

/// The bytes of a body: `lines` as pkt-lines, an empty one as a flush, then `pack`.
fn body(lines: &[&[u8]], pack: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for data in lines {
        if data.is_empty() {
            pkt_line::flush(&mut bytes);
        } else {
            pkt_line::write(&mut bytes, data);
        }
    }
    bytes.extend_from_slice(pack);
    bytes
}

fn pack() -> Vec<u8> {
    [&b"PACK\0\0\0\x02\0\0\0\0"[..], &[7; 20]].concat()
}

fn command(old: &str, new: &str, name: &str) -> String {
    format!("{old} {new} {name}")
}

fn first_command(old: &str, new: &str, name: &str, caps: &str) -> String {
    format!("{old} {new} {name}\0{caps}")
}

fn parse(bytes: &[u8]) -> Result<ParsedPush, PushParseError> {
    fuzz_check(bytes, usize::MAX)
}

fn push(bytes: &[u8]) -> Push {
    match parse(bytes) {
        Ok(ParsedPush::Push(push)) => push,
        other => panic!("{other:?}"),
    }
}

fn names(push: &Push) -> Vec<String> {
    let updates = push.head.updates.iter();
    updates.map(|update| update.name.to_string()).collect()
}

#[test]
fn probe_is_a_single_flush() {
    assert_eq!(parse(b"0000"), Ok(ParsedPush::Probe));
    assert_eq!(parse(b"00000000"), Err(PushParseError::NoCommand));
    assert_eq!(parse(b"0000PACK"), Err(PushParseError::NoCommand));
    assert_eq!(parse(b""), Err(PushParseError::Incomplete));
    assert_eq!(parse(b"00"), Err(PushParseError::Incomplete));
}

#[test]
fn commands_capabilities_and_pack_offset_are_parsed() {
    let one = first_command(A, B, "refs/heads/one", &format!("{CAPS} atomic"));
    let two = command(ZERO, A, "refs/tags/two");
    let lines: [&[u8]; 3] = [one.as_bytes(), two.as_bytes(), b""];
    let bytes = body(&lines, &pack());
    let push = push(&bytes);
    assert_eq!(names(&push), ["refs/heads/one", "refs/tags/two"]);
    assert_eq!(push.head.format, ObjectFormat::Sha1);
    let caps = push.head.capabilities;
    assert!(caps.report && caps.side_band && caps.atomic && !caps.options);
    let at = usize::try_from(push.pack.unwrap()).unwrap();
    assert_eq!(&bytes[at..], pack());
}

#[test]
fn announced_push_options_follow_the_commands() {
    let one = first_command(ZERO, B, "refs/heads/one", "report-status push-options");
    let lines: [&[u8]; 5] = [one.as_bytes(), b"", b"ci.skip\n", b"\xff x", b""];
    let push = push(&body(&lines, &pack()));
    assert_eq!(push.head.options, [b"ci.skip".to_vec(), b"\xff x".to_vec()]);
    // Git accepts the capability with a value, too.
    let one = first_command(ZERO, B, "refs/heads/one", "push-options=1");
    assert_eq!(
        parse(&body(&[one.as_bytes(), b""], &pack())),
        Err(PushParseError::PktLine(pkt_line::PktLineError))
    );
}

#[test]
fn push_of_deletions_has_no_pack() {
    let one = first_command(A, ZERO, "refs/heads/one", CAPS);
    let alone = body(&[one.as_bytes(), b""], b"");
    assert_eq!(push(&alone).pack, None);
    let with = body(&[one.as_bytes(), b""], &pack());
    assert_eq!(parse(&with), Err(PushParseError::NotAPack));
    let two = command(ZERO, A, "refs/heads/two");
    let mixed = body(&[one.as_bytes(), two.as_bytes(), b""], &pack());
    assert_eq!(push(&mixed).head.updates.len(), 2);
}

#[test]
fn object_format_follows_the_id_length() {
    let (a, zero) = ("3".repeat(64), "0".repeat(64));
    let caps = "report-status object-format=sha256";
    let one = first_command(&zero, &a, "refs/heads/one", caps);
    let shallow = format!("shallow {a}");
    let lines: [&[u8]; 3] = [shallow.as_bytes(), one.as_bytes(), b""];
    let long = push(&body(&lines, &pack()));
    assert_eq!(long.head.format, ObjectFormat::Sha256);

    let mixed = command(ZERO, B, "refs/heads/two");
    let lines: [&[u8]; 3] = [one.as_bytes(), mixed.as_bytes(), b""];
    assert_eq!(parse(&body(&lines, &pack())), Err(PushParseError::Format));
    let wrong = first_command(ZERO, A, "refs/heads/one", caps);
    assert_eq!(
        parse(&body(&[wrong.as_bytes(), b""], &pack())),
        Err(PushParseError::Format)
    );
}

#[test]
fn commands_of_a_push_certificate_are_parsed() {
    let command = format!("{ZERO} {A} refs/heads/signed\n");
    let head: [&[u8]; 3] = [
        b"push-cert\0report-status push-options",
        b"certificate version 0.1\n",
        b"push-option one\n",
    ];
    let signature: [&[u8]; 2] = [b"-----BEGIN PGP SIGNATURE-----\nx\n", b"push-cert-end\n"];
    let whole = |middle: &[&[u8]], end: &[&[u8]]| {
        let lines = [&head[..], middle, end].concat();
        parse(&body(&lines, &pack()))
    };
    let signed: [&[u8]; 2] = [b"\n", command.as_bytes()];
    let end = [&signature[..], &[b"", b"one", b""]].concat();
    let Ok(ParsedPush::Push(read)) = whole(&signed, &end) else {
        panic!("the push was not parsed");
    };
    assert_eq!(names(&read), ["refs/heads/signed"]);
    assert_eq!(read.head.options.len(), 2);

    let unsigned = self::command(ZERO, B, "refs/heads/other");
    let both = [&signature[..], &[unsigned.as_bytes(), b"", b""]].concat();
    assert_eq!(whole(&signed, &both), Err(PushParseError::Certificate));
    let cut = [&signature[..1], &[&b""[..]]].concat();
    assert_eq!(whole(&signed, &cut), Err(PushParseError::Certificate));
    let nul: [&[u8]; 2] = [b"\n", b"a\0b\n"];
    assert_eq!(whole(&nul, &end), Err(PushParseError::Certificate));
    let bare: [&[u8]; 2] = [b"\n", b"push-cert-end"];
    assert_eq!(whole(&bare, &end), Err(PushParseError::Certificate));
}

#[test]
fn ambiguous_push_is_refused() {
    let one = first_command(ZERO, B, "refs/heads/one", "report-status");
    let second = first_command(ZERO, B, "refs/heads/two", "push-options");
    let shallow = format!("shallow {A}");
    let check = |lines: &[&[u8]], expected: PushParseError| {
        assert_eq!(parse(&body(lines, &pack())), Err(expected), "{lines:?}");
    };
    check(
        &[one.as_bytes(), second.as_bytes(), b""],
        PushParseError::Capabilities,
    );
    check(
        &[one.as_bytes(), shallow.as_bytes(), b""],
        PushParseError::Shallow,
    );
    check(&[shallow.as_bytes(), b""], PushParseError::NoCommand);
    check(&[b"shallow 12", b""], PushParseError::Shallow);
    for (line, expected) in [
        (
            first_command(ZERO, B, "refs/heads/one", "a\0b"),
            PushParseError::Capabilities,
        ),
        (
            first_command(ZERO, B, "refs/heads/one", "a\tb"),
            PushParseError::Capabilities,
        ),
        (
            first_command(
                ZERO,
                B,
                "refs/heads/one",
                "object-format=sha1 object-format=sha1",
            ),
            PushParseError::Capabilities,
        ),
        (
            first_command(ZERO, B, "refs/heads/one", "object-format=md5"),
            PushParseError::Format,
        ),
        (first_command(ZERO, B, "HEAD", ""), PushParseError::Ref),
        (
            first_command(ZERO, B, "refs/heads/a b", ""),
            PushParseError::Ref,
        ),
        (
            first_command(ZERO, B, "refs/heads/../main", ""),
            PushParseError::Ref,
        ),
        (
            first_command("12", B, "refs/heads/one", ""),
            PushParseError::Command,
        ),
        (
            format!("{ZERO}  {B} refs/heads/one"),
            PushParseError::Command,
        ),
        (format!("{ZERO} {B}"), PushParseError::Command),
        ("x".to_owned(), PushParseError::Command),
    ] {
        check(&[line.as_bytes(), b""], expected);
    }
    let mut delimited = body(&[one.as_bytes()], b"0001");
    delimited.extend(pack());
    assert_eq!(parse(&delimited), Err(PushParseError::Version));
    for bad in [
        &b"PACK\0\0\0\x04xxxxxxxxxxxxxxxxxxxxxxxxxxxx"[..],
        b"KCAP",
        b"0000",
    ] {
        let bytes = body(&[one.as_bytes(), b""], bad);
        assert_eq!(parse(&bytes), Err(PushParseError::NotAPack));
    }
    for cut in [&b""[..], b"PA", b"PACK\0\0\0\x02", &pack()[..31]] {
        let bytes = body(&[one.as_bytes(), b""], cut);
        assert_eq!(parse(&bytes), Err(PushParseError::Incomplete));
    }
}

#[test]
fn part_before_the_pack_is_limited() {
    let one = first_command(ZERO, B, "refs/heads/one", "push-options");
    let option = [b'x'; 60_000];
    let mut lines: Vec<&[u8]> = vec![one.as_bytes(), b""];
    lines.extend(std::iter::repeat_n(&option[..], 100));
    assert_eq!(
        fuzz_check(&body(&lines, b""), 65_536),
        Err(PushParseError::HeadTooLarge)
    );
    let mut lines: Vec<&[u8]> = vec![one.as_bytes(), b""];
    lines.extend(std::iter::repeat_n(&b"x"[..], MAX_OPTIONS + 1));
    assert_eq!(
        parse(&body(&lines, b"")),
        Err(PushParseError::TooManyOptions)
    );
    let many: Vec<String> = (0..=MAX_COMMANDS)
        .map(|n| command(ZERO, B, &format!("refs/heads/{n}")))
        .collect();
    let lines: Vec<&[u8]> = many.iter().map(String::as_bytes).collect();
    assert_eq!(parse(&body(&lines, b"")), Err(PushParseError::HeadTooLarge));
}

fn bodies() -> impl Strategy<Value = Vec<u8>> {
    let id = prop_oneof![Just(A), Just(B), Just(ZERO)];
    let line = prop_oneof![
        4 => (id.clone(), id.clone(), "refs/heads/[a-z]{1,4}", prop::option::of("[a-z -]{0,20}"))
            .prop_map(|(old, new, name, caps)| match caps {
                Some(caps) => first_command(old, new, &name, &caps).into_bytes(),
                None => command(old, new, &name).into_bytes(),
            }),
        1 => id.prop_map(|id| format!("shallow {id}\n").into_bytes()),
        2 => Just(Vec::new()),
        1 => Just(first_command(ZERO, A, "refs/heads/o", "push-options").into_bytes()),
        1 => Just(b"push-cert\0report-status".to_vec()),
        1 => Just(b"push-cert-end\n".to_vec()),
        1 => proptest::collection::vec(any::<u8>(), 1..12),
    ];
    let tail = prop_oneof![
        3 => Just(pack()),
        1 => Just(Vec::new()),
        1 => proptest::collection::vec(any::<u8>(), 0..40),
    ];
    (proptest::collection::vec(line, 0..6), tail).prop_map(|(lines, tail)| {
        let lines: Vec<&[u8]> = lines.iter().map(Vec::as_slice).collect();
        body(&lines, &tail)
    })
}

proptest! {
    #[test]
    fn result_does_not_depend_on_chunk_boundaries(bytes in bodies(), piece in 1..64usize) {
        prop_assert_eq!(fuzz_check(&bytes, piece), fuzz_check(&bytes, usize::MAX));
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        prop_assert_eq!(fuzz_check(&bytes, 1), fuzz_check(&bytes, usize::MAX));
    }

    #[test]
    fn parsed_refs_match_the_written_commands(
        names in proptest::collection::btree_set("refs/(heads|tags)/[a-z]{1,8}", 1..5),
    ) {
        let names: Vec<String> = names.into_iter().collect();
        let commands: Vec<String> = names
            .iter()
            .enumerate()
            .map(|(n, name)| match n {
                0 => first_command(ZERO, A, name, CAPS),
                _ => command(A, B, name),
            })
            .collect();
        let mut lines: Vec<&[u8]> = commands.iter().map(String::as_bytes).collect();
        lines.push(b"");
        let read = push(&body(&lines, &pack()));
        prop_assert_eq!(self::names(&read), names);
    }
}
