# Removes e-mail addresses, keys and tokens from the answers of tools, and refuses calls that
# contain a key.
#
# The regular expressions and their replacements are in data.json. The gate applies them to
# every string of the answer; the rest of the answer is not changed.
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
