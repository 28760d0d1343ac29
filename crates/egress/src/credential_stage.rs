//! Credentials stage: adds the credential of a row to a cleared request.
//!
//! [`plan`] finds the row of the request and refuses placeholders in wrong places; it needs no I/O.
//! [`CredentialPlan::apply`] reads the value and writes it into the request. Both run after policy
//! and inspection, and only here does a value enter a request.
//!
//! A request over plain HTTP gets no credential, and neither does one to an endpoint that the row
//! does not name: there, the headers that the row owns are removed.

mod recording;

use std::sync::Arc;

use config::section::credentials::ForeignCredentialAction;
use credentials::redaction::{Redacted, SecretTexts, StreamRedactor};
use credentials::substitution::{self, RowCredential};
use credentials::table::TableRow;
use credentials::values::{CurrentValue, ValueError};
use http::header::{ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_TYPE, HeaderMap, HeaderValue};
use http::uri::PathAndQuery;
use http::{Method, Request, Uri};
use http_body_util::BodyExt;
use hyper::body::Body;
use policy::host::Host;
use policy::proof::Cleared;
use policy::reason::Reason;
use policy::verdict::{Denial, RuleName};

pub use self::recording::{RecordedBody, RequestCopy};

use crate::admission::Admission;
use crate::body::{self, MessageBody};
use crate::message::{BodyState, PipelineRequest};
use crate::outgoing::{Credentials, Outgoing};
use crate::redacted_body;
use crate::refusal::RequestRefusal;
use crate::request_cx::RequestCx;
use crate::request_log::RequestLog;
use crate::stage::Stage;

/// Largest body in which a field is replaced.
const MAX_FIELD_BODY: usize = 4 * 1024 * 1024;

/// What the credentials stage does with a request.
pub struct CredentialPlan {
    host: Host,
    /// Whether placeholders in the body are overwritten. Not in a push: a pack is compressed, and its
    /// checksum would be wrong.
    redacts_body: bool,
    row: Option<PlannedRow>,
}

/// The row of a request.
struct PlannedRow {
    row: Arc<TableRow>,
    /// The sandbox's own placeholders for the row.
    placeholders: Vec<String>,
    /// Whether the request gets the credential; otherwise only the headers that the row owns are
    /// removed.
    is_injected: bool,
}

/// A credential that was written into a request.
pub struct AppliedCredential {
    row: Arc<TableRow>,
    placeholders: Vec<String>,
    value: CurrentValue,
    /// The request as it is sent, to send it again with a newer value.
    copy: Option<RequestCopy>,
    host: Host,
}

/// Finds what the credentials stage has to do for a request; `None` if nothing.
pub fn plan(
    cx: &RequestCx,
    request: &Cleared<PipelineRequest, Admission>,
) -> Result<Option<Box<CredentialPlan>>, RequestRefusal> {
    let service = cx.services.credentials();
    let granted = &request.identity().registration().credentials;
    if granted.is_empty() && !service.has_placeholders() {
        return Ok(None);
    }
    let (message, target) = (request.request(), request.permit().target());
    let mut row = None;
    if message.credentials == Credentials::Granted {
        for candidate in cx.snapshot.credentials.granted_for(&target.host, granted) {
            let is_covered = candidate.covers(target);
            if is_covered || row.is_none() {
                row = Some((candidate, is_covered));
            }
            if is_covered {
                break;
            }
        }
    }
    let tls = message.destination.tls;
    let planned = row.map(|(row, is_covered)| PlannedRow {
        placeholders: service.placeholders(&target.sandbox, row),
        is_injected: is_covered && tls,
        row: Arc::clone(row),
    });
    let injected = planned.as_ref().filter(|planned| planned.is_injected);
    let own = injected.map_or(&[][..], |planned| planned.placeholders.as_slice());
    let checked = substitution::check_head(
        service.finder(),
        injected.map(|planned| planned.row.as_ref()),
        own,
        &message.head.headers,
        target.path.target(),
    );
    if let Err(misplaced) = checked {
        let denial = Denial::new(Reason::PlaceholderMisused, "credentials");
        let denial = denial.with_evidence(misplaced.to_string());
        return Err(RequestRefusal::new(Stage::Credentials, denial));
    }
    match &planned {
        Some(planned) => planned.refuse_dangerous(target)?,
        None if message.body.is_empty() => return Ok(None),
        None => {}
    }
    Ok(Some(Box::new(CredentialPlan {
        host: target.host.clone(),
        redacts_body: !matches!(message.body, BodyState::Pushed(_)),
        row: planned,
    })))
}

impl PlannedRow {
    /// Refuses endpoints that create credentials, and TRACE, whose response repeats the request.
    fn refuse_dangerous(&self, target: &policy::allowlist::Target) -> Result<(), RequestRefusal> {
        let rule = rule_name(&self.row);
        if let Some(minting) = self.row.minting_rule(target) {
            let denial = Denial::new(Reason::CredentialEndpoint, rule)
                .with_message(format!(
                    "{} creates credentials. Create them outside the sandbox.",
                    target.path.wire()
                ))
                .with_evidence(format!("the rule is: {minting}"));
            return Err(RequestRefusal::new(Stage::Credentials, denial));
        }
        if self.is_injected && target.method.as_str() == Method::TRACE.as_str() {
            let denial = Denial::new(Reason::MethodDenied, rule)
                .with_message("TRACE is refused where a credential would be added.");
            return Err(RequestRefusal::new(Stage::Credentials, denial));
        }
        Ok(())
    }
}

impl CredentialPlan {
    /// Writes the credential into the request, or removes what a client put in its place.
    pub async fn apply(
        self,
        cx: &RequestCx,
        outgoing: Outgoing,
        log: &mut RequestLog,
    ) -> Result<(Outgoing, Option<AppliedCredential>), RequestRefusal> {
        let redacts_body = self.redacts_body;
        let redacted = |request| match redacts_body {
            true => redact_placeholders(cx, request),
            false => request,
        };
        let Some(PlannedRow {
            row,
            placeholders,
            is_injected,
        }) = self.row
        else {
            return Ok((outgoing.map(redacted), None));
        };
        if !is_injected {
            let request = outgoing.map(|request| redacted(without_owned(&row, request)));
            return Ok((request, None));
        }
        let lifetime = cx.snapshot.settings.credentials.command_lifetime;
        let read = cx.services.credentials().values().read(&row, lifetime);
        let value = match read.await {
            Ok(value) => value,
            Err(ValueError::NotConfigured(_)) if row.anonymous => {
                let request = outgoing.map(|request| redacted(without_owned(&row, request)));
                return Ok((request, None));
            }
            Err(error) => return Err(unavailable(cx, &row, &error)),
        };
        log.event.credential = Some(row.name.clone());
        let mut applied = AppliedCredential {
            row,
            placeholders,
            value,
            copy: None,
            host: self.host,
        };
        let (route, request) = outgoing.into_parts();
        let (request, is_foreign) = applied.write(request).await?;
        if is_foreign {
            applied.report_foreign(cx, log)?;
        }
        // Last, because a field of the body may be the place of the placeholder.
        let request = applied.keep_copy(redacted(request));
        Ok((Outgoing::with_credential(route, request), Some(applied)))
    }
}

impl AppliedCredential {
    fn credential(&self) -> Option<RowCredential<'_>> {
        Some(RowCredential {
            row: &self.row,
            source: self.row.uses.get(self.value.use_index)?,
            value: &self.value.value,
            placeholders: &self.placeholders,
        })
    }

    /// Writes the credential into head and body. Returns whether a client's own value was
    /// replaced.
    async fn write(
        &self,
        request: Request<MessageBody>,
    ) -> Result<(Request<MessageBody>, bool), RequestRefusal> {
        let refused = |denial| RequestRefusal::new(Stage::Credentials, denial);
        let internal = || refused(Denial::new(Reason::Internal, rule_name(&self.row)));
        let credential = self.credential().ok_or_else(internal)?;
        let (mut head, mut body) = request.into_parts();
        let target = head.uri.path_and_query().map_or("/", PathAndQuery::as_str);
        let target = target.to_owned();
        let mut client = credential.find_in_head(&head.headers, &target);
        if let Some(is_form) = has_fields(&self.row, &head.headers, &body) {
            let bytes = body::read_whole(body, MAX_FIELD_BODY)
                .await
                .map_err(|error| {
                    let denial = Denial::new(Reason::TooLarge, rule_name(&self.row));
                    refused(denial.with_evidence(error.to_string()))
                })?;
            let bytes = match credential.write_fields(is_form, &bytes) {
                Some((written, found)) => {
                    client.elsewhere |= found.elsewhere;
                    client.is_foreign |= found.is_foreign;
                    written.into()
                }
                None => bytes,
            };
            body = body::full(bytes);
        }
        credential.write_headers(&mut head.headers, client);
        // The response is searched for the value, and nothing here decodes it.
        head.headers
            .insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        if let Some(written) = credential.write_query(&target) {
            let target = PathAndQuery::try_from(written.as_str()).map_err(|_| internal())?;
            head.uri = Uri::from(target);
        }
        Ok((Request::from_parts(head, body), client.is_foreign))
    }

    /// Notes a client's own value in the record, or refuses the request.
    fn report_foreign(&self, cx: &RequestCx, log: &mut RequestLog) -> Result<(), RequestRefusal> {
        match cx.snapshot.settings.credentials.foreign {
            ForeignCredentialAction::Replace => {
                log.event.event = Some("foreign_credential_replaced".to_owned());
                Ok(())
            }
            ForeignCredentialAction::Refuse => {
                let denial = Denial::new(Reason::CredentialForeign, "credentials.foreign")
                    .with_message(format!(
                        "The request carries a credential that is not the placeholder of '{}'. \
                         Send it without one: the gate adds it.",
                        self.row.name
                    ));
                Err(RequestRefusal::new(Stage::Credentials, denial))
            }
        }
    }

    /// Records the request while it is sent, so that it can be sent again with a newer value.
    fn keep_copy(&mut self, request: Request<MessageBody>) -> Request<MessageBody> {
        let (copy, request) = RequestCopy::record(request);
        self.copy = Some(copy);
        request
    }

    /// The request with a newer value, after the upstream has refused this one; `None` if there is
    /// no newer value or the request cannot be repeated.
    pub async fn renew(
        &mut self,
        cx: &RequestCx,
    ) -> Result<Option<Request<MessageBody>>, RequestRefusal> {
        let Some(copy) = self.copy.take().and_then(RequestCopy::into_request) else {
            return Ok(None);
        };
        let values = cx.services.credentials().values();
        let newer = values.read_after_refusal(&self.row, &self.value);
        match newer.await {
            Ok(Some(newer)) => self.value = newer,
            Ok(None) => return Ok(None),
            Err(error) => return Err(unavailable(cx, &self.row, &error)),
        }
        let (request, _) = self.write(copy).await?;
        Ok(Some(request))
    }

    /// The host of the request.
    pub fn host(&self) -> &Host {
        &self.host
    }

    /// The texts that must not be in the response.
    pub fn into_echoes(self) -> Option<SecretTexts> {
        SecretTexts::new(self.credential()?.echoes())
    }
}

/// Whether the body carries a field of the row: `Some(true)` for a form, `Some(false)` for JSON.
fn has_fields(row: &TableRow, headers: &HeaderMap, body: &MessageBody) -> Option<bool> {
    if row.fields.is_empty() || body.is_end_stream() || headers.contains_key(CONTENT_ENCODING) {
        return None;
    }
    let content_type = headers.get(CONTENT_TYPE)?.to_str().ok()?;
    let content_type = content_type.split(';').next().unwrap_or_default().trim();
    if content_type.eq_ignore_ascii_case("application/x-www-form-urlencoded") {
        return Some(true);
    }
    let is_json = content_type.eq_ignore_ascii_case("application/json")
        || content_type.to_ascii_lowercase().ends_with("+json");
    is_json.then_some(false)
}

/// Overwrites placeholders in a body: none may leave the sandbox.
fn redact_placeholders(cx: &RequestCx, request: Request<MessageBody>) -> Request<MessageBody> {
    let is_encoded = request.headers().contains_key(CONTENT_ENCODING);
    if is_encoded || request.body().is_end_stream() {
        return request;
    }
    let finder = cx.services.credentials().finder().clone();
    let redactor = StreamRedactor::new(Redacted::Placeholders(Box::new(finder)));
    request.map(|body| redacted_body::redact(body, redactor).boxed_unsync())
}

fn without_owned(row: &TableRow, mut request: Request<MessageBody>) -> Request<MessageBody> {
    substitution::remove_owned(row, request.headers_mut());
    request
}

fn rule_name(row: &TableRow) -> RuleName {
    RuleName::from(format!("credentials:{}", row.name))
}

/// The refusal of a request whose credential cannot be read. The cause is for the operator.
fn unavailable(cx: &RequestCx, row: &TableRow, error: &ValueError) -> RequestRefusal {
    let name = &row.name;
    tracing::warn!(sandbox = %cx.sandbox.id(), credential = name, %error, "credential not available");
    let denial = Denial::new(Reason::CredentialMissing, rule_name(row))
        .with_message("Credential not configured for this provider")
        .with_evidence(format!(
            "{error}; run 'palisade credentials test {name}' to check the credential"
        ));
    RequestRefusal::new(Stage::Credentials, denial)
}
