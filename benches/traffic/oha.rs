//! The same load by a client of somebody else's: oha, which the aims were measured with.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;
use tokio::process::Command;

use crate::load::{CLIENTS, Figures, Way};

/// Oha, and the roots it trusts.
pub struct Oha<'a> {
    pub binary: &'a Path,
    pub roots: &'a Path,
}

impl Oha<'_> {
    /// Small answers on connections that are kept.
    pub async fn kept(&self, way: &Way, time: Duration) -> Figures {
        self.load(way, time, &[]).await
    }

    /// A small answer on a connection of its own, each time.
    pub async fn fresh(&self, way: &Way, time: Duration) -> Figures {
        self.load(way, time, &["--disable-keepalive"]).await
    }

    /// One large answer after the other. Says how many million bytes came in a second.
    pub async fn large(&self, way: &Way) -> f64 {
        let told = self.run(way, "/large", &["-n", "3", "-c", "1"]).await;
        number(&told, "/summary/sizePerSec") / 1e6
    }

    async fn load(&self, way: &Way, time: Duration, more: &[&str]) -> Figures {
        let (time, clients) = (format!("{}s", time.as_secs()), CLIENTS.to_string());
        // Without -w what is under way at the end counts as an error.
        let args = ["-z", &time, "-w", "-c", &clients];
        let told = self.run(way, "/small", &[&args, more].concat()).await;
        let rate = number(&told, "/summary/requestsPerSec");
        Figures {
            answers: rate * number(&told, "/summary/total"),
            rate,
            p50: number(&told, "/latencyPercentiles/p50") * 1e3,
            p99: number(&told, "/latencyPercentiles/p99") * 1e3,
        }
    }

    async fn run(&self, way: &Way, path: &str, args: &[&str]) -> Value {
        let direct = format!("{}:{}", way.name, way.at.port());
        let place = way.tunnel.as_ref().unwrap_or(&direct);
        let mut command = Command::new(self.binary);
        command
            .args(["--no-tui", "--http-version", "1.1"])
            .args(["--output-format", "json", "--cacert"])
            .arg(self.roots)
            .args(args);
        if way.tunnel.is_some() {
            // The name is for the proxy to look up; and its CONNECT has no Host by itself,
            // which the gate does not take (RFC 9112, 3.2).
            command.args(["--no-pre-lookup", "--proxy-header"]);
            command.arg(format!("host: {place}"));
            command.arg("-x").arg(format!("http://{}", way.at));
        } else {
            let to = format!("{direct}:{}:{}", way.at.ip(), way.at.port());
            command.arg("--connect-to").arg(to);
        }
        command.arg(format!("https://{place}{path}"));
        let ran = command.stderr(Stdio::inherit()).output().await.unwrap();
        assert!(ran.status.success(), "{}: {command:?}", ran.status);
        let told: Value = serde_json::from_slice(&ran.stdout).unwrap();
        assert_eq!(number(&told, "/summary/successRate"), 1.0, "{told:#}");
        let answers = told["statusCodeDistribution"].as_object().unwrap();
        assert!(answers.keys().eq(["200"]), "{answers:?}");
        told
    }
}

fn number(told: &Value, pointer: &str) -> f64 {
    told.pointer(pointer).and_then(Value::as_f64).unwrap()
}
