//! Applies the rules for GitHub's API to a request's head and, where needed, its body.

use http::header::{CONTENT_TYPE, HeaderMap};
use policy::allowlist::Target;
use policy::github::GithubRequest;
use policy::override_header::{self, OverrideHeader};
use policy::reason::Reason;
use policy::registration::Repo;
use policy::verdict::{Denial, RuleName};

use crate::snapshot::PolicySnapshot;

/// Decides about a request; `body` is none if the rules do not need it.
pub(crate) fn decide(
    snapshot: &PolicySnapshot,
    target: &Target,
    headers: &HeaderMap,
    body: Option<&[u8]>,
    repos: &[Repo],
) -> Result<RuleName, Denial> {
    let mut content_types = headers.get_all(CONTENT_TYPE).iter();
    let content_type = match (content_types.next(), content_types.next()) {
        (None, _) => None,
        (Some(value), None) => Some(value.to_str().map_err(|_| ambiguous_content_type())?),
        (Some(_), Some(_)) => return Err(ambiguous_content_type()),
    };
    snapshot.github.judge(&GithubRequest {
        method: &target.method,
        host: &target.host,
        path: &target.path,
        has_method_override: find_override(headers).is_some(),
        content_type,
        body,
        repos,
    })
}

/// Decides again about a request in flight that `rule` allowed.
pub(crate) fn recheck(
    snapshot: &PolicySnapshot,
    target: &Target,
    rule: &RuleName,
) -> Result<(), Denial> {
    check_blocked_patterns(snapshot, target)?;
    if snapshot.github.is_in_force(rule) {
        return Ok(());
    }
    Err(Denial::new(Reason::GithubRule, rule.clone()))
}

/// The refusal of an ambiguous Content-Type. With two headers, GitHub might use either of them.
fn ambiguous_content_type() -> Denial {
    Denial::new(Reason::GithubRule, "github:content-type")
        .with_message("The request must have one Content-Type header, in ASCII.")
}

/// Applies `blocked_api_patterns` of policy.yaml to the encoded and the decoded path.
pub(crate) fn check_blocked_patterns(
    snapshot: &PolicySnapshot,
    target: &Target,
) -> Result<(), Denial> {
    let table = &snapshot.settings.policy.policy.blocked_api_patterns;
    let patterns = table.get(target.method.as_str()).into_iter().flatten();
    let text = target.path.text();
    let without_slash = text.strip_suffix('/').filter(|path| !path.is_empty());
    for pattern in patterns {
        let regex = pattern.regex();
        let blocked = [Some(text), Some(target.path.wire()), without_slash]
            .into_iter()
            .flatten()
            .any(|path| regex.is_match(path));
        if blocked {
            return Err(
                Denial::new(Reason::GithubRule, "policy.yaml:blocked_api_patterns")
                    .with_evidence(format!("the pattern is {}", regex.as_str())),
            );
        }
    }
    Ok(())
}

/// Finds the first override header of a request. Returns its usual spelling and its kind.
pub(crate) fn find_override(headers: &HeaderMap) -> Option<(&'static str, OverrideHeader)> {
    let mut names = headers.keys();
    names.find_map(|name| override_header::find(name.as_str().as_bytes()))
}
