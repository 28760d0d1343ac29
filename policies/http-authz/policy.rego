# Decides which requests may leave a sandbox, after the allowlist has allowed them.
#
# `input` is one request: kind, sandbox, method, scheme, host, port, path, raw_path, segments,
# headers, program, registration {repos, auth_mode, metadata}, rule, unread. A request that no
# rule allows is refused. A connection to a host of egress.passthrough is one CONNECT with
# `unread: true`, no path and no headers.
package http.authz

default allow := false

# Reading is allowed on every host of the allowlist.
allow if input.method in {"GET", "HEAD", "OPTIONS"}

# Writing is allowed on the hosts listed in data.json.
allow if input.host in data.http_authz.writable

reason := sprintf("%s to %s is not allowed: only reading is.", [input.method, input.host]) if not allow
