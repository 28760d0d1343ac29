//! `palisade ports`, and `--publish`.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use anyhow::Result;
use clap::Args;
use control::client::Client;
use sandbox::manager::row::PublishedPort;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::cli::Global;
use crate::cli::sandbox_lookup::{self, Place};
use crate::cli::sandboxes::{below, in_words};
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

/// What the gate tells of a sandbox's ports.
#[derive(Deserialize)]
struct Ports {
    /// Ports with a listener in the sandbox, where that is known.
    open: Option<Vec<u16>>,
    /// Why it is not.
    reason: Option<String>,
    published: Vec<PublishedPort>,
}

pub fn run(args: &PortsArgs, global: &Global) -> Result<crate::exit::Exit> {
    in_words("ports", global, async |gate| {
        let place = sandbox_lookup::find(gate, &args.name).await?;
        for host in &args.unpublish {
            let back = PublishedPort {
                host: *host,
                port: 0,
            };
            publish(gate, &place, back).await?;
        }
        for published in &args.publish {
            publish(gate, &place, *published).await?;
        }
        let ports = gate.get(&below(&place, "ports")).await?;
        let told = describe(&ports)?;
        Ok((ports, told))
    })
}

/// Publishes a port, or takes it back.
pub async fn publish(gate: &Client, place: &Place, published: PublishedPort) -> Result<()> {
    gate.post(&below(place, "ports"), &json!(published)).await?;
    Ok(())
}

/// A row for each port inside that is open or published.
fn describe(ports: &Value) -> Result<String> {
    let Ports {
        open,
        reason,
        published,
    } = serde_json::from_value(ports.clone())?;
    if let Some(reason) = reason {
        output::say(&format!(
            "palisade: which ports are open inside is not known: {}",
            output::safe(&reason)
        ));
    }
    let is_open = |port: &u16| open.as_ref().map(|open| open.contains(port));
    let mut all: BTreeSet<u16> = published.iter().map(|one| one.port).collect();
    all.extend(open.iter().flatten());
    let row = |port: &u16| {
        let inside = match is_open(port) {
            Some(true) => "open",
            Some(false) => "nothing is listening",
            None => "not known",
        };
        let hosts: Vec<String> = published
            .iter()
            .filter(|one| one.port == *port)
            .map(|one| one.host.to_string())
            .collect();
        vec![port.to_string(), inside.to_owned(), hosts.join(", ")]
    };
    let rows: Vec<Vec<String>> = all.iter().map(row).collect();
    Ok(match (rows.is_empty(), open) {
        (false, _) => output::table(&["PORT", "INSIDE", "PUBLISHED AT"], &rows),
        (true, Some(_)) => {
            "Nothing is listening in the sandbox, and no port is published".to_owned()
        }
        (true, None) => "nothing is published".to_owned(),
    })
}

/// Reads `PORT`, `HOSTPORT:PORT` or `ADDRESS:HOSTPORT:PORT`.
pub fn read(text: &str) -> Result<PublishedPort, String> {
    let number = |text: &str| {
        text.parse::<u16>()
            .ok()
            .filter(|port| *port > 0)
            .ok_or_else(|| format!("'{text}' is not a port"))
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
        Err(format!("{host} is not on this machine's loopback"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_publication_is_one_two_or_three_parts() {
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
