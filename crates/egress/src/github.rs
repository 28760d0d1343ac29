//! The GitHub API: the built-in rules, asked with as much of a request as they want to see.

use std::pin::Pin;

use bytes::Bytes;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE, HeaderMap};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use policy::allowlist::Target;
use policy::github::{GithubRequest, GithubRules};
use policy::proof::Permitted;
use policy::reason::Reason;
use policy::registration::Repo;
use policy::verdict::{Denial, RuleName};

use crate::body::{self, Content};
use crate::headers::find_override;
use crate::pipeline::Message;
use crate::traffic::Rules;

/// The largest body that is read for a judgement.
const MOST_BODY: usize = 1024 * 1024;

/// Judges a request to GitHub's API; anything else is not its business. The body it reads
/// is put back.
pub async fn check(
    rules: &Rules,
    request: &mut Permitted<Message>,
) -> Result<Option<RuleName>, Denial> {
    let target = request.permit().target();
    if !GithubRules::speaks_for(&target.host) {
        return Ok(None);
    }
    blocked_pattern(rules, target)?;
    let mut body = None;
    if rules.github.wants_body(&target.method, &target.path) {
        let message = request.request_mut();
        if is_coded(&message.head.headers) {
            return Err(Denial::new(Reason::GithubRule, "github:body").saying(
                "The body of this request is compressed, and must be read. Send it as it is.",
            ));
        }
        let taken = std::mem::replace(&mut message.body, body::empty());
        let read = read_body(taken).await?;
        request.request_mut().body = body::full(read.clone());
        body = Some(read);
    }
    let repos = request.identity().registration().repos.clone();
    let (target, headers) = (request.permit().target(), &request.request().head.headers);
    judge(rules, target, headers, body.as_deref(), &repos).map(Some)
}

/// Whether what `rule` allowed is allowed still, as far as that can be told of a request that
/// has left.
pub fn judge_again(rules: &Rules, target: &Target, rule: &RuleName) -> Result<(), Denial> {
    blocked_pattern(rules, target)?;
    if rules.github.is_in_force(rule) {
        return Ok(());
    }
    Err(Denial::new(Reason::GithubRule, rule.clone()))
}

/// Refuses a request that was judged by rules which are not those of now.
pub fn changed() -> Denial {
    Denial::new(Reason::GithubRule, "github:changed")
        .saying("The rules for GitHub changed while this request was on its way. Send it again.")
}

/// Judges what is known of a request.
pub fn judge(
    rules: &Rules,
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
    rules.github.judge(&GithubRequest {
        method: &target.method,
        host: &target.host,
        path: &target.path,
        has_method_override: find_override(headers).is_some(),
        content_type,
        body,
        repos,
    })
}

/// Which of two types a body is read as is the reader's choice, and not ours.
fn unclear_type() -> Denial {
    Denial::new(Reason::GithubRule, "github:content-type")
        .saying("The Content-Type must be given once, in plain text.")
}

/// policy.yaml's own list, of the program before us. It looks at the path as it is sent and
/// as it is read.
pub fn blocked_pattern(rules: &Rules, target: &Target) -> Result<(), Denial> {
    let table = &rules.settings.policy.policy.blocked_api_patterns;
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
                    .because(format!("the pattern is {}", regex.as_str())),
            );
        }
    }
    Ok(())
}

async fn read_body(body: Content) -> Result<Bytes, Denial> {
    // The compiler finds the library's future to be `Send` only behind a pointer.
    let collecting: Pin<Box<dyn Future<Output = _> + Send>> =
        Box::pin(Limited::new(body, MOST_BODY).collect());
    match collecting.await {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => {
            Err(Denial::new(Reason::TooLarge, "github:body").saying(format!(
                "The body of this request must be read, and is larger than {MOST_BODY} bytes."
            )))
        }
        Err(error) => Err(Denial::new(Reason::Framing, "github:body").because(error.to_string())),
    }
}

fn is_coded(headers: &HeaderMap) -> bool {
    let mut codings = headers.get_all(CONTENT_ENCODING).iter();
    codings.any(|value| !value.as_bytes().eq_ignore_ascii_case(b"identity"))
}
