# Decides which requests a server may send to the client during a call.
#
# - elicitation/create, a question to the user: allowed unless it asks for secrets;
# - sampling/createMessage, a prompt for the model: allowed for tools that data.json lists,
#   up to a token limit, and without the context of other servers;
# - roots/list, the directories of the client: allowed for tools that data.json lists.
#
# All other requests are refused.
package mcp.elicitation

default decision := {"action": "block", "rule": "unknown", "reason": "This server may not ask that."}

decision := {"action": "block", "rule": "secret", "reason": "A server must not ask for secrets."} if {
	input.method == "elicitation/create"
	wants_secret
} else := {"action": "allow"} if {
	input.method == "elicitation/create"
} else := {"action": "allow"} if {
	input.method == "sampling/createMessage"
	input.tool_id in data.mcp_elicitation.may_sample
	object.get(input.params, "maxTokens", 0) <= data.mcp_elicitation.most_tokens
	object.get(input.params, "includeContext", "none") == "none"
} else := {"action": "allow"} if {
	input.method == "roots/list"
	input.tool_id in data.mcp_elicitation.may_see_roots
}

# The texts that the user reads: the message, and the names and titles of the form fields.
asked contains lower(object.get(input.params, "message", ""))

asked contains lower(name) if some name, _ in schema

asked contains lower(text) if {
	some _, field in schema
	some key in ["title", "description"]
	text := field[key]
	is_string(text)
}

schema := object.get(object.get(input.params, "requestedSchema", {}), "properties", {})

wants_secret if {
	some text in asked
	some word in data.mcp_elicitation.secret_words
	contains(text, word)
}
