//! Fake tool server in this process: it records all messages and answers at once.

use std::collections::HashMap;
use std::sync::Arc;

use async_trait::async_trait;
use config::section::tools::BridgedServer;
use mcp::caller::McpCaller;
use mcp::launch::{LaunchError, LaunchedProgram, Launcher, ProgramExit, ProgramHandle};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, DuplexStream};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::fixture::within_timeout;

/// Size of the pipe buffer of the fake server.
const PIPE_BYTES: usize = 64 * 1024;

/// The fake server, with the messages that all its processes received, in order.
#[derive(Debug)]
pub(crate) struct FakeTool {
    received: watch::Sender<Vec<Value>>,
    /// Ends every process.
    crash: CancellationToken,
    /// Makes every process stop reading.
    stop_reading: CancellationToken,
}

impl FakeTool {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            received: watch::Sender::new(Vec::new()),
            crash: CancellationToken::new(),
            stop_reading: CancellationToken::new(),
        })
    }

    /// Ends every process, as a crash does.
    pub(crate) fn crash(&self) {
        self.crash.cancel();
    }

    /// Makes every process stop reading.
    pub(crate) fn stop_reading(&self) {
        self.stop_reading.cancel();
    }

    /// The names of the tools that were called, in order.
    pub(crate) fn calls(&self) -> Vec<String> {
        let received = self.received.borrow();
        let calls = received
            .iter()
            .filter(|message| message["method"] == "tools/call");
        calls
            .map(|call| call["params"]["name"].as_str().unwrap().to_owned())
            .collect()
    }

    /// Whether `condition` holds for a received message.
    pub(crate) fn any(&self, condition: impl Fn(&Value) -> bool) -> bool {
        self.received.borrow().iter().any(condition)
    }

    /// Waits until `condition` holds for a received message.
    pub(crate) async fn wait_received(&self, condition: impl Fn(&Value) -> bool) {
        let mut changes = self.received.subscribe();
        let found = changes.wait_for(|received| received.iter().any(&condition));
        within_timeout(found).await.unwrap();
    }

    async fn serve(&self, input: DuplexStream, mut output: DuplexStream) {
        let mut lines = BufReader::new(input).lines();
        // Calls that wait for an answer of the client, by the id of the question.
        let mut asking: HashMap<String, Value> = HashMap::new();
        loop {
            let line = tokio::select! {
                line = lines.next_line() => line,
                () = self.stop_reading.cancelled() => std::future::pending().await,
            };
            let Ok(Some(line)) = line else { return };
            let message: Value = serde_json::from_str(&line).unwrap();
            let replies = reply(&message, &mut asking);
            self.received.send_modify(|all| all.push(message));
            for reply in replies {
                let line = format!("{reply}\n");
                if output.write_all(line.as_bytes()).await.is_err() {
                    return;
                }
            }
        }
    }
}

fn answer(id: &Value, result: Value) -> Value {
    json!({"jsonrpc": "2.0", "id": id, "result": result})
}

fn reply(message: &Value, asking: &mut HashMap<String, Value>) -> Vec<Value> {
    let id = &message["id"];
    let Some(method) = message["method"].as_str() else {
        let call = asking.remove(id.as_str().unwrap()).unwrap();
        let text = message.to_string();
        return vec![answer(
            &call,
            json!({"content": [{"type": "text", "text": text}]}),
        )];
    };
    let arguments = &message["params"]["arguments"];
    match (method, message["params"]["name"].as_str()) {
        ("initialize", _) => vec![answer(
            id,
            json!({
                "protocolVersion": message["params"]["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "fake", "version": "1"},
            }),
        )],
        ("tools/call", Some("elicit")) => {
            let question = format!("q-{id}");
            let mut params = json!({"message": "who?", "requestedSchema": {"type": "object"}});
            params["ask"] = arguments["question"].clone();
            let request = json!({"jsonrpc": "2.0", "id": question, "method": "elicitation/create", "params": params});
            asking.insert(question.clone(), id.clone());
            let notification =
                json!({"jsonrpc": "2.0", "method": "notifications/test", "params": {}});
            let more = arguments["more"].as_u64().unwrap_or_default();
            let more = (0..more).map(|_| notification.clone());
            std::iter::once(request).chain(more).collect()
        }
        // Withdraws the question of another call, and answers.
        ("tools/call", Some("withdraw_question")) => {
            let mut replies: Vec<Value> = asking
                .drain()
                .flat_map(|(question, call)| {
                    let withdrawn = json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": question}});
                    [withdrawn, answer(&call, json!({"content": []}))]
                })
                .collect();
            replies.push(answer(id, json!({"content": []})));
            replies
        }
        ("tools/call", Some("hang")) => vec![],
        ("tools/call", Some(name)) => {
            let content = json!([{"type": "text", "text": format!("done {name}")}]);
            vec![answer(
                id,
                json!({"content": content, "ask": arguments["result"]}),
            )]
        }
        (_, _) if id.is_null() => vec![],
        (_, _) => vec![answer(id, json!({}))],
    }
}

/// Launcher of the fake tool server.
pub(crate) struct FakeLauncher(pub(crate) Arc<FakeTool>);

#[async_trait]
impl Launcher for FakeLauncher {
    async fn launch(
        &self,
        _: &BridgedServer,
        _: &McpCaller,
    ) -> Result<LaunchedProgram, LaunchError> {
        let (input, their_input) = tokio::io::duplex(PIPE_BYTES);
        let (their_output, output) = tokio::io::duplex(PIPE_BYTES);
        let ended = self.0.crash.child_token();
        let (tool, stopped) = (Arc::clone(&self.0), ended.clone());
        tokio::spawn(async move {
            tokio::select! {
                () = tool.serve(their_input, their_output) => {}
                () = stopped.cancelled() => {}
            }
        });
        Ok(LaunchedProgram {
            input: Box::pin(input),
            output: Box::pin(output),
            errors: Box::pin(tokio::io::empty()),
            handle: Box::new(FakeHandle(ended)),
        })
    }
}

struct FakeHandle(CancellationToken);

#[async_trait]
impl ProgramHandle for FakeHandle {
    async fn wait(&mut self) -> ProgramExit {
        self.0.cancelled().await;
        Some(0)
    }

    async fn end(&mut self) -> ProgramExit {
        self.0.cancel();
        Some(0)
    }

    fn terminate(&mut self) {
        self.0.cancel();
    }

    async fn kill(&mut self) -> ProgramExit {
        self.end().await
    }
}
