//! The `initialize` handshake of the bridge with a server's process, for clients that do not
//! initialize the process themselves.

use std::sync::Arc;

use crate::launch::LaunchError;
use crate::process::Process;
use crate::rpc::Message;
use crate::tools::Served;

/// The revision that the bridge introduces itself with.
pub const NEWEST: &str = "2025-11-25";

/// How long a server may take to introduce itself.
const INTRODUCTION: std::time::Duration = std::time::Duration::from_secs(60);

/// Introduces the bridge to a server with the capabilities of those it speaks for. Gives
/// what the server says of itself.
pub async fn introduce(
    process: &Arc<Process>,
    served: &Served,
    capabilities: &str,
) -> Result<String, LaunchError> {
    let mut call = process.reserve();
    let params = format!(
        r#"{{"protocolVersion":"{NEWEST}","capabilities":{capabilities},"clientInfo":{{"name":"palisade","version":"{}"}}}}"#,
        env!("CARGO_PKG_VERSION")
    );
    let text = Message::request(&call.id().to_string(), "initialize", &params);
    let failed = |why: String| {
        served.failed(&why);
        process.stop();
        LaunchError::Failed(why)
    };
    if let Err(gone) = process.send(&text).await {
        return Err(failed(gone.to_string()));
    }
    let answer = match tokio::time::timeout(INTRODUCTION, call.answer()).await {
        Ok(Ok(answer)) => answer,
        Ok(Err(gone)) => return Err(failed(gone.to_string())),
        Err(_) => {
            return Err(failed(
                "the server did not introduce itself in time".to_owned(),
            ));
        }
    };
    let Some(result) = answer.result() else {
        return Err(failed("the server refused to be initialised".to_owned()));
    };
    served.worked();
    let ready = Message::notification("notifications/initialized", "{}");
    if let Err(gone) = process.send(&ready).await {
        return Err(failed(gone.to_string()));
    }
    Ok(result.to_owned())
}

/// Ends a process whose client left before it was ready.
pub(crate) struct Ending(Option<Arc<Process>>);

impl Ending {
    pub(crate) fn of(process: &Arc<Process>) -> Self {
        Self(Some(Arc::clone(process)))
    }

    pub(crate) fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        if let Some(process) = &self.0 {
            process.stop();
        }
    }
}
