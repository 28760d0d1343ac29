# Takes e-mail addresses, keys and tokens out of what tools answer, and refuses calls that
# carry a key.
#
# Expressions and what stands in their place are in data.json. They are searched for by the
# gate, in every string of the answer; whatever else is in it stays as it is written.
package mcp.authz

default decision := {"action": "allow"}

decision := {"action": "redact", "rule": "personal-data", "outputs": {"redaction_rules": {"replacements": replacements}}} if {
	input.moment == "after"
} else := {"action": "block", "rule": "key-in-arguments", "reason": reason} if {
	input.moment == "before"
	text := json.marshal(input.params)
	some name, key in data.mcp_redact_personal_data.keys
	regex.match(key.pattern, text)
	reason := sprintf("The arguments hold what looks like a key (%s).", [name])
}

replacements[entry.pattern] := entry["with"] if some entry in data.mcp_redact_personal_data.personal

replacements[key.pattern] := key["with"] if some key in data.mcp_redact_personal_data.keys
