//! Adds one entry to another program's configuration file, and changes nothing else.

use jsonc_parser::ParseOptions;
use jsonc_parser::cst::{CstInputValue, CstRootNode};
use serde_json::{Map, Value};
use toml_edit::{Array, DocumentMut, Item, Table, value};

/// The syntax that clients accept: JSON with comments and trailing commas.
const OPTIONS: ParseOptions = ParseOptions {
    allow_comments: true,
    allow_loose_object_property_names: false,
    allow_trailing_commas: true,
    allow_missing_commas: false,
    allow_single_quoted_strings: false,
    allow_hexadecimal_numbers: false,
    allow_unary_plus_numbers: false,
    allow_bare_decimal_point_numbers: false,
    allow_non_finite_numbers: false,
    allow_extended_string_escapes: false,
};

/// Adds an entry to JSON, with or without comments.
pub fn json(text: &str, path: &[&str; 2], entry: &Value) -> Result<String, String> {
    let [section, name] = path;
    let old = parse(text)?;
    let mut wanted = old.to_serde_value().unwrap_or(Value::Object(Map::new()));
    let not_an_object = || "not a JSON object".to_owned();
    let servers = wanted
        .as_object_mut()
        .ok_or_else(not_an_object)?
        .entry(*section)
        .or_insert_with(|| Value::Object(Map::new()))
        .as_object_mut()
        .ok_or_else(|| format!("'{section}' is not an object"))?;
    if servers.get(*name) == Some(entry) {
        return Ok(text.to_owned());
    }
    servers.insert((*name).to_owned(), entry.clone());
    let servers = old
        .object_value_or_create()
        .ok_or_else(not_an_object)?
        .object_value_or_create(section)
        .ok_or_else(|| format!("'{section}' is not an object"))?;
    match servers.get(name) {
        Some(existing) => existing.set_value(to_cst(entry)),
        None => drop(servers.append(name, to_cst(entry))),
    }
    let mut new = old.to_string();
    if !new.ends_with('\n') && (text.is_empty() || text.ends_with('\n')) {
        new.push('\n');
    }
    // Checks the result of the text edit: nothing but the entry may differ.
    match parse(&new)?.to_serde_value() {
        Some(value) if value == wanted => Ok(new),
        _ => Err("a key occurs twice, so the file cannot be changed safely".to_owned()),
    }
}

fn parse(text: &str) -> Result<CstRootNode, String> {
    CstRootNode::parse(text, &OPTIONS).map_err(|error| format!("invalid JSON: {error}"))
}

fn to_cst(value: &Value) -> CstInputValue {
    match value {
        Value::Null => CstInputValue::Null,
        Value::Bool(flag) => CstInputValue::Bool(*flag),
        Value::Number(number) => CstInputValue::Number(number.to_string()),
        Value::String(text) => CstInputValue::String(text.clone()),
        Value::Array(items) => CstInputValue::Array(items.iter().map(to_cst).collect()),
        Value::Object(fields) => CstInputValue::Object(
            fields
                .iter()
                .map(|(name, value)| (name.clone(), to_cst(value)))
                .collect(),
        ),
    }
}

/// Adds an entry to TOML.
pub fn toml(
    text: &str,
    path: &[&str; 2],
    command: &str,
    arguments: &[String],
    timeout: i64,
) -> Result<String, String> {
    let [section, name] = path;
    let mut document: DocumentMut = text
        .parse()
        .map_err(|error: toml_edit::TomlError| format!("invalid TOML: {}", error.message()))?;
    let servers = document
        .entry(section)
        .or_insert_with(|| {
            let mut table = Table::new();
            // Implicit: only the headers of its subtables are written.
            table.set_implicit(true);
            Item::Table(table)
        })
        .as_table_mut()
        .ok_or_else(|| format!("'{section}' is not a table"))?;
    let server = servers
        .entry(name)
        .or_insert_with(|| Item::Table(Table::new()))
        .as_table_mut()
        .ok_or_else(|| format!("'{section}.{name}' is not a table"))?;
    let is_present = server.get("command").and_then(Item::as_str) == Some(command)
        && server
            .get("args")
            .and_then(Item::as_array)
            .is_some_and(|existing| {
                let existing: Vec<_> = existing.iter().map(|item| item.as_str()).collect();
                existing
                    == arguments
                        .iter()
                        .map(|argument| Some(argument.as_str()))
                        .collect::<Vec<_>>()
            });
    if is_present {
        return Ok(text.to_owned());
    }
    server.insert("command", value(command));
    let words: Array = arguments.iter().map(String::as_str).collect();
    server.insert("args", value(words));
    // The operator may have chosen another timeout.
    if !server.contains_key("tool_timeout_sec") {
        server.insert("tool_timeout_sec", value(timeout));
    }
    Ok(document.to_string())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn edited(text: &str) -> Result<String, String> {
        json(
            text,
            &["servers", "palisade"],
            &json!({ "command": "p", "args": ["mcp"] }),
        )
    }

    #[test]
    fn json_edit_keeps_everything_else_unchanged() {
        let text = "// mine\n{\n    \"b\": 1.50, /* so */\n    \"servers\": {\n        \"a\": {},\n    },\n}\n";
        let new = edited(text).unwrap();
        for kept in ["// mine\n", "1.50, /* so */", "\"a\": {},"] {
            assert!(new.contains(kept), "{new}");
        }
        assert!(new.contains("        \"palisade\": {"), "{new}");
        assert_eq!(edited(&new).unwrap(), new, "a second edit changes nothing");
        let other = new.replace("\"p\"", "\"old\"");
        assert_eq!(edited(&other).unwrap(), new, "an old entry is replaced");
    }

    #[test]
    fn json_edit_creates_missing_parents() {
        for text in ["", "{}", "{}\n", "{\"servers\": {}}"] {
            let new = edited(text).unwrap();
            let value: Value = serde_json::from_str(&new).unwrap();
            assert_eq!(value["servers"]["palisade"]["args"][0], "mcp", "{new}");
        }
    }

    #[test]
    fn invalid_json_file_is_refused() {
        for (text, why) in [
            ("{", "invalid JSON"),
            ("{\"a\": }", "invalid JSON"),
            ("{'a': 1}", "invalid JSON"),
            ("[]", "JSON object"),
            ("{\"servers\": []}", "'servers' is not an object"),
            ("{\"servers\": {}, \"servers\": {\"x\": {}}}", "twice"),
        ] {
            let error = edited(text).unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    fn edited_toml(text: &str) -> Result<String, String> {
        toml(
            text,
            &["mcp_servers", "palisade"],
            "p",
            &["mcp".to_owned()],
            600,
        )
    }

    #[test]
    fn toml_edit_keeps_everything_else_unchanged() {
        let text = "# mine\nmodel = 'x'  # so\n\n[mcp_servers.other]\ncommand = \"o\"\n";
        let new = edited_toml(text).unwrap();
        assert!(new.starts_with(text), "{new}");
        assert!(
            new.contains("[mcp_servers.palisade]\ncommand = \"p\"\n"),
            "{new}"
        );
        assert_eq!(
            edited_toml(&new).unwrap(),
            new,
            "a second edit changes nothing"
        );
        let chosen = new.replace("600", "5").replace("\"p\"", "\"old\"");
        let again = edited_toml(&chosen).unwrap();
        assert!(again.contains("command = \"p\""), "{again}");
        assert!(again.contains("tool_timeout_sec = 5\n"), "{again}");
    }

    #[test]
    fn invalid_toml_file_is_refused() {
        for (text, why) in [
            ("a = ", "invalid TOML"),
            ("mcp_servers = 1", "not a table"),
            ("mcp_servers.palisade = 1", "not a table"),
        ] {
            let error = edited_toml(text).unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
