//! Which tools of a server an agent may use.

use crate::glob::{Token, matches_run};
use crate::reason::Reason;
use crate::verdict::Denial;

/// A text in which `*` stands for any text, also none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wildcard {
    text: Box<str>,
    tokens: Box<[Token]>,
}

impl Wildcard {
    /// The pattern that `text` is.
    pub fn new(text: &str) -> Self {
        let token = |byte| match byte {
            b'*' => Token::Run,
            other => Token::Byte(other),
        };
        Self {
            text: text.into(),
            tokens: text.bytes().map(token).collect(),
        }
    }

    /// Whether it describes `name`.
    pub fn matches(&self, name: &str) -> bool {
        matches_run(&self.tokens, name.as_bytes())
    }
}

/// Names that are let through, and names that are not whatever the others say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Names {
    allow: Vec<Wildcard>,
    deny: Vec<Wildcard>,
}

impl Names {
    /// From the operator's lists.
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

/// Lists that hold for some callers only, beside those for all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Narrower {
    /// Agents; an empty list stands for any.
    pub agents: Vec<Wildcard>,
    /// Sandboxes; an empty list stands for any caller, in a sandbox or not.
    pub sandboxes: Vec<Wildcard>,
    /// What they may use.
    pub names: Names,
}

impl Narrower {
    fn concerns(&self, agent: &str, sandbox: Option<&str>) -> bool {
        let among = |list: &[Wildcard], name: Option<&str>| {
            list.is_empty()
                || name.is_some_and(|name| list.iter().any(|pattern| pattern.matches(name)))
        };
        among(&self.agents, Some(agent)) && among(&self.sandboxes, sandbox)
    }
}

/// Who may use which tools of one server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Toolbox {
    server: Box<str>,
    names: Names,
    narrower: Vec<Narrower>,
}

impl Toolbox {
    /// The rules of `server`.
    pub fn new(server: &str, names: Names, narrower: Vec<Narrower>) -> Self {
        Self {
            server: server.into(),
            names,
            narrower,
        }
    }

    /// Whether `agent` may use the tool `name`. Every list that concerns it has to let it
    /// through.
    pub fn judge(&self, name: &str, agent: &str, sandbox: Option<&str>) -> Result<(), Denial> {
        self.names.judge(&format!("tools:{}", self.server), name)?;
        for (index, narrower) in self.narrower.iter().enumerate() {
            if narrower.concerns(agent, sandbox) {
                let rule = format!("tools:{}:access:{index}", self.server);
                narrower.names.judge(&rule, name)?;
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

    fn toolbox() -> Toolbox {
        let narrower = vec![
            Narrower {
                agents: wildcards(&["review-*"]),
                sandboxes: Vec::new(),
                names: Names::new(&["read_*", "list"], &[]),
            },
            Narrower {
                agents: Vec::new(),
                sandboxes: wildcards(&["demo"]),
                names: Names::new(&["*"], &["read_secret"]),
            },
        ];
        Toolbox::new("files", Names::new(&["*"], &["delete*"]), narrower)
    }

    #[test]
    fn every_list_that_concerns_a_caller_counts() {
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
    fn an_empty_list_lets_nothing_through() {
        let none: [&str; 0] = [];
        let closed = Toolbox::new("x", Names::new(&none, &none), Vec::new());
        assert!(closed.judge("anything", "a", None).is_err());
    }
}
