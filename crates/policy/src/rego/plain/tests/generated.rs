//! Generated policies and inputs.

use proptest::prelude::*;

use super::*;

/// Random bytes, each of which makes one choice of the generator.
struct Choices<'a>(std::slice::Iter<'a, u8>);

impl Choices<'_> {
    fn number_below(&mut self, limit: usize) -> usize {
        self.0.next().map_or(0, |byte| usize::from(*byte) % limit)
    }

    fn pick<T: Copy>(&mut self, options: &[T]) -> T {
        options[self.number_below(options.len())]
    }

    /// True with a probability of one in `times`.
    fn one_in(&mut self, times: usize) -> bool {
        self.number_below(times) == times - 1
    }
}

const CONSTANTS: [&str; 19] = [
    "1",
    "0",
    "\"a\"",
    "\"b\"",
    "true",
    "false",
    "\"\"",
    "null",
    "2.5",
    "-1",
    "[1, \"a\"]",
    "{\"k\": 1}",
    "{1, \"a\"}",
    "[]",
    "9007199254740993",
    "1e300",
    "\"/admin\"",
    "set()",
    "`a`",
];

const REFERENCES: [&str; 12] = [
    "input.a",
    "input.b",
    "input.xs",
    "input.o",
    "input.o.k",
    "input.xs[0]",
    "input[\"a\"]",
    "input.none",
    "data.list",
    "data.o.k",
    "data.none.x",
    "input",
];

const FUNCTIONS: [(&str, usize); 26] = [
    ("startswith", 2),
    ("contains", 2),
    ("count", 1),
    ("lower", 1),
    ("to_number", 1),
    ("concat", 2),
    ("split", 2),
    ("sprintf", 2),
    ("object.get", 3),
    ("max", 1),
    ("sum", 1),
    ("glob.match", 3),
    ("regex.match", 2),
    ("json.unmarshal", 1),
    ("array.slice", 3),
    ("is_string", 1),
    ("type_name", 1),
    ("abs", 1),
    ("trim", 2),
    ("indexof", 2),
    ("json.marshal", 1),
    ("replace", 3),
    ("sort", 1),
    ("format_int", 2),
    ("f", 1),
    ("g", 2),
];

/// A rule's body under construction.
struct Writer<'a, 'b> {
    choices: &'a mut Choices<'b>,
    locals: Vec<String>,
    /// The rules that the body may refer to.
    rules: &'a [&'static str],
    /// Whether the body may call functions of the policy.
    calls: bool,
}

impl Writer<'_, '_> {
    fn expr(&mut self, depth: usize) -> String {
        let kind = if depth == 0 {
            self.choices.number_below(4)
        } else {
            self.choices.number_below(12)
        };
        match kind {
            0 => self.choices.pick(&CONSTANTS).to_owned(),
            1 if !self.locals.is_empty() => {
                let index = self.choices.number_below(self.locals.len());
                self.locals[index].clone()
            }
            2 if !self.rules.is_empty() => {
                let rule = self.choices.pick(self.rules);
                match self.choices.number_below(8) {
                    0 => format!("data.http.authz.{rule}"),
                    1 => format!("{rule}.k"),
                    2 => format!("{rule}[0]"),
                    _ => rule.to_owned(),
                }
            }
            1..=3 => self.choices.pick(&REFERENCES).to_owned(),
            4 | 5 => {
                let operation = self
                    .choices
                    .pick(&["==", "!=", "<", "<=", ">", ">=", "==", "in"]);
                let (one, other) = (self.expr(depth - 1), self.expr(depth - 1));
                format!("({one} {operation} {other})")
            }
            6 => {
                let operation = self.choices.pick(&["+", "-", "*", "/", "%"]);
                let (one, other) = (self.expr(depth - 1), self.expr(depth - 1));
                format!("({one} {operation} {other})")
            }
            7 => {
                let (one, other) = (self.expr(depth - 1), self.expr(depth - 1));
                match self.choices.number_below(3) {
                    0 => format!("[{one}, {other}]"),
                    1 => format!("{{\"k\": {one}, \"l\": {other}}}"),
                    _ => format!("{{{one}, {other}}}"),
                }
            }
            8 if self.choices.one_in(4) => {
                let (term, of) = (self.expr(0), self.expr(depth - 1));
                format!("[{term} | some c in {of}; c != {term}]")
            }
            _ => {
                let known = FUNCTIONS.len() - if self.calls { 0 } else { 2 };
                let (name, arity) = self.choices.pick(&FUNCTIONS[..known]);
                let args: Vec<_> = (0..arity).map(|_| self.expr(depth - 1)).collect();
                let is_own = matches!(name, "f" | "g") && self.choices.one_in(3);
                let package = if is_own { "data.http.authz." } else { "" };
                format!("{package}{name}({})", args.join(", "))
            }
        }
    }

    fn body(&mut self) -> String {
        let mut statements = Vec::new();
        for _ in 0..=self.choices.number_below(3) {
            let name = format!("v{}", self.locals.len());
            statements.push(match self.choices.number_below(8) {
                0 | 1 => {
                    let value = self.expr(2);
                    self.locals.push(name.clone());
                    format!("{name} := {value}")
                }
                2 => {
                    let of = self.expr(1);
                    self.locals.push(name.clone());
                    match self.choices.number_below(4) {
                        0 => format!("some _, {name} in {of}"),
                        1 => format!("some {name}, _ in {of}"),
                        _ => format!("some {name} in {of}"),
                    }
                }
                3 => {
                    let of = self.expr(1);
                    let key = format!("k{}", self.locals.len());
                    self.locals.extend([key.clone(), name.clone()]);
                    format!("some {key}, {name} in {of}")
                }
                4 | 5 => format!("not {}", self.expr(2)),
                _ => self.expr(2),
            });
        }
        // Source order is not evaluation order.
        if self.choices.one_in(8) {
            statements.reverse();
        }
        statements.join("; ")
    }
}

/// A policy in which `allow` may use `r`, `s` and `t`, each of them those after it, and all may
/// call the functions `f` and `g`.
fn policy(choices: &mut Choices<'_>) -> String {
    let mut text = String::new();
    let mut rule =
        |text: &mut String, name: &str, arguments: &[&str], rules: &[&'static str], calls: bool| {
            let is_function = !arguments.is_empty();
            let head = if is_function {
                format!("{name}({})", arguments.join(", "))
            } else {
                name.to_owned()
            };
            let is_set = !is_function && name != "allow" && choices.one_in(4);
            let constant = choices.pick(&["true", "false", "1", "\"a\""]);
            if !is_function && !is_set && choices.number_below(3) > 0 {
                let default = choices.pick(&["true", "false", "true"]);
                text.push_str(&format!("default {name} := {default}\n"));
            }
            for _ in 0..=choices.number_below(3) {
                let mut writer = Writer {
                    locals: arguments.iter().map(|name| (*name).to_owned()).collect(),
                    choices: &mut *choices,
                    rules,
                    calls,
                };
                let body = writer.body();
                let head = if is_set {
                    format!("{head} contains {}", writer.expr(0))
                } else if writer.choices.one_in(4) {
                    format!("{head} := {}", writer.expr(1))
                } else {
                    format!("{head} := {constant}")
                };
                let tail = if writer.choices.one_in(24) {
                    " else := true"
                } else {
                    ""
                };
                text.push_str(&format!("{head} if {{ {body} }}{tail}\n"));
            }
        };
    rule(&mut text, "allow", &[], &["r", "s", "t"], true);
    rule(&mut text, "r", &[], &["s", "t"], true);
    rule(&mut text, "s", &[], &["t"], true);
    rule(&mut text, "t", &[], &[], true);
    rule(&mut text, "f", &["x"], &[], false);
    rule(&mut text, "g", &["x", "y"], &[], false);
    text
}

fn json(choices: &mut Choices<'_>, depth: usize) -> Value {
    match choices.number_below(if depth == 0 { 7 } else { 11 }) {
        0 => json!("a"),
        1 => json!(1),
        2 => json!(true),
        3 => json!(false),
        4 => choices.pick(&["", "/admin", "b", "a/b"]).into(),
        5 => Value::Null,
        6 => match choices.number_below(4) {
            0 => json!(0),
            1 => json!(-2.5),
            2 => json!(u64::MAX),
            _ => json!(1e308),
        },
        7 | 8 => (0..choices.number_below(3))
            .map(|_| json(choices, depth - 1))
            .collect(),
        _ => json!({"k": json(choices, depth - 1), "a": json(choices, depth - 1)}),
    }
}

fn input(choices: &mut Choices<'_>) -> Value {
    let mut fields = serde_json::Map::new();
    for name in ["a", "b", "xs", "o"] {
        if !choices.one_in(6) {
            fields.insert(name.to_owned(), json(choices, 2));
        }
    }
    Value::Object(fields)
}

/// Generates one policy and compares it for some inputs.
fn generate_and_compare(bytes: &[u8]) -> Option<(bool, Vec<Comparison>)> {
    let mut choices = Choices(bytes.iter());
    let text = policy(&mut choices);
    let bundle = compile(&text, &json!({"list": ["a", 1], "o": {"k": "a"}}))?;
    let inputs = (0..8).map(|_| input(&mut choices));
    let compared = inputs.map(|input| compare(&bundle, &input, &text));
    Some((bundle.is_plain, compared.collect()))
}

proptest! {
    #[test]
    fn generated_policy_allows_only_what_interpreter_allows(
        bytes in prop::collection::vec(any::<u8>(), 600),
    ) {
        generate_and_compare(&bytes);
    }
}

/// Checks that enough generated policies are plain for the comparison above to be meaningful.
#[test]
fn enough_generated_policies_are_plain() {
    let mut state = 1_u32;
    let mut bytes = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    let (mut compiled, mut plain, mut allowed, mut denied) = (0, 0, 0, 0);
    for _ in 0..200 {
        let bytes: Vec<u8> = (0..600).map(|_| bytes()).collect();
        let Some((is_plain, compared)) = generate_and_compare(&bytes) else {
            continue;
        };
        compiled += 1;
        plain += usize::from(is_plain);
        let count = |wanted: Comparison| compared.iter().filter(|one| **one == wanted).count();
        allowed += count(Comparison::Allowed);
        denied += count(Comparison::Denied);
    }
    let counts = format!("{compiled} compiled, {plain} plain, {allowed} allowed, {denied} denied");
    println!("{counts}");
    assert!(
        compiled > 100 && plain > 30 && allowed > 20 && denied > 20,
        "{counts}"
    );
}
