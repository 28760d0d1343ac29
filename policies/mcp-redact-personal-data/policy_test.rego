package mcp.authz_test

import data.mcp.authz

matching(text) := {word |
	rules := authz.decision.outputs.redaction_rules with input as {"moment": "after", "result": {}}
	some pattern, word in rules.replacements
	regex.match(pattern, text)
}

before(text) := {"moment": "before", "method": "tools/call", "params": {"name": "t", "arguments": {"x": text}}}

test_answers_are_redacted if {
	authz.decision.action == "redact" with input as {"moment": "after", "result": {"content": []}}
}

test_expressions_match_their_format if {
	matching("write to anna.b+c@mail.example.com now") == {"[e-mail]"}
	matching("DE89 3704 0044 0532 0130 00") == {"[iban]"}
	matching(concat("", ["AKIA", "ABCDEFGHIJKLMNOP"])) == {"[aws key]"}
	matching(concat("", ["gh", "p_abcdefghijklmnopqrstuvwxyz0123456789"])) == {"[github token]"}
	matching(concat("", ["sk-", "ant-", "aaaaaaaaaaaaaaaaaaaaaaaa"])) == {"[api key]"}
	matching(concat("", ["xox", "b-1234567890-abc"])) == {"[slack token]"}
	matching(concat("", ["-----BEGIN RSA ", "PRIVATE KEY-----\nMIIB\n-----END RSA PRIVATE KEY-----"])) == {"[private key]"}
}

test_other_text_is_not_matched if {
	every text in ["user@host", "a @ b.com", "sk-short", "The price is 12.50", "AKIA", "git@", "DE89"] {
		matching(text) == set()
	}
}

test_a_call_with_a_key_is_refused if {
	decision := authz.decision with input as before(concat("", ["AKIA", "ABCDEFGHIJKLMNOP"]))
	decision.action == "block"
	contains(decision.reason, "aws")
}

test_a_call_with_an_address_passes if {
	authz.decision.action == "allow" with input as before("anna@example.com")
}
