//! Addresses and hosts.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use policy::host::{Authority, Host, HostPattern};

use super::{Format, Leaf, impl_leaf, require, without_detail};

impl Format for SocketAddr {
    const NAME: &'static str = "socket-address";
    const DESCRIPTION: &'static str =
        "an address and port such as 127.0.0.1:8090, [::1]:8090 or :8090";
    const ADDRESS: bool = true;

    fn check(text: &str) -> Result<(), String> {
        Self::read(text).map(drop)
    }
}

impl Leaf for SocketAddr {
    /// `:8090` means every address, IPv4 and IPv6; `localhost` is 127.0.0.1.
    fn read(text: &str) -> Result<Self, String> {
        if let Ok(address) = text.parse() {
            return Ok(address);
        }
        let (host, port) = without_detail(text.rsplit_once(':'))?;
        if port.is_empty() || !port.bytes().all(|b| b.is_ascii_digit()) {
            return Err(String::new());
        }
        let port = port
            .parse()
            .map_err(|_| "a port is at most 65535".to_owned())?;
        match host {
            "" => Ok(Self::new(Ipv6Addr::UNSPECIFIED.into(), port)),
            "localhost" => Ok(Self::new(Ipv4Addr::LOCALHOST.into(), port)),
            _ => Err(String::new()),
        }
    }

    fn write(&self) -> String {
        self.to_string()
    }
}

impl_leaf! {
    Host, "host", "a host name or address", ADDRESS;
    HostPattern, "host-pattern", "a host such as example.com, *.example.com or an address", ADDRESS;
    Authority, "authority", "a host, or a host and port such as example.com:443", ADDRESS;
}

/// A range of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cidr {
    address: IpAddr,
    prefix: u8,
}

impl Cidr {
    /// Whether `ip` is in the range. An IPv4-mapped IPv6 address counts as the IPv4 address.
    pub fn contains(&self, ip: IpAddr) -> bool {
        match (self.address, ip.to_canonical()) {
            (IpAddr::V4(net), IpAddr::V4(ip)) => {
                let mask = u32::MAX
                    .checked_shl(32 - u32::from(self.prefix))
                    .unwrap_or(0);
                u32::from(net) & mask == u32::from(ip) & mask
            }
            (IpAddr::V6(net), IpAddr::V6(ip)) => {
                let mask = u128::MAX
                    .checked_shl(128 - u32::from(self.prefix))
                    .unwrap_or(0);
                u128::from(net) & mask == u128::from(ip) & mask
            }
            _ => false,
        }
    }
}

impl Format for Cidr {
    const NAME: &'static str = "cidr";
    const DESCRIPTION: &'static str = "a range of addresses such as 10.1.0.0/16 or fd00::/8";

    fn check(text: &str) -> Result<(), String> {
        Self::read(text).map(drop)
    }
}

impl Leaf for Cidr {
    /// A single address is a range of one. Bits below the prefix are refused, because 10.1.2.3/16
    /// may be meant as 10.1.0.0/16 or as 10.1.2.3.
    fn read(text: &str) -> Result<Self, String> {
        let (address, prefix) = match text.split_once('/') {
            Some((address, prefix)) => (address, Some(prefix)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().map_err(|_| String::new())?;
        let widest = if address.is_ipv4() { 32 } else { 128 };
        let prefix = match prefix {
            None => widest,
            Some(prefix) => {
                let clean = prefix.bytes().all(|b| b.is_ascii_digit());
                without_detail(prefix.parse::<u8>().ok().filter(|p| clean && *p <= widest))?
            }
        };
        let first = match address {
            IpAddr::V4(ip) => {
                let mask = u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0);
                IpAddr::V4((u32::from(ip) & mask).into())
            }
            IpAddr::V6(ip) => {
                let mask = u128::MAX.checked_shl(128 - u32::from(prefix)).unwrap_or(0);
                IpAddr::V6((u128::from(ip) & mask).into())
            }
        };
        if first == address {
            Ok(Self { address, prefix })
        } else {
            Err(format!("did you mean {first}/{prefix}?"))
        }
    }

    fn write(&self) -> String {
        format!("{}/{}", self.address, self.prefix)
    }
}

/// A resolver for `egress.dns.upstreams`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DnsUpstream {
    /// The resolvers of the host.
    System,
    /// The resolver at this address.
    Server(SocketAddr),
}

impl Format for DnsUpstream {
    const NAME: &'static str = "dns-upstream";
    const DESCRIPTION: &'static str = "'system' or the address of a resolver such as 192.0.2.53";
    const ADDRESS: bool = true;

    fn check(text: &str) -> Result<(), String> {
        Self::read(text).map(drop)
    }
}

impl Leaf for DnsUpstream {
    fn read(text: &str) -> Result<Self, String> {
        if text == "system" {
            return Ok(Self::System);
        }
        let address = match text.parse::<IpAddr>() {
            Ok(ip) => SocketAddr::new(ip, 53),
            Err(_) => text.parse().map_err(|_| String::new())?,
        };
        Ok(Self::Server(address))
    }

    fn write(&self) -> String {
        match self {
            Self::System => "system".to_owned(),
            Self::Server(address) => address.to_string(),
        }
    }
}

/// The name of a DNS record type.
pub(crate) struct DnsType;

impl Format for DnsType {
    const NAME: &'static str = "dns-type";
    const DESCRIPTION: &'static str = "a DNS record type such as TXT, MX or SRV";

    fn check(text: &str) -> Result<(), String> {
        require(
            (1..=16).contains(&text.len())
                && text.starts_with(|c: char| c.is_ascii_uppercase())
                && text
                    .bytes()
                    .all(|b| b.is_ascii_uppercase() || b.is_ascii_digit()),
        )
    }
}
