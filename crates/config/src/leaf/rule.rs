//! Parts of rules: methods, endpoints, schemes, published ports, regular expressions.

use std::cell::RefCell;
use std::collections::HashMap;

use policy::endpoint::{EndpointRule, MethodSet, PathPattern};
use policy::refs::RefPattern;

use super::{Format, Leaf, impl_leaf, with_detail, without_detail};

impl_leaf! {
    PathPattern, "path-pattern", "a path such as /api/*, or /api/** for everything below";
    RefPattern, "ref-pattern", "a branch such as main, or release/*";
}

/// The name of a method.
pub(crate) struct MethodName;

impl Format for MethodName {
    const NAME: &'static str = "method";
    const DESCRIPTION: &'static str = "an HTTP method such as GET";

    fn check(text: &str) -> Result<(), String> {
        with_detail(MethodSet::parse([text])).map(drop)
    }
}

/// A method on paths, written `GET /api/**`; the path alone means any method.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// The text as written.
    text: String,
    /// The parsed endpoint.
    pub rule: EndpointRule,
}

impl Format for Endpoint {
    const NAME: &'static str = "endpoint";
    const DESCRIPTION: &'static str = "a method and a path such as 'GET /api/**'";

    fn check(text: &str) -> Result<(), String> {
        Self::read(text).map(drop)
    }
}

impl Leaf for Endpoint {
    fn read(text: &str) -> Result<Self, String> {
        let (method, path) = match text.split_once(' ') {
            Some((method, path)) => (Some(method), path.trim_start()),
            None => (None, text),
        };
        Ok(Self {
            text: text.to_owned(),
            rule: EndpointRule {
                methods: with_detail(MethodSet::parse(method))?,
                paths: vec![with_detail(PathPattern::parse(path))?],
            },
        })
    }

    fn write(&self) -> String {
        self.text.clone()
    }
}

/// How a credential is written in its header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AuthScheme {
    /// `Bearer VALUE`.
    Bearer,
    /// `Basic`, with this user and the value as password.
    Basic(String),
    /// The value alone.
    Raw,
}

impl Format for AuthScheme {
    const NAME: &'static str = "auth-scheme";
    const DESCRIPTION: &'static str = "Bearer, Basic:USER or raw";

    fn check(text: &str) -> Result<(), String> {
        Self::read(text).map(drop)
    }
}

impl Leaf for AuthScheme {
    fn read(text: &str) -> Result<Self, String> {
        match text {
            "Bearer" | "bearer" => Ok(Self::Bearer),
            "raw" => Ok(Self::Raw),
            _ => {
                let user = text.strip_prefix("Basic:").filter(|user| {
                    !user.is_empty() && !user.contains(|c: char| c.is_control() || c == ':')
                });
                without_detail(user.map(|user| Self::Basic(user.to_owned())))
            }
        }
    }

    fn write(&self) -> String {
        match self {
            Self::Bearer => "Bearer".to_owned(),
            Self::Basic(user) => format!("Basic:{user}"),
            Self::Raw => "raw".to_owned(),
        }
    }
}

/// A port on the host's loopback that is forwarded to a port in a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortMapping {
    /// The port on the host.
    pub host: u16,
    /// The port in the sandbox.
    pub inside: u16,
}

impl Format for PortMapping {
    const NAME: &'static str = "publish";
    const DESCRIPTION: &'static str = "a port, or HOST:INSIDE such as 8080:3000";
    const INTEGER: Option<u64> = Some(65535);

    fn check(text: &str) -> Result<(), String> {
        Self::read(text).map(drop)
    }
}

impl Leaf for PortMapping {
    fn read(text: &str) -> Result<Self, String> {
        let (host, inside) = text.split_once(':').unwrap_or((text, text));
        let port = |text: &str| -> Option<u16> {
            let clean = text.bytes().all(|b| b.is_ascii_digit());
            text.parse().ok().filter(|port| clean && *port > 0)
        };
        without_detail(
            port(host)
                .zip(port(inside))
                .map(|(host, inside)| Self { host, inside }),
        )
    }

    fn write(&self) -> String {
        if self.host == self.inside {
            self.host.to_string()
        } else {
            format!("{}:{}", self.host, self.inside)
        }
    }
}

/// A regular expression, compiled once.
#[derive(Clone, Debug)]
pub struct RegexPattern(regex::Regex);

/// Maximum length of a pattern.
const MAX_PATTERN_BYTES: usize = 1024;

/// Maximum size of a compiled pattern in bytes. A single class such as `\pL` is already large.
const MAX_COMPILED_BYTES: usize = 256 * 1024;

/// Maximum number of patterns for each method in one file.
pub(crate) const MAX_PATTERNS: usize = 256;

/// Maximum number of methods with patterns in one file.
pub(crate) const MAX_METHODS: usize = 16;

thread_local! {
    /// Patterns compiled for the file that is being read. The schema check, the message of a
    /// mistake and the deserialiser each need them, and aliases repeat them a thousand times.
    static PATTERN_CACHE: RefCell<Option<HashMap<String, Result<RegexPattern, String>>>> =
        const { RefCell::new(None) };
}

/// While this value exists, its thread compiles each pattern once.
pub(crate) struct PatternCacheGuard;

impl Drop for PatternCacheGuard {
    fn drop(&mut self) {
        PATTERN_CACHE.set(None);
    }
}

impl RegexPattern {
    /// The compiled expression.
    pub fn regex(&self) -> &regex::Regex {
        &self.0
    }

    /// Caches the patterns that this thread compiles, until the result is dropped.
    pub(crate) fn start_cache() -> PatternCacheGuard {
        PATTERN_CACHE.set(Some(HashMap::new()));
        PatternCacheGuard
    }

    fn compile(text: &str) -> Result<Self, String> {
        regex::RegexBuilder::new(text)
            .size_limit(MAX_COMPILED_BYTES)
            .build()
            .map(Self)
            .map_err(|error| match error {
                regex::Error::CompiledTooBig(_) => {
                    "its compiled form is too large; (?-u) at the start limits classes such as \\w to ASCII"
                        .to_owned()
                }
                // The last line of the multi-line error is its message.
                error => {
                    let text = error.to_string();
                    let last = text.lines().last().unwrap_or_default().trim();
                    last.strip_prefix("error: ").unwrap_or(last).to_owned()
                }
            })
    }
}

impl PartialEq for RegexPattern {
    fn eq(&self, other: &Self) -> bool {
        self.0.as_str() == other.0.as_str()
    }
}

impl Format for RegexPattern {
    const NAME: &'static str = "regex";
    const DESCRIPTION: &'static str = "a regular expression";

    fn check(text: &str) -> Result<(), String> {
        Self::read(text).map(drop)
    }
}

impl Leaf for RegexPattern {
    fn read(text: &str) -> Result<Self, String> {
        if text.len() > MAX_PATTERN_BYTES {
            return Err(format!("it is longer than {MAX_PATTERN_BYTES} bytes"));
        }
        PATTERN_CACHE.with_borrow_mut(|compiled| {
            let Some(cache) = compiled else {
                return Self::compile(text);
            };
            if let Some(result) = cache.get(text) {
                return result.clone();
            }
            if cache.len() >= MAX_PATTERNS * MAX_METHODS {
                return Err("the file has too many patterns".to_owned());
            }
            let result = Self::compile(text);
            cache.insert(text.to_owned(), result.clone());
            result
        })
    }

    fn write(&self) -> String {
        self.0.as_str().to_owned()
    }
}
