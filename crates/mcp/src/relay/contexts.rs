//! Request contexts that a call shares with the hooks of a gateway: the decision of the before
//! hook, and the outcome for the after hook.

use super::{PermittedCall, Relay};
use crate::caller::McpCaller;
use crate::context::{CORRELATION_KEY, ContextExpired, Execution, RequestContext, RequestOrigin};
use crate::rpc::RpcMessage;
use crate::tools::StdioServer;
use crate::trace;

impl Relay {
    /// Finds the context that a before hook created for the call. The call contains the id of the
    /// context in its `_meta` or in the `X-Request-ID` header (`header`). Agent and tool must be
    /// the same. If `_meta` and header identify different contexts, a refused one takes precedence.
    pub(super) fn find_context(
        &self,
        server: &StdioServer,
        caller: &McpCaller,
        message: &RpcMessage,
        header: Option<&str>,
    ) -> Result<Option<RequestContext>, ContextExpired> {
        let contexts = self.governance.contexts();
        let in_body = message.param_text(&["_meta", CORRELATION_KEY]);
        let mut found: Option<RequestContext> = None;
        for id in [in_body.as_deref(), header].into_iter().flatten() {
            let Some(known) = contexts.find(id) else {
                if contexts.has_expired(id) {
                    return Err(ContextExpired);
                }
                continue;
            };
            let is_own = *known.agent == *caller.agent && *known.tool == **server.name();
            if is_own && (found.is_none() || known.is_refused()) {
                found = Some(known);
            }
        }
        Ok(found)
    }

    /// Creates a context for the after hook, if a gateway calls the hooks.
    pub(super) fn store_context(
        &self,
        server: &StdioServer,
        caller: &McpCaller,
        permitted: &PermittedCall,
    ) -> Option<String> {
        if permitted.method != "tools/call" || !(self.gateway_hooks.0)() {
            return None;
        }
        let (request, trace) = (permitted.request, trace::traceparent_of(&permitted.span));
        let id = request.to_string();
        let name = permitted.message.param_text(&["name"]);
        let name = name.unwrap_or_default();
        let contexts = self.governance.contexts();
        let origin = RequestOrigin {
            request: Some(request),
            agent: &caller.agent,
            session: &caller.session,
            sandbox: caller.sandbox.as_ref(),
            tool: server.name(),
            method: "tools/call",
            name: &name,
            trace: trace.as_deref(),
        };
        contexts.create(&id, origin);
        if let Some(decision) = &permitted.decision
            && let Err(expired) = contexts.set_decision(&id, decision.clone())
        {
            tracing::debug!(%request, %expired, "mcp call decision not stored: context expired");
        }
        Some(id)
    }

    /// Stores the outcome of a call that ended without an answer.
    pub(super) fn store_abandoned(
        &self,
        server: &StdioServer,
        caller: &McpCaller,
        permitted: &PermittedCall,
    ) {
        let execution = Execution {
            failed: true,
            exit_code: 0,
            duration: permitted.started_at.elapsed(),
        };
        self.store_execution(server, caller, permitted, execution);
    }

    /// Stores the outcome of a call for the after hook.
    pub(super) fn store_execution(
        &self,
        server: &StdioServer,
        caller: &McpCaller,
        permitted: &PermittedCall,
        execution: Execution,
    ) {
        let Some(id) = &permitted.context else {
            return;
        };
        let contexts = self.governance.contexts();
        let mut stored = contexts.set_result(id, execution);
        if stored.is_err() && permitted.is_own_context {
            // The context expired during the call. Its after hook comes later, so the context is
            // created again.
            if let Some(id) = self.store_context(server, caller, permitted) {
                stored = contexts.set_result(&id, execution);
            }
        }
        if let Err(expired) = stored {
            let request = permitted.request;
            tracing::debug!(%request, %expired, "mcp call outcome not stored: context expired");
        }
    }
}
