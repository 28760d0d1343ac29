package mcp.authz_test

import data.mcp.authz

call(tool, name, arguments) := {
	"kind": "mcp", "moment": "before", "method": "tools/call", "tool_id": tool, "name": name,
	"params": {"name": name, "arguments": arguments},
}

action(message) := result if result := authz.decision.action with input as message

test_reading_passes if {
	every name in ["read_file", "search", "list_directory", "information", "formatter"] {
		action(call("fs", name, {"path": "x"})) == "allow"
	}
}

test_destructive_names_are_refused if {
	every name in ["delete_file", "deleteFile", "DELETE", "repo-purge", "dropTable", "rm"] {
		action(call("fs", name, {})) == "block"
	}
}

test_the_reason_names_the_tool if {
	decision := authz.decision with input as call("fs", "delete_file", {})
	contains(decision.reason, "delete_file")
	decision.rule == "destructive-name"
}

test_commands_in_arguments_are_refused if {
	every command in ["rm -rf /", "sudo rm -v -r x", "DROP TABLE users", "delete from users;", "git push --force origin main", "mkfs.ext4 /dev/sda1", "dd if=/dev/zero of=/dev/sda"] {
		action(call("shell", "run", {"command": command})) == "block"
	}
}

test_harmless_commands_pass if {
	every command in ["rm x.txt", "git push origin main", "select * from drops", "delete from users where id = 1", "ls -rf"] {
		action(call("shell", "run", {"command": command})) == "allow"
	}
}

test_exceptions_pass if {
	action(call("memory", "delete_observations", {})) == "allow"
	action(call("other", "delete_observations", {})) == "block"
}

test_other_message_passes if {
	authz.decision.action == "allow" with input as object.union(call("fs", "delete_file", {}), {"moment": "after"})
	authz.decision.action == "allow" with input as object.union(call("fs", "delete_file", {}), {"method": "prompts/get"})
}
