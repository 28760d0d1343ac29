//! Applies the rules for GitHub's API to the known parts of a request.

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
        (Some(one), None) => Some(one.to_str().map_err(|_| unclear_type())?),
        (Some(_), Some(_)) => return Err(unclear_type()),
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
    blocked_pattern(snapshot, target)?;
    if snapshot.github.is_in_force(rule) {
        return Ok(());
    }
    Err(Denial::new(Reason::GithubRule, rule.clone()))
}

/// The refusal of an ambiguous Content-Type: with two of them the server chooses one.
fn unclear_type() -> Denial {
    Denial::new(Reason::GithubRule, "github:content-type")
        .with_message("The request must have one Content-Type header, in ASCII.")
}

/// Applies `blocked_api_patterns` of policy.yaml to the encoded and the decoded path.
pub(crate) fn blocked_pattern(snapshot: &PolicySnapshot, target: &Target) -> Result<(), Denial> {
    let table = &snapshot.settings.policy.policy.blocked_api_patterns;
    let listed = table.get(target.method.as_str()).into_iter().flatten();
    let text = target.path.text();
    let bare = text.strip_suffix('/').filter(|bare| !bare.is_empty());
    for pattern in listed {
        let regex = pattern.regex();
        let hit = [Some(text), Some(target.path.wire()), bare]
            .into_iter()
            .flatten()
            .any(|path| regex.is_match(path));
        if hit {
            return Err(
                Denial::new(Reason::GithubRule, "policy.yaml:blocked_api_patterns")
                    .with_evidence(format!("the pattern is {}", regex.as_str())),
            );
        }
    }
    Ok(())
}

/// The first override header of a request, with its usual name.
pub(crate) fn find_override(headers: &HeaderMap) -> Option<(&'static str, OverrideHeader)> {
    let mut names = headers.keys();
    names.find_map(|name| override_header::find(name.as_str().as_bytes()))
}
