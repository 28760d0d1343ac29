//! Tool rules: which tools of an MCP server an agent may use.

use crate::glob::{Token, matches_tokens};
use crate::reason::Reason;
use crate::verdict::Denial;

/// A pattern in which `*` matches any text, including none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wildcard {
    text: Box<str>,
    tokens: Box<[Token]>,
}

impl Wildcard {
    /// Compiles the pattern `text`.
    pub fn new(text: &str) -> Self {
        let token = |byte| match byte {
            b'*' => Token::Star,
            other => Token::Byte(other),
        };
        Self {
            text: text.into(),
            tokens: text.bytes().map(token).collect(),
        }
    }

    /// Whether the pattern matches `name`.
    pub fn matches(&self, name: &str) -> bool {
        matches_tokens(&self.tokens, name.as_bytes())
    }
}

/// Allowed and denied tool names. A denied name is refused even if it is allowed as well.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolNameRules {
    allow: Vec<Wildcard>,
    deny: Vec<Wildcard>,
}

impl ToolNameRules {
    /// Compiles the operator's lists.
    pub fn new<A: AsRef<str>>(allow: &[A], deny: &[A]) -> Self {
        let read = |list: &[A]| {
            list.iter()
                .map(|text| Wildcard::new(text.as_ref()))
                .collect()
        };
        Self {
            allow: read(allow),
            deny: read(deny),
        }
    }

    fn judge(&self, rule: &str, name: &str) -> Result<(), Denial> {
        let denied = |rule: String| Err(Denial::new(Reason::ToolDenied, rule));
        if let Some(pattern) = self.deny.iter().find(|pattern| pattern.matches(name)) {
            return denied(format!("{rule}:deny:{}", pattern.text));
        }
        if self.allow.iter().any(|pattern| pattern.matches(name)) {
            return Ok(());
        }
        denied(format!("{rule}:allow"))
    }
}

/// Lists for certain callers, in addition to those for all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallerToolRules {
    /// Agents; an empty list matches every agent.
    pub agents: Vec<Wildcard>,
    /// Sandboxes; an empty list matches every caller, in a sandbox or not.
    pub sandboxes: Vec<Wildcard>,
    /// The tools that these callers may use.
    pub names: ToolNameRules,
}

impl CallerToolRules {
    fn applies_to(&self, agent: &str, sandbox: Option<&str>) -> bool {
        let matches = |list: &[Wildcard], name: Option<&str>| {
            list.is_empty()
                || name.is_some_and(|name| list.iter().any(|pattern| pattern.matches(name)))
        };
        matches(&self.agents, Some(agent)) && matches(&self.sandboxes, sandbox)
    }
}

/// The rules for the tools of one server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolRules {
    server: Box<str>,
    names: ToolNameRules,
    caller_rules: Vec<CallerToolRules>,
}

impl ToolRules {
    /// The rules of `server`.
    pub fn new(server: &str, names: ToolNameRules, caller_rules: Vec<CallerToolRules>) -> Self {
        Self {
            server: server.into(),
            names,
            caller_rules,
        }
    }

    /// Decides whether `agent` may use the tool `name`: all lists that apply must allow it.
    pub fn judge(&self, name: &str, agent: &str, sandbox: Option<&str>) -> Result<(), Denial> {
        self.names.judge(&format!("tools:{}", self.server), name)?;
        for (index, rules) in self.caller_rules.iter().enumerate() {
            if rules.applies_to(agent, sandbox) {
                let rule = format!("tools:{}:access:{index}", self.server);
                rules.names.judge(&rule, name)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wildcards(list: &[&str]) -> Vec<Wildcard> {
        list.iter().map(|text| Wildcard::new(text)).collect()
    }

    fn toolbox() -> ToolRules {
        let caller_rules = vec![
            CallerToolRules {
                agents: wildcards(&["review-*"]),
                sandboxes: Vec::new(),
                names: ToolNameRules::new(&["read_*", "list"], &[]),
            },
            CallerToolRules {
                agents: Vec::new(),
                sandboxes: wildcards(&["demo"]),
                names: ToolNameRules::new(&["*"], &["read_secret"]),
            },
        ];
        ToolRules::new(
            "files",
            ToolNameRules::new(&["*"], &["delete*"]),
            caller_rules,
        )
    }

    #[test]
    fn tool_must_be_allowed_by_all_lists_that_apply() {
        let cases = [
            ("read_file", "default", None, None),
            (
                "delete_file",
                "default",
                None,
                Some("tools:files:deny:delete*"),
            ),
            ("delete", "review-1", None, Some("tools:files:deny:delete*")),
            ("read_file", "review-1", None, None),
            (
                "write_file",
                "review-1",
                None,
                Some("tools:files:access:0:allow"),
            ),
            (
                "listing",
                "review-1",
                None,
                Some("tools:files:access:0:allow"),
            ),
            ("write_file", "review", None, None),
            (
                "read_secret",
                "a",
                Some("demo"),
                Some("tools:files:access:1:deny:read_secret"),
            ),
            ("read_secret", "a", Some("demo2"), None),
            ("read_secret", "a", None, None),
        ];
        for (name, agent, sandbox, expected) in cases {
            let found = toolbox().judge(name, agent, sandbox);
            let rule = found.err().map(|denial| denial.rule.to_string());
            assert_eq!(rule.as_deref(), expected, "{name} for {agent}");
        }
    }

    #[test]
    fn empty_allow_list_refuses_every_tool() {
        let none: [&str; 0] = [];
        let closed = ToolRules::new("x", ToolNameRules::new(&none, &none), Vec::new());
        assert!(closed.judge("anything", "a", None).is_err());
    }
}
