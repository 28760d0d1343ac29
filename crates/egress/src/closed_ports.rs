//! Audit records of connections to ports on which the gate does not listen.
//!
//! The kernel refuses such a connection, and no listener of the gate is notified. A raw socket in
//! the sandbox's network receives a copy of the SYN packet, so that the connection gets an audit
//! record.

use std::io::Result;
use std::net::{IpAddr, SocketAddr};
use std::num::{NonZeroU32, NonZeroU64};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use policy::audit::Kind;
use policy::bucket::{Rate, TokenBucket};
use policy::reason::Reason;
use policy::verdict::Denial;

use crate::datagram::DatagramSocket;
use crate::request_log::RequestLog;
use crate::sandbox_state::SandboxState;
use crate::services::Services;
use crate::source::reserve_record;
use crate::stage::Stage;

/// Records per sandbox: a hundred per second, with a burst. Further attempts of an agent that scans
/// ports are refused without a record.
const RECORD_RATE: Rate = Rate::every(
    NonZeroU64::new(10_000_000).unwrap(),
    NonZeroU32::new(200).unwrap(),
);

/// Size of the packet buffer: more than the longest IPv4 header with the TCP ports after it.
const MAX_PACKET: usize = 64;

/// Records the packets that `socket` receives, until it fails.
pub async fn watch(
    services: Arc<Services>,
    sandbox: Arc<SandboxState>,
    socket: OwnedFd,
) -> Result<()> {
    let packets = DatagramSocket::new(socket)?;
    let mut bucket = TokenBucket::new();
    let mut packet = [0; MAX_PACKET];
    loop {
        let (length, addresses) = packets.receive(&mut packet).await?;
        let packet = packet.get(..length).unwrap_or_default();
        let Some(port) = destination_port(addresses.destination, packet) else {
            continue;
        };
        if bucket.take(&RECORD_RATE, services.clock().tick()).is_err() {
            continue;
        }
        let destination = SocketAddr::new(addresses.destination.to_canonical(), port);
        record(&services, &sandbox, destination).await;
    }
}

async fn record(services: &Arc<Services>, sandbox: &Arc<SandboxState>, destination: SocketAddr) {
    let slot = reserve_record(Some(sandbox)).await;
    let mut log = RequestLog::begin(services, Some(sandbox), Kind::Http, slot);
    let name = services
        .name_server()
        .synthetic_name(sandbox.id(), destination.ip());
    let host = name.map_or_else(|| destination.ip().to_string(), |name| name.to_string());
    log.event.host = Some(host);
    log.event.port = Some(destination.port());
    let denial = Denial::new(Reason::PortDenied, "egress.transparent_ports").with_message(format!(
        "The gate does not listen on port {}. Use the proxy at palisade.internal:8080, or ask \
         the operator to add the port to egress.transparent_ports.",
        destination.port()
    ));
    log.record_refusal(Stage::Request, &denial);
}

/// The destination port of a packet. Over IPv4 the packet starts with the IP header (RFC 791, 3.1),
/// over IPv6 with the TCP header.
fn destination_port(destination: IpAddr, packet: &[u8]) -> Option<u16> {
    let header = match destination {
        IpAddr::V4(_) => usize::from(packet.first()? & 0x0f) * 4,
        IpAddr::V6(_) => 0,
    };
    let port = packet.get(header + 2..)?.first_chunk()?;
    Some(u16::from_be_bytes(*port))
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use super::*;

    #[test]
    fn destination_port_is_read_after_headers_of_any_length() {
        let tcp = [0xe1, 0xa2, 0x00, 0x16];
        let four = IpAddr::V4(Ipv4Addr::LOCALHOST);
        for words in [5_u8, 15] {
            let mut packet = vec![0; usize::from(words) * 4];
            packet[0] = 0x40 | words;
            packet.extend(tcp);
            assert_eq!(destination_port(four, &packet), Some(22));
            packet.pop();
            assert_eq!(destination_port(four, &packet), None);
        }
        let six = IpAddr::V6(Ipv6Addr::LOCALHOST);
        assert_eq!(destination_port(six, &tcp), Some(22));
        assert_eq!(destination_port(six, &tcp[..3]), None);
        assert_eq!(destination_port(four, &[]), None);
    }
}
