//! What a call shares with the hooks of a gateway: the decision of its before hook, and its
//! outcome for the after hook.

use super::{Permitted, Relay};
use crate::caller::Caller;
use crate::context::{CORRELATION, Execution, Expired, Origin, RequestContext};
use crate::rpc::Message;
use crate::tools::Served;
use crate::trace;

impl Relay {
    /// The context that a before hook made for the call. The call names it in its `_meta` or,
    /// as `header`, by `X-Request-ID`, and it must be of the same agent and tool. Where both name
    /// one, a refused context is taken before one that is not.
    pub(super) fn find_context(
        &self,
        served: &Served,
        caller: &Caller,
        message: &Message,
        header: Option<&str>,
    ) -> Result<Option<RequestContext>, Expired> {
        let contexts = self.governance.contexts();
        let in_body = message.param_text(&["_meta", CORRELATION]);
        let mut found: Option<RequestContext> = None;
        for id in [in_body.as_deref(), header].into_iter().flatten() {
            let Some(known) = contexts.find(id) else {
                if contexts.has_expired(id) {
                    return Err(Expired);
                }
                continue;
            };
            let is_own = *known.agent == *caller.agent && *known.tool == **served.name();
            if is_own && (found.is_none() || known.is_refused()) {
                found = Some(known);
            }
        }
        Ok(found)
    }

    /// Remembers a call for the after hook of a gateway, while there is one.
    pub(super) fn remember(
        &self,
        served: &Served,
        caller: &Caller,
        permitted: &Permitted,
    ) -> Option<String> {
        if permitted.method != "tools/call" || !(self.stamps.0)() {
            return None;
        }
        let (request, trace) = (permitted.request, trace::name_of(&permitted.span));
        let id = request.to_string();
        let name = permitted.message.param_text(&["name"]);
        let name = name.unwrap_or_default();
        let contexts = self.governance.contexts();
        let origin = Origin {
            request: Some(request),
            agent: &caller.agent,
            session: &caller.session,
            sandbox: caller.sandbox.as_ref(),
            tool: served.name(),
            method: "tools/call",
            name: &name,
            trace: trace.as_deref(),
        };
        contexts.create(&id, origin);
        if let Some(decision) = &permitted.decision
            && let Err(expired) = contexts.set_decision(&id, decision.clone())
        {
            tracing::debug!(%request, %expired, "the decision on a call was not stored");
        }
        Some(id)
    }

    /// Stores the outcome of a call that ended without an answer.
    pub(super) fn store_abandoned(&self, served: &Served, caller: &Caller, permitted: &Permitted) {
        let execution = Execution {
            failed: true,
            exit_code: 0,
            duration: permitted.begun.elapsed(),
        };
        self.store_execution(served, caller, permitted, execution);
    }

    /// Stores the outcome of a call for the after hook.
    pub(super) fn store_execution(
        &self,
        served: &Served,
        caller: &Caller,
        permitted: &Permitted,
        execution: Execution,
    ) {
        let Some(id) = &permitted.context else {
            return;
        };
        let contexts = self.governance.contexts();
        let mut stored = contexts.set_result(id, execution);
        if stored.is_err() && permitted.is_own_context {
            // The call took longer than an entry lives. Its after hook comes only now, and
            // finds by this entry which call it was.
            if let Some(id) = self.remember(served, caller, permitted) {
                stored = contexts.set_result(&id, execution);
            }
        }
        if let Err(expired) = stored {
            let request = permitted.request;
            tracing::debug!(%request, %expired, "the outcome of a call was not stored");
        }
    }
}
