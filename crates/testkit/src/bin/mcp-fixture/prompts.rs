//! Prompts and completion.

use serde_json::{Value, json};

use crate::content;
use crate::server::{Call, Cancelled};
use crate::wire::Outcome;

/// Whether the prompt sends a request to the client.
pub(crate) fn sends_request(name: &str) -> bool {
    name == "test_input_required_result_prompt"
}

/// A prompt.
pub(crate) fn get(call: &Call) -> Result<Outcome, Cancelled> {
    let name = call.params.get("name").and_then(Value::as_str);
    let messages = match name.unwrap_or("") {
        "test_simple_prompt" => vec![content::text("This is a simple prompt for testing.")],
        "test_prompt_with_arguments" => {
            let (one, two) = (call.text("arg1"), call.text("arg2"));
            let text = format!("Prompt with arguments: arg1='{one}', arg2='{two}'");
            vec![content::text(&text)]
        }
        "test_prompt_with_embedded_resource" => {
            let uri = call.text("resourceUri");
            let text = "Embedded resource content for testing.";
            vec![
                content::resource(uri, "text/plain", text),
                content::text("Please process the embedded resource above."),
            ]
        }
        "test_prompt_with_image" => vec![
            content::image(),
            content::text("Please analyze the image above."),
        ],
        "test_input_required_result_prompt" => {
            let params = json!({
                "message": "What context should the prompt use?",
                "requestedSchema": {
                    "type": "object",
                    "properties": {"context": {"type": "string"}},
                    "required": ["context"],
                },
            });
            match call.send_request(("elicitation/create", params, "user_context"))? {
                Ok(answer) => vec![content::text(&format!("Context: {answer}"))],
                Err(error) => return Ok(Outcome::invalid(format!("not answered: {error}"))),
            }
        }
        other => return Ok(Outcome::invalid(format!("Unknown prompt: {other}"))),
    };
    let messages = messages
        .iter()
        .map(|content| json!({"role": "user", "content": content}));
    Ok(Outcome::value(
        &json!({"messages": messages.collect::<Vec<_>>()}),
    ))
}

/// Values that start with the typed text.
pub(crate) fn complete(params: &Value) -> Outcome {
    let typed = params.pointer("/argument/value").and_then(Value::as_str);
    let candidates = ["paris", "park", "party", "test", "testing"];
    let typed = typed.unwrap_or("");
    let values: Vec<&str> = candidates
        .into_iter()
        .filter(|word| word.starts_with(typed))
        .collect();
    let total = values.len();
    Outcome::value(&json!({"completion": {"values": values, "total": total, "hasMore": false}}))
}
