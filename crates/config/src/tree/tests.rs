use super::*;

fn parse(yaml: &str) -> Result<Tree, String> {
    let mut problems = Vec::new();
    let tree = Tree::parse(Path::new("f"), yaml.as_bytes(), &mut problems);
    match (tree, problems.as_slice()) {
        (Some(tree), []) => Ok(tree),
        (_, problems) => Err(problems
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>()
            .join("\n")),
    }
}

fn assert_refused(yaml: &str, expected: &str) {
    assert_eq!(parse(yaml).unwrap_err(), expected, "{yaml}");
}

#[test]
fn scalars_resolve_by_the_core_schema() {
    let tree = parse(
        "a: 80\nb: 0x10\nc: 1.50\nd: 2.0\ne: yes\nf: ~\ng: '80'\nh: 1e3\ni: -7\nj: 10s\nk: 1.2.3.4\nl: 18446744073709551615\nm: !!str 80\nn: true\n",
    )
    .unwrap();
    let kind = |key: &str| match &tree.get(key).unwrap().content {
        Content::Null => "null".to_owned(),
        Content::Bool(b) => b.to_string(),
        Content::Number(n) => n.to_string(),
        Content::Text(t) => format!("'{t}'"),
        other => format!("{other:?}"),
    };
    for (key, expected) in [
        ("/a", "80"),
        ("/b", "16"),
        ("/c", "1.5"),
        ("/d", "2"),
        ("/e", "'yes'"),
        ("/f", "null"),
        ("/g", "'80'"),
        ("/h", "1000"),
        ("/i", "-7"),
        ("/j", "'10s'"),
        ("/k", "'1.2.3.4'"),
        ("/l", "18446744073709551615"),
        ("/m", "'80'"),
        ("/n", "true"),
    ] {
        assert_eq!(kind(key), expected, "{key}");
    }
}

#[test]
fn every_value_and_key_has_its_position() {
    let tree = parse("a:\n  b: [1, two]\n  ~k/: 3\n").unwrap();
    assert_eq!(
        tree.position("/a/b/1"),
        Position {
            line: 2,
            column: 10
        }
    );
    assert_eq!(
        tree.key_position("/a", "b"),
        Position { line: 2, column: 3 }
    );
    assert_eq!(
        tree.position(&join("/a", "~k/")),
        Position { line: 3, column: 8 }
    );
    assert_eq!(tree.position("/a/b/9/x"), Position { line: 2, column: 6 });
    assert_eq!(dotted("/egress/domains/2/host"), "egress.domains[2].host");
}

#[test]
fn alias_has_the_value_of_its_anchor() {
    let tree = parse("a: &x {k: v}\nb: *x\n").unwrap();
    assert_eq!(tree.get("/b/k").unwrap().text(), Some("v"));
    assert_eq!(tree.position("/b").line, 2);
}

#[test]
fn input_on_which_yaml_parsers_differ_is_refused() {
    assert_refused(
        "a: 1\nb: 2\na: 3\n",
        "f:3:1: the key 'a' is already on line 1",
    );
    assert_refused("1: x\n", "f:1:1: a key must be text; put it in quotes");
    assert_refused(
        "? [a]\n: x\n",
        "f:1:3: a key must be text; put it in quotes",
    );
    assert_refused(
        "a: 1\n---\nb: 2\n",
        "f:2:1: a second document begins here; a file must contain one document",
    );
    assert_refused("a: !thing x\n", "f:1:4: the tag '!thing' is not supported");
    assert_refused(
        "a: !!binary x\n",
        "f:1:4: the tag '!!binary' is not supported",
    );
    assert_refused("a: !!int x\n", "f:1:4: this text does not match its tag");
    assert_refused("a: .inf\n", "f:1:4: '.inf' is not a supported number");
    assert_refused("a: &x [*x]\n", "f:1:8: this alias is inside its own anchor");
}

#[test]
fn syntax_errors_are_reported_with_their_position() {
    for (yaml, start) in [
        ("a: [1, 2\nb: 3\n", "f:2:"),
        ("a: b: c\n", "f:1:"),
        ("a:\n\tb: 1\n", "f:2:"),
        ("a: *nope\n", "f:1:4: not YAML:"),
        ("a: 'x\n", "f:"),
        ("a: {b: ${X}}\n", "f:1:"),
    ] {
        let problems = parse(yaml).unwrap_err();
        assert!(problems.starts_with(start), "{yaml}: {problems}");
    }
    assert!(
        parse("a: {b: ${X}}\n")
            .unwrap_err()
            .ends_with("put quotes around ${…}")
    );
    assert_refused("a: x\0y: z\n", "f:1:5: the character U+0000 is not allowed");
    let mut problems = Vec::new();
    assert!(Tree::parse(Path::new("f"), b"a: 1\nb: \xff\n", &mut problems).is_none());
    assert_eq!(problems[0].to_string(), "f:2:4: not UTF-8 text");
}

#[test]
fn files_beyond_depth_or_size_limits_are_refused() {
    let deep = format!("a: {}{}", "[".repeat(70), "]".repeat(70));
    assert_refused(&deep, "f:1:68: nested deeper than 64 levels");
    let very_deep = "[".repeat(200_000);
    assert!(parse(&very_deep).is_err());

    let mut bomb = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
    for level in 1..12 {
        let before = level - 1;
        let aliases = vec![format!("*a{before}"); 10].join(", ");
        bomb.push_str(&format!("a{level}: &a{level} [{aliases}]\n"));
    }
    let problems = parse(&bomb).unwrap_err();
    assert!(
        problems.ends_with("more than 100000 values with aliases expanded"),
        "{problems}"
    );

    let long = format!(
        "a: &a {}\nb: [{}]\n",
        "x".repeat(1 << 20),
        vec!["*a"; 100].join(", ")
    );
    let problems = parse(&long).unwrap_err();
    assert!(
        problems.ends_with("bytes of text with aliases expanded"),
        "{problems}"
    );
}

#[test]
fn empty_file_parses_to_null() {
    for yaml in ["", "# only a comment\n", "---\n", "\u{feff}"] {
        assert!(
            matches!(parse(yaml).unwrap().root.content, Content::Null),
            "{yaml:?}"
        );
    }
}
