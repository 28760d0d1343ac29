# Refuses calls of tools that destroy things.
#
# A call is destructive when a word of the tool's name is (delete_file, dropTable, repo-purge),
# or when an argument contains a destructive command (rm -rf, DROP TABLE). Tools that
# data.json lists under `except` are allowed nevertheless. Messages that are not tool calls
# pass.
package mcp.authz

default decision := {"action": "allow"}

decision := {"action": "block", "rule": "destructive-name", "reason": reason} if {
	is_call
	not excepted
	count(destructive_words) > 0
	reason := sprintf("%s is not allowed: tools that %s things are refused.", [input.name, concat(" and ", destructive_words)])
}

decision := {"action": "block", "rule": "destructive-command", "reason": reason} if {
	is_call
	not excepted
	count(destructive_words) == 0
	commanded
	reason := sprintf("%s is not allowed with these arguments: they hold a command that destroys.", [input.name])
}

is_call if {
	input.moment == "before"
	input.method == "tools/call"
}

excepted if {
	some pattern in data.mcp_deny_destructive.except
	glob.match(pattern, ["/"], sprintf("%s/%s", [input.tool_id, input.name]))
}

# delete_file, deleteFile and delete-file are split into the same words.
destructive_words contains word if {
	some found in regex.find_n(`[A-Z]?[a-z]+|[A-Z]+|[0-9]+`, input.name, -1)
	word := lower(found)
	word in data.mcp_deny_destructive.words
}

commanded if {
	text := json.marshal(object.get(input.params, "arguments", {}))
	some pattern in data.mcp_deny_destructive.commands
	regex.match(pattern, text)
}
