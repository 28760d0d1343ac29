package http.authz_test

import data.http.authz

request(method, host) := {"kind": "http", "method": method, "host": host, "path": "/x", "headers": {}}

test_reading_is_allowed_everywhere if {
	every method in ["GET", "HEAD", "OPTIONS"] {
		authz.allow with input as request(method, "example.com")
	}
}

test_writing_is_allowed_to_listed_hosts if {
	authz.allow with input as request("POST", "api.github.com")
	not authz.allow with input as request("POST", "example.com")
	authz.allow with input as request("POST", "example.com") with data.http_authz.writable as ["example.com"]
}

test_reason_names_method_and_host if {
	reason := authz.reason with input as request("DELETE", "example.com")
	contains(reason, "DELETE to example.com")
}

test_method_other_than_reading_is_refused if {
	not authz.allow with input as request("CONNECT", "example.com")
}
