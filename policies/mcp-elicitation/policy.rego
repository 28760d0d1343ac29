# What a server may ask the client in the middle of a call.
#
# - elicitation/create, a question to the person: not for secrets;
# - sampling/createMessage, a question to the model: from tools that data.json lists, with a
#   limit, and without the contents of other servers;
# - roots/list, the directories of the client: to tools that data.json lists.
#
# Everything else is refused.
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

# The words a person reads, and the names and titles of the fields to fill in.
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
