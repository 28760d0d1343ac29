use proptest::prelude::*;

use super::*;

const A: &str = "1111111111111111111111111111111111111111";
const B: &str = "2222222222222222222222222222222222222222";
const ZERO: &str = "0000000000000000000000000000000000000000";
const CAPS: &str = " report-status-v2 side-band-64k object-format=sha1 agent=git/2.47";

/// The bytes of a body: `|` ends a line, `.` is a flush.
fn body(lines: &[&[u8]], pack: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for data in lines {
        if data.is_empty() {
            line::flush(&mut bytes);
        } else {
            line::write(&mut bytes, data);
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

fn first(old: &str, new: &str, name: &str, caps: &str) -> String {
    format!("{old} {new} {name}\0{caps}")
}

fn parse(bytes: &[u8]) -> Result<Parsed, Malformed> {
    exercise(bytes, usize::MAX)
}

fn push(bytes: &[u8]) -> Push {
    match parse(bytes) {
        Ok(Parsed::Push(push)) => push,
        other => panic!("{other:?}"),
    }
}

fn names(push: &Push) -> Vec<String> {
    let updates = push.head.updates.iter();
    updates.map(|update| update.name.to_string()).collect()
}

#[test]
fn a_probe_is_four_zeros_and_nothing_else() {
    assert_eq!(parse(b"0000"), Ok(Parsed::Probe));
    assert_eq!(parse(b"00000000"), Err(Malformed::Empty));
    assert_eq!(parse(b"0000PACK"), Err(Malformed::Empty));
    assert_eq!(parse(b""), Err(Malformed::Cut));
    assert_eq!(parse(b"00"), Err(Malformed::Cut));
}

#[test]
fn commands_capabilities_and_the_place_of_the_pack_are_read() {
    let one = first(A, B, "refs/heads/one", &format!("{CAPS} atomic"));
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
fn options_come_after_the_commands_where_they_were_announced() {
    let one = first(ZERO, B, "refs/heads/one", "report-status push-options");
    let lines: [&[u8]; 5] = [one.as_bytes(), b"", b"ci.skip\n", b"\xff x", b""];
    let push = push(&body(&lines, &pack()));
    assert_eq!(push.head.options, [b"ci.skip".to_vec(), b"\xff x".to_vec()]);
    // Git takes the word with a value for the word.
    let one = first(ZERO, B, "refs/heads/one", "push-options=1");
    assert_eq!(
        parse(&body(&[one.as_bytes(), b""], &pack())),
        Err(Malformed::Line(line::BadLine))
    );
}

#[test]
fn deletions_alone_come_without_a_pack() {
    let one = first(A, ZERO, "refs/heads/one", CAPS);
    let alone = body(&[one.as_bytes(), b""], b"");
    assert_eq!(push(&alone).pack, None);
    let with = body(&[one.as_bytes(), b""], &pack());
    assert_eq!(parse(&with), Err(Malformed::Pack));
    let two = command(ZERO, A, "refs/heads/two");
    let mixed = body(&[one.as_bytes(), two.as_bytes(), b""], &pack());
    assert_eq!(push(&mixed).head.updates.len(), 2);
}

#[test]
fn longer_ids_are_another_format() {
    let (a, zero) = ("3".repeat(64), "0".repeat(64));
    let caps = "report-status object-format=sha256";
    let one = first(&zero, &a, "refs/heads/one", caps);
    let shallow = format!("shallow {a}");
    let lines: [&[u8]; 3] = [shallow.as_bytes(), one.as_bytes(), b""];
    let long = push(&body(&lines, &pack()));
    assert_eq!(long.head.format, ObjectFormat::Sha256);

    let mixed = command(ZERO, B, "refs/heads/two");
    let lines: [&[u8]; 3] = [one.as_bytes(), mixed.as_bytes(), b""];
    assert_eq!(parse(&body(&lines, &pack())), Err(Malformed::Format));
    let wrong = first(ZERO, A, "refs/heads/one", caps);
    assert_eq!(
        parse(&body(&[wrong.as_bytes(), b""], &pack())),
        Err(Malformed::Format)
    );
}

#[test]
fn a_certificate_holds_the_commands() {
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
    let Ok(Parsed::Push(read)) = whole(&signed, &end) else {
        panic!("not read");
    };
    assert_eq!(names(&read), ["refs/heads/signed"]);
    assert_eq!(read.head.options.len(), 2);

    let unsigned = self::command(ZERO, B, "refs/heads/other");
    let both = [&signature[..], &[unsigned.as_bytes(), b"", b""]].concat();
    assert_eq!(whole(&signed, &both), Err(Malformed::Certificate));
    let cut = [&signature[..1], &[&b""[..]]].concat();
    assert_eq!(whole(&signed, &cut), Err(Malformed::Certificate));
    let nul: [&[u8]; 2] = [b"\n", b"a\0b\n"];
    assert_eq!(whole(&nul, &end), Err(Malformed::Certificate));
    let bare: [&[u8]; 2] = [b"\n", b"push-cert-end"];
    assert_eq!(whole(&bare, &end), Err(Malformed::Certificate));
}

#[test]
fn what_a_server_could_read_differently_is_malformed() {
    let one = first(ZERO, B, "refs/heads/one", "report-status");
    let second = first(ZERO, B, "refs/heads/two", "push-options");
    let shallow = format!("shallow {A}");
    let check = |lines: &[&[u8]], expected: Malformed| {
        assert_eq!(parse(&body(lines, &pack())), Err(expected), "{lines:?}");
    };
    check(
        &[one.as_bytes(), second.as_bytes(), b""],
        Malformed::Capabilities,
    );
    check(
        &[one.as_bytes(), shallow.as_bytes(), b""],
        Malformed::Shallow,
    );
    check(&[shallow.as_bytes(), b""], Malformed::Empty);
    check(&[b"shallow 12", b""], Malformed::Shallow);
    for (line, expected) in [
        (
            first(ZERO, B, "refs/heads/one", "a\0b"),
            Malformed::Capabilities,
        ),
        (
            first(ZERO, B, "refs/heads/one", "a\tb"),
            Malformed::Capabilities,
        ),
        (
            first(
                ZERO,
                B,
                "refs/heads/one",
                "object-format=sha1 object-format=sha1",
            ),
            Malformed::Capabilities,
        ),
        (
            first(ZERO, B, "refs/heads/one", "object-format=md5"),
            Malformed::Format,
        ),
        (first(ZERO, B, "HEAD", ""), Malformed::Ref),
        (first(ZERO, B, "refs/heads/a b", ""), Malformed::Ref),
        (first(ZERO, B, "refs/heads/../main", ""), Malformed::Ref),
        (first("12", B, "refs/heads/one", ""), Malformed::Command),
        (format!("{ZERO}  {B} refs/heads/one"), Malformed::Command),
        (format!("{ZERO} {B}"), Malformed::Command),
        ("x".to_owned(), Malformed::Command),
    ] {
        check(&[line.as_bytes(), b""], expected);
    }
    let mut delimited = body(&[one.as_bytes()], b"0001");
    delimited.extend(pack());
    assert_eq!(parse(&delimited), Err(Malformed::Version));
    for bad in [
        &b"PACK\0\0\0\x04xxxxxxxxxxxxxxxxxxxxxxxxxxxx"[..],
        b"KCAP",
        b"0000",
    ] {
        let bytes = body(&[one.as_bytes(), b""], bad);
        assert_eq!(parse(&bytes), Err(Malformed::Pack));
    }
    for cut in [&b""[..], b"PA", b"PACK\0\0\0\x02", &pack()[..31]] {
        let bytes = body(&[one.as_bytes(), b""], cut);
        assert_eq!(parse(&bytes), Err(Malformed::Cut));
    }
}

#[test]
fn what_comes_before_the_pack_is_bounded() {
    let one = first(ZERO, B, "refs/heads/one", "push-options");
    let option = [b'x'; 60_000];
    let mut lines: Vec<&[u8]> = vec![one.as_bytes(), b""];
    lines.extend(std::iter::repeat_n(&option[..], 100));
    assert_eq!(exercise(&body(&lines, b""), 65_536), Err(Malformed::Head));
    let mut lines: Vec<&[u8]> = vec![one.as_bytes(), b""];
    lines.extend(std::iter::repeat_n(&b"x"[..], MOST_OPTIONS + 1));
    assert_eq!(parse(&body(&lines, b"")), Err(Malformed::Options));
    let many: Vec<String> = (0..=MOST_COMMANDS)
        .map(|n| command(ZERO, B, &format!("refs/heads/{n}")))
        .collect();
    let lines: Vec<&[u8]> = many.iter().map(String::as_bytes).collect();
    assert_eq!(parse(&body(&lines, b"")), Err(Malformed::Head));
}

fn bodies() -> impl Strategy<Value = Vec<u8>> {
    let id = prop_oneof![Just(A), Just(B), Just(ZERO)];
    let line = prop_oneof![
        4 => (id.clone(), id.clone(), "refs/heads/[a-z]{1,4}", prop::option::of("[a-z -]{0,20}"))
            .prop_map(|(old, new, name, caps)| match caps {
                Some(caps) => first(old, new, &name, &caps).into_bytes(),
                None => command(old, new, &name).into_bytes(),
            }),
        1 => id.prop_map(|id| format!("shallow {id}\n").into_bytes()),
        2 => Just(Vec::new()),
        1 => Just(first(ZERO, A, "refs/heads/o", "push-options").into_bytes()),
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
    fn however_a_body_is_split_the_same_is_read(bytes in bodies(), piece in 1..64usize) {
        prop_assert_eq!(exercise(&bytes, piece), exercise(&bytes, usize::MAX));
    }

    #[test]
    fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        prop_assert_eq!(exercise(&bytes, 1), exercise(&bytes, usize::MAX));
    }

    #[test]
    fn what_is_read_is_what_was_written(
        names in proptest::collection::btree_set("refs/(heads|tags)/[a-z]{1,8}", 1..5),
    ) {
        let names: Vec<String> = names.into_iter().collect();
        let commands: Vec<String> = names
            .iter()
            .enumerate()
            .map(|(n, name)| match n {
                0 => first(ZERO, A, name, CAPS),
                _ => command(A, B, name),
            })
            .collect();
        let mut lines: Vec<&[u8]> = commands.iter().map(String::as_bytes).collect();
        lines.push(b"");
        let read = push(&body(&lines, &pack()));
        prop_assert_eq!(self::names(&read), names);
    }
}
