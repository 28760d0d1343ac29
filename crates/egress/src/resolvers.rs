//! Which resolvers the gate asks: those an operator named, and those of the system.
//!
//! They are read with the settings and not again until the next reload, which a change of
//! the system's file brings about.

use std::net::SocketAddr;

use config::leaf::DnsUpstream;
use config::section::egress::DnsSettings;
use hickory_resolver::system_conf::parse_resolv_conf;

/// Servers that are asked at all.
const MOST: usize = 8;

/// The resolvers in the order they are asked, or why there is none. That is an error of each
/// look-up and not of the gate: a laptop may start without a network. Blocks.
pub fn read(dns: &DnsSettings) -> Result<Vec<SocketAddr>, String> {
    let mut servers = Vec::new();
    for upstream in &dns.upstreams {
        match upstream {
            DnsUpstream::System => servers.extend(of_system(dns)?),
            DnsUpstream::Server(server) => servers.push(*server),
        }
    }
    servers.truncate(MOST);
    if servers.is_empty() {
        return Err("no resolver is configured: give egress.dns.upstreams an address".to_owned());
    }
    Ok(servers)
}

fn of_system(dns: &DnsSettings) -> Result<Vec<SocketAddr>, String> {
    let path = dns.resolv_conf.display();
    let unknown = |error: &dyn std::fmt::Display| {
        format!("the system's resolvers are unknown: {path}: {error}")
    };
    let bytes = std::fs::read(&dns.resolv_conf).map_err(|error| unknown(&error))?;
    let (system, _) = parse_resolv_conf(bytes).map_err(|error| unknown(&error))?;
    let servers = system.name_servers().iter().map(|server| {
        let port = server.connections.first().map_or(53, |first| first.port);
        SocketAddr::new(server.ip, port)
    });
    Ok(servers.collect())
}
