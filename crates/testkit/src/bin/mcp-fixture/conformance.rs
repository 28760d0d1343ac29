//! The tools that `@modelcontextprotocol/conformance` calls by name.

use std::sync::atomic::Ordering;
use std::time::Duration;

use serde_json::{Value, json};

use crate::content::{self, WAV};
use crate::server::{Call, Cancelled};
use crate::wire::Outcome;

/// Delay between two steps of a tool.
const STEP_DELAY: Duration = Duration::from_millis(50);

/// Whether the tool needs a thread: it takes time, or sends a request to the client.
pub(crate) fn needs_thread(name: &str) -> bool {
    !matches!(
        name,
        "test_simple_text"
            | "test_image_content"
            | "test_audio_content"
            | "test_embedded_resource"
            | "test_multiple_content_types"
            | "test_error_handling"
            | "test_header_param"
    )
}

/// Calls one of these tools; `None` for other names.
pub(crate) fn call(name: &str, call: &Call) -> Result<Option<Outcome>, Cancelled> {
    let outcome = match name {
        "test_simple_text" => Outcome::text("This is a simple text response for testing."),
        "test_image_content" => contents(&[content::image()]),
        "test_audio_content" => {
            contents(&[json!({"type": "audio", "data": WAV, "mimeType": "audio/wav"})])
        }
        "test_embedded_resource" => contents(&[content::resource(
            "test://embedded-resource",
            "text/plain",
            "This is an embedded resource content.",
        )]),
        "test_multiple_content_types" => contents(&[
            content::text("Multiple content types test:"),
            content::image(),
            content::resource(
                "test://mixed-content-resource",
                "application/json",
                "{\"test\":\"data\",\"value\":123}",
            ),
        ]),
        "test_error_handling" => {
            Outcome::failed("This tool intentionally returns an error for testing")
        }
        "test_header_param" => Outcome::text(format!("Region: {}", call.text("region"))),
        "json_schema_2020_12_tool" | "test_dynamic_tool" => Outcome::text("Done."),
        "test_tool_with_logging" | "test_logging_tool" => logging(call)?,
        "test_tool_with_progress" => progress(call)?,
        "test_reconnection" => {
            call.pause(Duration::from_millis(300))?;
            Outcome::text("Reconnection test completed.")
        }
        "test_sampling" | "test_missing_capability" => sampling(call)?,
        "test_elicitation" => elicitation(call)?,
        "test_elicitation_sep1034_defaults" => form(call, properties_with_defaults())?,
        "test_elicitation_sep1330_enums" => form(call, enum_properties())?,
        "test_streaming_elicitation" => {
            call.progress(0, 1);
            echo_reply(&call.send_request(name_question("Who is it?", ""))?)
        }
        "test_trigger_tool_change" => {
            call.server.more_tools.fetch_xor(true, Ordering::Relaxed);
            notify_change(call, "notifications/tools/list_changed")
        }
        "test_trigger_prompt_change" => {
            call.server.more_prompts.fetch_xor(true, Ordering::Relaxed);
            notify_change(call, "notifications/prompts/list_changed")
        }
        "test_input_required_result_elicitation" => {
            greeting(&call.send_request(name_question("What is your name?", "user_name"))?)
        }
        "test_input_required_result_sampling" => {
            let question = model_question("What is the capital of France?", "capital_question");
            echo_reply(&call.send_request(question)?)
        }
        "test_input_required_result_list_roots" => {
            echo_reply(&call.send_request(("roots/list", json!({}), "client_roots"))?)
        }
        "test_input_required_result_request_state"
        | "test_input_required_result_tampered_state" => {
            let answer =
                call.send_request(("elicitation/create", confirmation_params(), "confirm"))?;
            match answer {
                Ok(_) => Outcome::text("state-ok"),
                Err(error) => Outcome::failed(&error.to_string()),
            }
        }
        "test_input_required_result_multiple_inputs" => multiple_inputs(call)?,
        "test_input_required_result_multi_round" => {
            let first = call.send_request(name_question("Step 1: What is your name?", "step1"))?;
            let second =
                call.send_request(("elicitation/create", colour_question_params(), "step2"))?;
            match (first, second) {
                (Ok(first), Ok(second)) => Outcome::text(format!("{first} {second}")),
                (Err(error), _) | (_, Err(error)) => Outcome::failed(&error.to_string()),
            }
        }
        "test_input_required_result_capabilities" => supported_requests(call)?,
        _ => return Ok(None),
    };
    Ok(Some(outcome))
}

fn contents(contents: &[Value]) -> Outcome {
    Outcome::value(&json!({"content": contents}))
}

fn notify_change(call: &Call, method: &str) -> Outcome {
    call.server.notify(method, &Value::Null);
    Outcome::text("Changed.")
}

fn logging(call: &Call) -> Result<Outcome, Cancelled> {
    for (number, text) in [
        "Tool execution started",
        "Tool processing data",
        "Tool execution completed",
    ]
    .into_iter()
    .enumerate()
    {
        if number > 0 {
            call.pause(STEP_DELAY)?;
        }
        call.server.log("info", &json!(text));
    }
    Ok(Outcome::text("Tool with logging executed."))
}

fn progress(call: &Call) -> Result<Outcome, Cancelled> {
    for done in [0, 50, 100] {
        if done > 0 {
            call.pause(STEP_DELAY)?;
        }
        call.progress(done, 100);
    }
    Ok(Outcome::text("Tool with progress executed."))
}

fn sampling(call: &Call) -> Result<Outcome, Cancelled> {
    let prompt = call.text("prompt");
    let answer = call.send_request(model_question(prompt, ""))?;
    Ok(match answer {
        Ok(answer) => {
            let text = answer.pointer("/content/text").and_then(Value::as_str);
            Outcome::text(format!("LLM response: {}", text.unwrap_or("")))
        }
        Err(error) => Outcome::failed(&format!("Sampling failed: {error}")),
    })
}

fn elicitation(call: &Call) -> Result<Outcome, Cancelled> {
    let params = json!({
        "message": call.text("message"),
        "requestedSchema": {
            "type": "object",
            "properties": {
                "username": {"type": "string", "description": "User's response"},
                "email": {"type": "string", "description": "User's email address"},
            },
            "required": ["username", "email"],
        },
    });
    Ok(
        match call.send_request(("elicitation/create", params, ""))? {
            Ok(answer) => Outcome::text(format!("User response: {answer}")),
            Err(error) => Outcome::failed(&format!("Elicitation failed: {error}")),
        },
    )
}

fn form(call: &Call, properties: Value) -> Result<Outcome, Cancelled> {
    let schema = json!({"type": "object", "properties": properties, "required": []});
    let params = json!({"message": "Please fill in this form", "requestedSchema": schema});
    Ok(
        match call.send_request(("elicitation/create", params, ""))? {
            Ok(answer) => {
                let action = answer.get("action").and_then(Value::as_str).unwrap_or("");
                let content = answer.get("content").unwrap_or(&Value::Null);
                let text = format!("Elicitation completed: action={action}, content={content}");
                Outcome::text(text)
            }
            Err(error) => Outcome::failed(&format!("Elicitation failed: {error}")),
        },
    )
}

fn properties_with_defaults() -> Value {
    json!({
        "name": {"type": "string", "description": "User name", "default": "John Doe"},
        "age": {"type": "integer", "description": "User age", "default": 30},
        "score": {"type": "number", "description": "User score", "default": 95.5},
        "status": {
            "type": "string",
            "description": "User status",
            "enum": ["active", "inactive", "pending"],
            "default": "active",
        },
        "verified": {"type": "boolean", "description": "Verification status", "default": true},
    })
}

fn enum_properties() -> Value {
    let options = json!(["option1", "option2", "option3"]);
    let titled = |word: &str| {
        json!([
            {"const": "value1", "title": format!("First {word}")},
            {"const": "value2", "title": format!("Second {word}")},
            {"const": "value3", "title": format!("Third {word}")},
        ])
    };
    json!({
        "untitledSingle": {"type": "string", "enum": options},
        "titledSingle": {"type": "string", "oneOf": titled("Option")},
        "legacyEnum": {
            "type": "string",
            "enum": ["opt1", "opt2", "opt3"],
            "enumNames": ["Option One", "Option Two", "Option Three"],
        },
        "untitledMulti": {"type": "array", "items": {"type": "string", "enum": options}},
        "titledMulti": {"type": "array", "items": {"anyOf": titled("Choice")}},
    })
}

fn name_question<'a>(message: &str, key: &'a str) -> (&'static str, Value, &'a str) {
    let params = json!({
        "message": message,
        "requestedSchema": {
            "type": "object",
            "properties": {"name": {"type": "string"}},
            "required": ["name"],
        },
    });
    ("elicitation/create", params, key)
}

fn model_question<'a>(prompt: &str, key: &'a str) -> (&'static str, Value, &'a str) {
    let message = json!({"role": "user", "content": {"type": "text", "text": prompt}});
    let params = json!({"messages": [message], "maxTokens": 100});
    ("sampling/createMessage", params, key)
}

fn confirmation_params() -> Value {
    json!({
        "message": "Please confirm",
        "requestedSchema": {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}},
            "required": ["ok"],
        },
    })
}

fn colour_question_params() -> Value {
    json!({
        "message": "Step 2: What is your favorite color?",
        "requestedSchema": {
            "type": "object",
            "properties": {"color": {"type": "string"}},
            "required": ["color"],
        },
    })
}

fn multiple_inputs(call: &Call) -> Result<Outcome, Cancelled> {
    let answers = call.send_requests(vec![
        name_question("What is your name?", "user_name"),
        model_question("Generate a greeting", "greeting"),
        ("roots/list", json!({}), "client_roots"),
    ])?;
    let answers: Result<Vec<Value>, Value> = answers.into_iter().collect();
    Ok(match answers {
        Ok(answers) => Outcome::text(Value::from(answers).to_string()),
        Err(error) => Outcome::failed(&error.to_string()),
    })
}

/// Sends only requests for which the client declared a capability.
fn supported_requests(call: &Call) -> Result<Outcome, Cancelled> {
    let mut questions = Vec::new();
    if call.server.client_supports("sampling") {
        questions.push(model_question("Say something", "model"));
    }
    if call.server.client_supports("elicitation") {
        questions.push(name_question("What is your name?", "user_name"));
    }
    let answers = call.send_requests(questions)?;
    Ok(Outcome::text(format!("{} answers", answers.len())))
}

fn greeting(answer: &Result<Value, Value>) -> Outcome {
    match answer {
        Ok(answer) => {
            let name = answer.pointer("/content/name").and_then(Value::as_str);
            match name {
                Some(name) => Outcome::text(format!("Hello, {name}!")),
                None => Outcome::failed("no name was given"),
            }
        }
        Err(error) => Outcome::failed(&error.to_string()),
    }
}

fn echo_reply(answer: &Result<Value, Value>) -> Outcome {
    match answer {
        Ok(answer) => Outcome::text(answer.to_string()),
        Err(error) => Outcome::failed(&error.to_string()),
    }
}
