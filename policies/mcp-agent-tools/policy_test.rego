package mcp.authz_test

import data.mcp.authz

call(agent, tool, name) := {
	"moment": "before", "method": "tools/call", "agent_id": agent, "sandbox": "",
	"tool_id": tool, "name": name, "params": {"name": name}, "result": {},
}

action(message) := result if result := authz.decision.action with input as message

test_agent_is_limited_to_its_list if {
	action(call("reviewer", "github", "create_review")) == "allow"
	action(call("reviewer", "github", "merge_pull_request")) == "block"
	action(call("reviewer", "fs", "read_file")) == "allow"
	action(call("reviewer", "fs", "write_file")) == "block"
	action(call("builder", "fs", "write_file")) == "allow"
	action(call("builder", "github", "delete_repo")) == "block"
}

test_unlisted_agent_has_the_default if {
	action(call("unlisted", "fs", "read_file")) == "allow"
	action(call("unlisted", "fs", "write_file")) == "block"
}

test_sandbox_is_identified_by_its_id if {
	in_box := object.union(call("builder", "fs", "write_file"), {"sandbox": "fix-login"})
	action(in_box) == "block"
	named := object.union(call("unlisted", "fs", "write_file"), {"sandbox": "builder"})
	action(named) == "allow"
}

test_reason_names_agent_and_tool if {
	decision := authz.decision with input as call("reviewer", "fs", "write_file")
	decision.reason == "reviewer may not use fs/write_file."
}

test_lists_are_shortened if {
	listing := {
		"moment": "after", "method": "tools/list", "agent_id": "reviewer", "sandbox": "", "tool_id": "fs", "name": "", "params": {},
		"result": {"nextCursor": "n", "tools": [{"name": "read_file"}, {"name": "write_file"}, {"name": "fs__read_dir"}]},
	}
	decision := authz.decision with input as listing
	decision.outputs.modified_data == {"nextCursor": "n", "tools": [{"name": "read_file"}, {"name": "fs__read_dir"}]}
}

test_other_message_passes if {
	action(object.union(call("unlisted", "fs", "x"), {"method": "resources/list"})) == "allow"
}
