//! The `initialize` handshake of the bridge with a server's process, for clients that do not
//! perform it themselves.

use std::sync::Arc;

use crate::launch::LaunchError;
use crate::process::Process;
use crate::rpc::RpcMessage;
use crate::tools::StdioServer;

/// The protocol revision of the bridge's `initialize`.
pub const PROTOCOL_REVISION: &str = "2025-11-25";

/// How long a server may take to answer `initialize`.
const INITIALIZE_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(60);

/// Performs the `initialize` handshake with the clients' capabilities. Returns the server's
/// result.
pub async fn initialize(
    process: &Arc<Process>,
    server: &StdioServer,
    capabilities: &str,
) -> Result<String, LaunchError> {
    let mut call = process.reserve();
    let params = format!(
        r#"{{"protocolVersion":"{PROTOCOL_REVISION}","capabilities":{capabilities},"clientInfo":{{"name":"palisade","version":"{}"}}}}"#,
        env!("CARGO_PKG_VERSION")
    );
    let text = RpcMessage::request(&call.id().to_string(), "initialize", &params);
    let failed = |why: String| {
        server.record_start_failure(&why);
        process.stop();
        LaunchError::Failed(why)
    };
    if let Err(gone) = process.send(&text).await {
        return Err(failed(gone.to_string()));
    }
    let answer = match tokio::time::timeout(INITIALIZE_TIMEOUT, call.answer()).await {
        Ok(Ok(answer)) => answer,
        Ok(Err(gone)) => return Err(failed(gone.to_string())),
        Err(_) => {
            return Err(failed(
                "the server did not answer initialize in time".to_owned(),
            ));
        }
    };
    let Some(result) = answer.result() else {
        return Err(failed(
            "the server answered initialize with an error".to_owned(),
        ));
    };
    server.record_start_success();
    let ready = RpcMessage::notification("notifications/initialized", "{}");
    if let Err(gone) = process.send(&ready).await {
        return Err(failed(gone.to_string()));
    }
    Ok(result.to_owned())
}

/// Stops a process when dropped, unless [`ProcessStopGuard::disarm`] was called: the client may
/// disconnect before the process is ready.
pub(crate) struct ProcessStopGuard(Option<Arc<Process>>);

impl ProcessStopGuard {
    pub(crate) fn new(process: &Arc<Process>) -> Self {
        Self(Some(Arc::clone(process)))
    }

    pub(crate) fn disarm(mut self) {
        self.0 = None;
    }
}

impl Drop for ProcessStopGuard {
    fn drop(&mut self) {
        if let Some(process) = &self.0 {
            process.stop();
        }
    }
}
