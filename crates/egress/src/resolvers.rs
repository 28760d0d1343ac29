//! List of upstream DNS resolvers, from the settings and the system's resolv.conf.
//!
//! The list is read with the settings and at each reload. A change of the system's file causes a
//! reload.

use std::net::SocketAddr;

use config::leaf::DnsUpstream;
use config::section::egress::DnsSettings;
use hickory_resolver::system_conf::parse_resolv_conf;

/// Most resolvers that are used.
const MAX_RESOLVERS: usize = 8;

/// The resolvers in order of use, or why there are none. The error fails each query and not the
/// gate, because a laptop may start without a network. Blocks.
pub fn read(dns: &DnsSettings) -> Result<Vec<SocketAddr>, String> {
    let mut servers = Vec::new();
    for upstream in &dns.upstreams {
        match upstream {
            DnsUpstream::System => servers.extend(read_system(dns)?),
            DnsUpstream::Server(server) => servers.push(*server),
        }
    }
    servers.truncate(MAX_RESOLVERS);
    if servers.is_empty() {
        return Err("no DNS resolver is configured: set egress.dns.upstreams".to_owned());
    }
    Ok(servers)
}

fn read_system(dns: &DnsSettings) -> Result<Vec<SocketAddr>, String> {
    let path = dns.resolv_conf.display();
    let failed = |error: &dyn std::fmt::Display| {
        format!("reading the system's DNS resolvers failed: {path}: {error}")
    };
    let bytes = std::fs::read(&dns.resolv_conf).map_err(|error| failed(&error))?;
    let (system, _) = parse_resolv_conf(bytes).map_err(|error| failed(&error))?;
    let servers = system.name_servers().iter().map(|server| {
        let port = server.connections.first().map_or(53, |first| first.port);
        SocketAddr::new(server.ip, port)
    });
    Ok(servers.collect())
}
