# Decides which agent may use which tools.
#
# data.json lists patterns of `<tool>/<name>` for each agent, by the agent's id or, in a
# sandbox, by the sandbox's id. An agent that is not listed uses the list of `default`.
# Answers to tools/list are reduced to the tools that the agent may call. All other messages
# pass.
package mcp.authz

default decision := {"action": "allow"}

decision := {"action": "block", "rule": "agent-tools", "reason": reason} if {
	input.moment == "before"
	input.method == "tools/call"
	not may_call(input.name)
	reason := sprintf("%s may not use %s/%s.", [who, input.tool_id, input.name])
} else := {"action": "redact", "rule": "agent-tools", "outputs": {"modified_data": shortened}} if {
	input.moment == "after"
	input.method == "tools/list"
	is_array(input.result.tools)
	shortened := object.union(input.result, {"tools": visible})
}

visible := [tool | some tool in input.result.tools; may_call(own_name(tool.name))]

who := input.sandbox if input.sandbox != ""

who := input.agent_id if input.sandbox == ""

listed := object.get(data.mcp_agent_tools.agents, who, data.mcp_agent_tools.agents["default"])

may_call(name) if {
	subject := sprintf("%s/%s", [input.tool_id, name])
	some pattern in listed.allow
	glob.match(pattern, ["/"], subject)
	not denied(subject)
}

denied(subject) if {
	some pattern in listed.deny
	glob.match(pattern, ["/"], subject)
}

# The tool's name without the prefix of its server.
own_name(name) := concat("__", array.slice(parts, 1, count(parts))) if {
	parts := split(name, "__")
	count(parts) > 1
	parts[0] != ""
} else := name
