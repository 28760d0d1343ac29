//! Tests of the template, the reference and the schema.

use std::path::Path;

#[test]
fn template_loads_and_equals_the_defaults() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("palisade.yaml");
    std::fs::write(&path, config::TEMPLATE).unwrap();
    let settings = config::load(Some(&path), &|_| None).unwrap();
    let defaults = config::load(None, &|_| None).unwrap();
    assert_eq!(settings.diff(&defaults), Vec::<String>::new());
    assert!(settings.warnings.is_empty());
}

#[test]
fn docs_are_current() {
    let path =
        Path::new(&std::env::var_os("CARGO_MANIFEST_DIR").unwrap()).join("../../docs/config.md");
    let page = config::reference_markdown();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, &page).unwrap();
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        written == page,
        "docs/config.md is out of date: run UPDATE_DOCS=1 cargo nextest run -p config docs_are_current"
    );
}

#[test]
fn every_key_is_described_and_the_schema_is_closed() {
    fn walk(pointer: &str, schema: &serde_json::Value) {
        if let Some(properties) = schema.get("properties").and_then(|p| p.as_object()) {
            assert_eq!(
                schema["additionalProperties"], false,
                "{pointer} takes unknown keys"
            );
            for (key, property) in properties {
                let description = property["description"].as_str().unwrap_or_default();
                assert!(!description.is_empty(), "{pointer}/{key} is not described");
            }
        }
        if let Some(object) = schema.as_object() {
            for (key, inner) in object {
                walk(&format!("{pointer}/{key}"), inner);
            }
        }
    }
    let schema = config::schema();
    walk("", &schema);
    assert_eq!(schema["required"], serde_json::json!(["version"]));
    assert_eq!(schema["properties"]["egress"]["default"]["unknown"], "deny");
}
