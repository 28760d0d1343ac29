//! What would become of a request, without sending one.

use std::sync::Arc;

use http::HeaderMap;
use policy::allowlist::Target;
use policy::endpoint::Method;
use policy::github::GithubRules;
use policy::host::{Authority, Host};
use policy::id::SandboxId;
use policy::path::CleanPath;
use policy::reason::Reason;
use policy::registration::Registration;
use policy::verdict::{Denial, RuleName};

use crate::git;
use crate::github;
use crate::rego::Asked;
use crate::traffic::Rules;

/// A request that is only asked about.
#[derive(Clone, Debug)]
pub struct Question {
    /// Whose it would be.
    pub sandbox: SandboxId,
    /// The method.
    pub method: String,
    /// The whole URL.
    pub url: String,
    /// The program that would send it.
    pub program: Option<String>,
    /// What is registered of the one who asks.
    pub registration: Option<Arc<Registration>>,
}

/// What would become of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trial {
    /// The host that was understood.
    pub host: Option<Host>,
    /// The port.
    pub port: Option<u16>,
    /// The path as it would be sent.
    pub path: Option<String>,
    /// The rule that allows it, or why not.
    pub verdict: Result<RuleName, Denial>,
    /// Whether it would pass unread, so that only host and port count.
    pub unread: bool,
}

/// Judges a request as the gate would.
pub async fn judge(rules: &Rules, question: &Question) -> Trial {
    let mut trial = Trial {
        host: None,
        port: None,
        path: None,
        verdict: Err(Denial::new(Reason::BadName, "names")),
        unread: false,
    };
    trial.verdict = run(rules, question, &mut trial).await;
    trial
}

async fn run(rules: &Rules, question: &Question, trial: &mut Trial) -> Result<RuleName, Denial> {
    let bad = |what: String| Denial::new(Reason::BadName, "names").saying(what);
    let url = &question.url;
    let (tls, rest) = if let Some(rest) = url.strip_prefix("https://") {
        (true, rest)
    } else if let Some(rest) = url.strip_prefix("http://") {
        (false, rest)
    } else {
        return Err(bad("A URL begins with http:// or https://.".to_owned()));
    };
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let (authority, path) = rest.split_at(end);
    // A client keeps the fragment to itself.
    let path = path.split('#').next().unwrap_or_default();
    let path = if path.starts_with('/') {
        path.to_owned()
    } else {
        format!("/{path}")
    };
    let authority = Authority::parse(authority).map_err(|error| bad(format!("{error}.")))?;
    let port = authority.port.unwrap_or(if tls { 443 } else { 80 });
    trial.host = Some(authority.host.clone());
    trial.port = Some(port);
    let path = CleanPath::parse(&path).map_err(|error| bad(format!("{error}.")))?;
    trial.path = Some(path.wire().to_owned());
    let method = Method::parse(&question.method)
        .map_err(|error| Denial::new(Reason::MethodDenied, "names").saying(format!("{error}.")))?;
    trial.unread = tls && rules.passes_unread(&authority.host);
    let (program, registration) = (
        question.program.as_deref(),
        question.registration.as_deref(),
    );
    if trial.unread {
        let rule = rules.judge_tunnel(&authority.host, port, program)?;
        let asked = Asked {
            sandbox: &question.sandbox,
            host: &authority.host,
            port,
            tls,
            program,
            request: None,
            registration,
            rule: &rule,
        };
        ask_policies(rules, &asked).await?;
        return Ok(rule);
    }
    let target = Target {
        sandbox: question.sandbox.clone(),
        method,
        host: authority.host,
        port,
        path,
        program: question.program.clone(),
    };
    let permit = rules.judge(target)?;
    ask_github(rules, question, permit.target())?;
    let headers = HeaderMap::new();
    let asked = Asked::request(permit.target(), &headers, tls, registration, permit.rule());
    ask_policies(rules, &asked).await?;
    ask_git(rules, question, permit.target())?;
    Ok(permit.rule().clone())
}

/// Puts it to the rules for repositories. What a push carries, a trial does not know.
fn ask_git(rules: &Rules, question: &Question, target: &Target) -> Result<(), Denial> {
    let registration = question.registration.as_deref();
    let repos = registration.map_or(&[][..], |row| row.repos.as_slice());
    git::judge(rules, target, repos)
}

/// Puts it to the rules for GitHub. Where they would have to read a body, nobody can say.
fn ask_github(rules: &Rules, question: &Question, target: &Target) -> Result<(), Denial> {
    if !GithubRules::speaks_for(&target.host) {
        return Ok(());
    }
    github::blocked_pattern(rules, target)?;
    if rules.github.wants_body(&target.method, &target.path) {
        return Err(Denial::new(Reason::GithubRule, "github:body")
            .saying("This depends on what the request carries, which a trial does not know."));
    }
    let registration = question.registration.as_deref();
    let repos = registration.map_or(&[][..], |row| row.repos.as_slice());
    github::judge(rules, target, &HeaderMap::new(), None, repos).map(drop)
}

/// Puts it to the operator's policies, without headers.
async fn ask_policies(rules: &Rules, asked: &Asked<'_>) -> Result<(), Denial> {
    if rules.policies.is_empty() {
        return Ok(());
    }
    let judgements = rules.policies.judge(&Arc::new(asked.input())).await;
    let mut denials = judgements
        .into_iter()
        .filter(|judgement| judgement.counts)
        .filter_map(|judgement| judgement.denial);
    denials.next().map_or(Ok(()), Err)
}
