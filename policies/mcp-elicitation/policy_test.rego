package mcp.elicitation_test

import data.mcp.elicitation

ask(tool, method, params) := {"kind": "mcp", "moment": "elicitation", "method": method, "tool_id": tool, "params": params}

action(message) := result if result := elicitation.decision.action with input as message

test_ordinary_questions_pass if {
	action(ask("x", "elicitation/create", {"message": "Which branch?", "requestedSchema": {"type": "object", "properties": {"branch": {"type": "string", "title": "Branch"}}}})) == "allow"
	action(ask("x", "elicitation/create", {})) == "allow"
}

test_questions_for_secrets_are_refused if {
	action(ask("x", "elicitation/create", {"message": "Your Password please"})) == "block"
	action(ask("x", "elicitation/create", {"message": "Sign in", "requestedSchema": {"properties": {"api_key": {"type": "string"}}}})) == "block"
	action(ask("x", "elicitation/create", {"message": "Sign in", "requestedSchema": {"properties": {"x": {"title": "Access token"}}}})) == "block"
	action(ask("x", "elicitation/create", {"message": "Sign in", "requestedSchema": {"properties": {"x": {"description": "the secret"}}}})) == "block"
}

test_sampling_is_for_listed_tools_within_limits if {
	action(ask("writer", "sampling/createMessage", {"maxTokens": 10})) == "block"
	allowed(10, "none") == "allow"
	allowed(5000, "none") == "block"
	allowed(10, "allServers") == "block"
}

allowed(tokens, context) := result if {
	message := ask("writer", "sampling/createMessage", {"maxTokens": tokens, "includeContext": context})
	result := elicitation.decision.action with input as message with data.mcp_elicitation.may_sample as ["writer"]
}

test_roots_are_for_listed_tools if {
	action(ask("filesystem", "roots/list", {})) == "allow"
	action(ask("weather", "roots/list", {})) == "block"
}

test_everything_else_is_refused if {
	action(ask("x", "something/new", {})) == "block"
}
