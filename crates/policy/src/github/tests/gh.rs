//! Requests of `gh` 2.23, by command, recorded with an origin on loopback. Each line of gh.jsonl is
//! one request.

use serde_json::Value;

use super::*;

/// The verdicts of a command's requests, in order. `gh` stops after the first refusal.
fn run(rules: &GithubRules, command: &str) -> Vec<String> {
    let mut verdicts = Vec::new();
    for line in include_str!("gh.jsonl").lines() {
        let request: Value = serde_json::from_str(line).unwrap();
        let text = |key: &str| request[key].as_str().unwrap();
        if text("command") != command {
            continue;
        }
        let body = match &request["body"] {
            Value::Null => String::new(),
            body => body.to_string(),
        };
        let verdict = call(text("method"), text("target"), &body).verdict(rules);
        let is_end = verdict.starts_with('-');
        verdicts.push(verdict);
        if is_end {
            break;
        }
    }
    assert!(!verdicts.is_empty(), "{command}");
    verdicts
}

#[track_caller]
fn check(rules: &GithubRules, table: &[(&str, &str)]) {
    for (command, expected) in table {
        assert_eq!(run(rules, command).join(" "), *expected, "gh {command}");
    }
}

const CREATE: &str = "pr create --title T --body B --base main --head fix";

#[test]
fn gh_can_read_the_registered_repository() {
    check(
        &rules(&[]),
        &[
            ("pr view 7", "+graphql-read"),
            ("pr list", "+graphql-read"),
            ("pr diff 7", "+read"),
            ("issue list -R acme/widget", "+graphql-read"),
            ("issue view 1", "+graphql-read"),
            ("release list", "+graphql-read"),
            ("repo view", "+graphql-read +read"),
            ("run list", "+read"),
            ("label list", "+graphql-read"),
        ],
    );
}

#[test]
fn gh_writes_need_the_rule_for_mutations() {
    check(
        &rules(&[]),
        &[
            (CREATE, "+graphql-read +graphql-read -graphql-mutations"),
            ("pr comment 7 --body hi", "+graphql-read -graphql-mutations"),
            (
                "issue create --title a --body b",
                "+graphql-read -graphql-mutations",
            ),
        ],
    );
    check(
        &rules(&["graphql-mutations"]),
        &[
            (CREATE, "+graphql-read +graphql-read +graphql-mutations"),
            ("pr comment 7 --body hi", "+graphql-read +graphql-mutations"),
            ("pr edit 7 --title U", "+graphql-read +graphql-read"),
            (
                "pr review 7 --comment --body c",
                "+graphql-read +graphql-mutations",
            ),
            (
                "issue create --title a --body b",
                "+graphql-read +graphql-mutations",
            ),
            (
                "issue comment 1 --body c",
                "+graphql-read +graphql-mutations",
            ),
        ],
    );
}

#[test]
fn gh_commands_beyond_the_rules_are_refused() {
    for enabled in [&[][..], &["graphql-mutations"]] {
        check(
            &rules(enabled),
            &[
                ("release create v1 --notes n --title t", "-releases"),
                ("secret set NAME --body v", "-secrets"),
                ("secret list", "-secrets"),
                // These commands read outside of the repository.
                ("pr status", "-graphql-read"),
                ("pr checks 7", "+graphql-read -graphql-read"),
                ("issue list --label bug --search foo", "-graphql-read"),
                (
                    &format!("{CREATE} --draft --label bug --assignee dev --reviewer dev"),
                    "+graphql-read +graphql-read -graphql-read",
                ),
            ],
        );
    }
    check(
        &rules(&["graphql-mutations"]),
        &[
            ("pr merge 7 --merge", "+graphql-read +graphql-read -merge"),
            ("pr close 7", "+graphql-read -close"),
            ("pr review 7 --approve", "+graphql-read -review-verdicts"),
        ],
    );
    check(
        &rules(&[]),
        &[(
            "pr merge 7 --merge",
            "+graphql-read +graphql-read -graphql-mutations",
        )],
    );
}
