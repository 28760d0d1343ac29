//! Rust source as text: its comments, its string literals, its log calls.

/// The source text before the tests, which are at the end of a file.
pub fn without_tests(text: &str) -> &str {
    text.split("#[cfg(test)]").next().unwrap_or_default()
}

/// Every comment, with the number of its line.
pub fn comments(text: &str) -> Vec<(usize, String)> {
    let lines = text.lines().enumerate();
    let comment = |line: &str| Some(line.trim_start().strip_prefix("//")?.to_owned());
    lines
        .filter_map(|(number, line)| Some((number + 1, comment(line)?)))
        .collect()
}

/// Every string literal outside comments, with the number of the line it begins in.
pub fn messages(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut line = 1;
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        if rest.starts_with("//") {
            rest = rest
                .find('\n')
                .and_then(|at| rest.get(at..))
                .unwrap_or_default();
            continue;
        }
        let length = match c {
            '"' => {
                let (content, length) = string(rest);
                found.push((line, content));
                length
            }
            // The character literal '"' starts no string.
            '\'' if rest.starts_with("'\"'") => 3,
            'r' if rest.starts_with("r#\"") => {
                let end = rest.find("\"#").map_or(rest.len(), |at| at + 2);
                let content = rest.get(3..end.saturating_sub(2)).unwrap_or_default();
                found.push((line, content.to_owned()));
                end
            }
            _ => c.len_utf8(),
        };
        let (passed, next) = rest.split_at(length.min(rest.len()));
        line += passed.matches('\n').count();
        rest = next;
    }
    found
}

/// The content of the string literal at the start of `text`, and how long the literal is.
fn string(text: &str) -> (String, usize) {
    let mut content = String::new();
    let mut chars = text.char_indices().skip(1).peekable();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return (content, at + 1),
            '\\' => match chars.next() {
                // A continued line starts after its indentation.
                Some((_, '\n')) => while chars.next_if(|(_, c)| c.is_whitespace()).is_some() {},
                Some((_, escaped)) => content.push(escaped),
                None => {}
            },
            _ => content.push(c),
        }
    }
    (content, text.len())
}

/// A call of a `tracing` macro.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LogCall {
    /// The level.
    pub level: &'static str,
    /// The constant message.
    pub message: String,
    /// The names of its fields, sorted.
    pub fields: Vec<String>,
}

/// Every log call of a source text.
pub fn log_calls(text: &str) -> Vec<LogCall> {
    let code: String = text
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"))
        .map(|line| format!("{line}\n"))
        .collect();
    let mut calls = Vec::new();
    for level in ["error", "warn", "info", "debug", "trace"] {
        let start = format!("tracing::{level}!(");
        for (at, _) in code.match_indices(&start) {
            let arguments = arguments(code.get(at + start.len()..).unwrap_or_default());
            let message = arguments
                .iter()
                .rev()
                .find(|argument| argument.starts_with('"'));
            let message = message
                .map(|argument| string(argument).0)
                .unwrap_or_default();
            let mut fields: Vec<String> = arguments
                .iter()
                .filter(|argument| !argument.starts_with('"'))
                .map(|argument| field_name(argument))
                .collect();
            fields.sort();
            calls.push(LogCall {
                level,
                message,
                fields,
            });
        }
    }
    calls
}

fn field_name(argument: &str) -> String {
    let name = argument.split('=').next().unwrap_or_default().trim();
    name.trim_start_matches(['%', '?']).to_owned()
}

/// The arguments of a call; `text` starts after the opening parenthesis.
fn arguments(text: &str) -> Vec<String> {
    let mut arguments = vec![String::new()];
    let (mut depth, mut rest) = (0_usize, text);
    while let Some(c) = rest.chars().next() {
        let length = match c {
            '"' => string(rest).1,
            ')' | ']' | '}' if depth == 0 => break,
            ')' | ']' | '}' => {
                depth -= 1;
                1
            }
            '(' | '[' | '{' => {
                depth += 1;
                1
            }
            ',' if depth == 0 => {
                arguments.push(String::new());
                rest = rest.get(1..).unwrap_or_default();
                continue;
            }
            _ => c.len_utf8(),
        };
        if let Some(last) = arguments.last_mut() {
            last.push_str(rest.get(..length).unwrap_or_default());
        }
        rest = rest.get(length..).unwrap_or_default();
    }
    let trimmed = arguments.iter().map(|argument| argument.trim().to_owned());
    trimmed.filter(|argument| !argument.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_calls_are_read_with_level_message_and_fields() {
        let code = "tracing::warn!(sandbox = %id, %error, (a, b).0, \"circuit \\\n    breaker opened\");\n// tracing::info!(\"no\");\ntracing::info!(\"stopping\");";
        let calls = log_calls(code);
        let [warn, info] = calls.as_slice() else {
            panic!("{calls:?}");
        };
        assert_eq!(
            (warn.level, warn.message.as_str()),
            ("warn", "circuit breaker opened")
        );
        assert_eq!(warn.fields, ["(a, b).0", "error", "sandbox"]);
        assert_eq!((info.level, info.fields.len()), ("info", 0));
    }

    #[test]
    fn literals_are_found_outside_comments() {
        let text = "// \"no\"\nlet a = \"one\";\nlet b = '\"';\nlet c = r#\"two \"x\" \"#;\n";
        let found: Vec<String> = messages(text).into_iter().map(|(_, text)| text).collect();
        assert_eq!(found, ["one", "two \"x\" "]);
        assert_eq!(comments("  // a\nb // c\n"), [(1, " a".to_owned())]);
    }
}
