//! Decoding of a file's bytes, and resolution of plain YAML scalars.

use serde_json::Number;

use super::{Content, Position};

/// The bytes as text, if every character is allowed in a YAML file (YAML 1.2.2, 5.1). The parser
/// treats a NUL as the end of the file, so the text after it would be ignored.
pub(super) fn printable(bytes: &[u8]) -> Result<&str, (Position, String)> {
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    let (valid, whole) = match std::str::from_utf8(bytes) {
        Ok(text) => (text, true),
        Err(error) => {
            let valid = bytes.split_at_checked(error.valid_up_to());
            let valid = valid.map_or(&b""[..], |(valid, _)| valid);
            (std::str::from_utf8(valid).unwrap_or_default(), false)
        }
    };
    let mut position = Position { line: 1, column: 1 };
    for c in valid.chars() {
        match c {
            '\n' => {
                position.line += 1;
                position.column = 1;
                continue;
            }
            '\t' | '\r' | '\u{85}' => {}
            c if c.is_control() || matches!(c, '\u{feff}' | '\u{fffe}' | '\u{ffff}') => {
                let code = u32::from(c);
                return Err((
                    position,
                    format!("the character U+{code:04X} is not allowed"),
                ));
            }
            _ => {}
        }
        position.column += 1;
    }
    if whole {
        Ok(valid)
    } else {
        Err((position, "not UTF-8 text".to_owned()))
    }
}

/// Resolves a plain scalar by the core schema: null, true, 80, 0x50, 1.5 or text. None for numbers
/// that JSON cannot represent.
pub(super) fn resolve(text: &str) -> Option<Content> {
    Some(match text {
        "" | "~" | "null" | "Null" | "NULL" => Content::Null,
        "true" | "True" | "TRUE" => Content::Bool(true),
        "false" | "False" | "FALSE" => Content::Bool(false),
        _ => match number(text) {
            Numeral::Number(number) => Content::Number(number),
            Numeral::NotFinite => return None,
            Numeral::Text => Content::Text(text.to_owned()),
        },
    })
}

enum Numeral {
    Number(Number),
    NotFinite,
    Text,
}

fn number(text: &str) -> Numeral {
    let unsigned = text.strip_prefix(['+', '-']).unwrap_or(text);
    if matches!(unsigned, ".inf" | ".Inf" | ".INF") || matches!(text, ".nan" | ".NaN" | ".NAN") {
        return Numeral::NotFinite;
    }
    let radix = |prefix, radix| {
        let digits: &str = text.strip_prefix(prefix)?;
        let clean = digits.bytes().all(|b| b.is_ascii_alphanumeric());
        clean.then(|| u64::from_str_radix(digits, radix).ok())?
    };
    if let Some(value) = radix("0x", 16).or_else(|| radix("0o", 8)) {
        return Numeral::Number(value.into());
    }
    let looks_numeric = unsigned
        .bytes()
        .next()
        .is_some_and(|b| b.is_ascii_digit() || b == b'.')
        && unsigned.bytes().any(|b| b.is_ascii_digit())
        && unsigned
            .bytes()
            .all(|b| b.is_ascii_digit() || matches!(b, b'.' | b'e' | b'E' | b'+' | b'-'));
    if !looks_numeric {
        return Numeral::Text;
    }
    let digits = text.strip_prefix('+').unwrap_or(text);
    if let Ok(value) = digits.parse::<i64>() {
        return Numeral::Number(value.into());
    }
    if let Ok(value) = digits.parse::<u64>() {
        return Numeral::Number(value.into());
    }
    match digits.parse::<f64>() {
        Ok(value) => as_integer(value)
            .map(Number::from)
            .or_else(|| Number::from_f64(value))
            .map_or(Numeral::NotFinite, Numeral::Number),
        Err(_) => Numeral::Text,
    }
}

/// `5.0` is the integer 5, as in JSON Schema, so that serde accepts it too.
#[expect(
    clippy::cast_possible_truncation,
    reason = "only whole values that a double holds exactly get there"
)]
fn as_integer(value: f64) -> Option<i64> {
    // 2^53: a double represents every whole number below it exactly.
    const MAX_EXACT: f64 = 9_007_199_254_740_992.0;
    (value.fract() == 0.0 && value.abs() < MAX_EXACT).then_some(value as i64)
}
