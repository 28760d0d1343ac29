//! `palisade ports`, and `--publish`.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use anyhow::Result;
use clap::Args;
use control::client::ControlClient;
use sandbox::manager::row::PublishedPort;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::cli::Global;
use crate::cli::sandbox_lookup::{self, SandboxInfo};
use crate::cli::sandboxes::{run_and_print, subroute};
use crate::output;

#[derive(Debug, Args)]
pub struct PortsArgs {
    /// Sandbox name
    pub name: String,
    /// Forward 127.0.0.1:HOST to PORT in the sandbox (repeatable)
    #[arg(long, short, value_name = "HOST:PORT", value_parser = read)]
    pub publish: Vec<PublishedPort>,
    /// Stop publishing a host port
    #[arg(long, short, value_name = "HOST", value_parser = read_host)]
    pub unpublish: Vec<SocketAddr>,
}

/// The gate's response about a sandbox's ports.
#[derive(Deserialize)]
struct PortReport {
    /// Ports with a listener in the sandbox, if known.
    open: Option<Vec<u16>>,
    /// Why the open ports are not known.
    reason: Option<String>,
    published: Vec<PublishedPort>,
}

pub fn run(args: &PortsArgs, global: &Global) -> Result<crate::exit::CliExit> {
    run_and_print("ports", global, async |gate| {
        let sandbox = sandbox_lookup::find(gate, &args.name).await?;
        for host in &args.unpublish {
            let unpublished = PublishedPort {
                host: *host,
                port: 0,
            };
            publish(gate, &sandbox, unpublished).await?;
        }
        for published in &args.publish {
            publish(gate, &sandbox, *published).await?;
        }
        let ports = gate.get(&subroute(&sandbox, "ports")).await?;
        let text = describe(&ports)?;
        Ok((ports, text))
    })
}

/// Publishes a port; port 0 unpublishes the address.
pub async fn publish(
    gate: &ControlClient,
    sandbox: &SandboxInfo,
    published: PublishedPort,
) -> Result<()> {
    gate.post(&subroute(sandbox, "ports"), &json!(published))
        .await?;
    Ok(())
}

/// A table of the ports that are open in the sandbox or published.
fn describe(ports: &Value) -> Result<String> {
    let PortReport {
        open,
        reason,
        published,
    } = serde_json::from_value(ports.clone())?;
    if let Some(reason) = reason {
        output::print_message(&format!(
            "palisade: the open ports of the sandbox are unknown: {}",
            output::safe(&reason)
        ));
    }
    let is_open = |port: &u16| open.as_ref().map(|open| open.contains(port));
    let mut all: BTreeSet<u16> = published.iter().map(|published| published.port).collect();
    all.extend(open.iter().flatten());
    let row = |port: &u16| {
        let state = match is_open(port) {
            Some(true) => "open",
            Some(false) => "nothing is listening",
            None => "unknown",
        };
        let hosts: Vec<String> = published
            .iter()
            .filter(|published| published.port == *port)
            .map(|published| published.host.to_string())
            .collect();
        vec![port.to_string(), state.to_owned(), hosts.join(", ")]
    };
    let rows: Vec<Vec<String>> = all.iter().map(row).collect();
    Ok(match (rows.is_empty(), open) {
        (false, _) => output::table(&["PORT", "SANDBOX", "PUBLISHED ON"], &rows),
        (true, Some(_)) => {
            "Nothing is listening in the sandbox, and no port is published".to_owned()
        }
        (true, None) => "no port is published".to_owned(),
    })
}

/// Reads `PORT`, `HOSTPORT:PORT` or `ADDRESS:HOSTPORT:PORT`.
pub fn read(text: &str) -> Result<PublishedPort, String> {
    let number = |text: &str| {
        text.parse::<u16>()
            .ok()
            .filter(|port| *port > 0)
            .ok_or_else(|| format!("'{text}' is not a port number from 1 to 65535"))
    };
    match text.rsplit_once(':') {
        None => {
            let port = number(text)?;
            let host = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port);
            Ok(PublishedPort { host, port })
        }
        Some((host, port)) => Ok(PublishedPort {
            host: read_host(host)?,
            port: number(port)?,
        }),
    }
}

/// Reads `HOSTPORT` or `ADDRESS:HOSTPORT`, on the loopback.
fn read_host(text: &str) -> Result<SocketAddr, String> {
    let host = match text.parse::<u16>() {
        Ok(port) => SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port),
        Err(_) => text
            .parse::<SocketAddr>()
            .map_err(|_| format!("'{text}' is neither a port nor an address with a port"))?,
    };
    if host.ip().is_loopback() {
        Ok(host)
    } else {
        Err(format!(
            "{host} is not a loopback address; use 127.0.0.1 or [::1]"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn publish_argument_has_one_two_or_three_parts() {
        for (text, host, port) in [
            ("3000", "127.0.0.1:3000", 3000),
            ("8080:3000", "127.0.0.1:8080", 3000),
            ("0:3000", "127.0.0.1:0", 3000),
            ("127.0.0.2:8080:3000", "127.0.0.2:8080", 3000),
            ("[::1]:8080:3000", "[::1]:8080", 3000),
        ] {
            let host = host.parse().unwrap();
            assert_eq!(read(text), Ok(PublishedPort { host, port }), "{text}");
        }
        for text in [
            "",
            "0",
            "x",
            "8080:0",
            "8080:x",
            "0.0.0.0:8080:3000",
            "70000:1",
            "a:1:2",
        ] {
            assert!(read(text).is_err(), "{text}");
        }
    }
}
