use super::*;

#[test]
fn every_listed_tool_has_object_schemas() {
    let tools = tools::all_tools();
    let names: Vec<&str> = tools.iter().map(|tool| tool.name.as_ref()).collect();
    let expected = "sandbox-create sandbox-list sandbox-ports sandbox-pause sandbox-resume \
                    sandbox-delete read write edit patch bash ls glob grep upload download diff";
    assert_eq!(names.join(" "), expected);
    for tool in &tools {
        let output = tool.output_schema.clone().unwrap_or_default();
        for schema in [&tool.input_schema, &output] {
            let kind = schema.get("type").and_then(serde_json::Value::as_str);
            assert_eq!(kind, Some("object"), "{}: {schema:?}", tool.name);
            let text = serde_json::to_string(schema).unwrap();
            assert!(!text.contains("\"uint"), "{}: {text}", tool.name);
        }
    }
}
