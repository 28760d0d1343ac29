//! Host names and IP addresses, normalised for comparison with rules.
//!
//! Every host from outside is parsed by [`Host::parse`] once. The result is either a lower case
//! ASCII name without a trailing dot, or an address; never a name that some resolver would read as
//! an address. This follows the 'ends in a number' rule of the WHATWG URL standard, because
//! browsers, libc and the gate must agree on what `0x7f.1` is.

use std::borrow::{Borrow, Cow};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use idna::uts46::{AsciiDenyList, DnsLength, Hyphens, Uts46};

/// The host name of the gate itself.
pub const GATE_HOST: &str = "palisade.internal";

/// A normalised host: a name or an address.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Host {
    /// A DNS name.
    Name(HostName),
    /// An address. An IPv4-mapped IPv6 address becomes the IPv4 address; other IPv6 addresses that
    /// embed an IPv4 address (NAT64, 6to4) are not converted, because they are routed differently.
    /// [`classify`] uses the embedded address.
    Ip(IpAddr),
}

/// A DNS name: lower case ASCII, no trailing dot, not readable as an address. Only this module
/// creates one. Cloning is cheap.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostName(Arc<str>);

/// Why a host, an authority or a host pattern is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadHost {
    /// Empty, or only a dot.
    #[error("a host must not be empty")]
    Empty,
    /// Longer than DNS allows.
    #[error("a host name has at most 253 characters")]
    TooLong,
    /// A label longer than DNS allows.
    #[error("a label of a host name has at most 63 characters")]
    LabelTooLong,
    /// Two dots in a row, or one at the start.
    #[error("a host name must not contain an empty label ('..' or a leading dot)")]
    EmptyLabel,
    /// A character that is not allowed in host names.
    #[error("a host name must not contain {0:?}")]
    Forbidden(char),
    /// A leading hyphen: programs would read the name as an option.
    #[error("a host name must not start with '-'")]
    LeadingHyphen,
    /// The name is invalid according to UTS-46.
    #[error("the name is not a valid internationalised host name")]
    NotIdna,
    /// `user@host`.
    #[error("user information ('user@') is not accepted in front of a host")]
    UserInfo,
    /// A percent sign that does not start a zone id.
    #[error("a host name must not contain percent-encoding")]
    Percent,
    /// `fe80::1%eth0`.
    #[error("an IPv6 address must not contain a zone id ('%')")]
    ZoneId,
    /// The host ends in a number but is not an IPv4 address.
    #[error("a host that ends in a number must be an IPv4 address, and this is not one")]
    BadIpv4,
    /// The host has colons or brackets but is not an IPv6 address.
    #[error("the text is not an IPv6 address")]
    BadIpv6,
    /// A URL instead of a host.
    #[error("a URL is not accepted here: give the host alone, without scheme and path")]
    Url,
    /// A host with a port instead of a host alone.
    #[error("a port is not accepted here: give the host alone")]
    UnexpectedPort,
    /// An invalid port number.
    #[error("a port is a number from 1 to 65535")]
    BadPort,
    /// `*` alone.
    #[error("'*' alone would match every host: name the hosts, or use '*.example.com'")]
    BareWildcard,
    /// A star that is not the whole first label.
    #[error("'*' may only stand as the whole first label, as in '*.example.com'")]
    WildcardPlace,
    /// `*.com`.
    #[error("'*.{0}' would match everything under a top-level domain: name at least two labels")]
    WildcardOverTopLevel(String),
    /// `*.1.2.3.4`.
    #[error("a wildcard cannot stand in front of an address")]
    WildcardOverAddress,
}

/// Maximum length of text to parse: a name of 253 characters, each in its longest encoding.
const MAX_TEXT_LEN: usize = 253 * 6;

impl Host {
    /// Whether this is the gate itself.
    pub fn is_gate(&self) -> bool {
        self.as_name()
            .is_some_and(|name| name.as_str() == GATE_HOST)
    }

    /// Normalises `text`: a name, an IPv4 address in any form that `inet_aton` accepts, or an
    /// IPv6 address with or without brackets.
    pub fn parse(text: &str) -> Result<Self, BadHost> {
        if text.len() > MAX_TEXT_LEN {
            return Err(BadHost::TooLong);
        }
        if text.starts_with('[') || text.contains(':') {
            return parse_ipv6(text);
        }
        let name = normalise_name(text)?;
        if ends_in_number(&name) {
            return parse_ipv4(&name)
                .map(|ip| Host::Ip(ip.into()))
                .ok_or(BadHost::BadIpv4);
        }
        Ok(Host::Name(HostName(name.as_ref().into())))
    }

    /// The address, if the host is one.
    pub fn as_ip(&self) -> Option<IpAddr> {
        match self {
            Host::Name(_) => None,
            Host::Ip(ip) => Some(*ip),
        }
    }

    /// The name, if the host is one.
    pub fn as_name(&self) -> Option<&HostName> {
        match self {
            Host::Name(name) => Some(name),
            Host::Ip(_) => None,
        }
    }
}

/// Formats the host as in a URL: an IPv6 address is in brackets.
impl std::fmt::Display for Host {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Host::Name(name) => f.write_str(name.as_str()),
            Host::Ip(IpAddr::V4(ip)) => write!(f, "{ip}"),
            Host::Ip(IpAddr::V6(ip)) => write!(f, "[{ip}]"),
        }
    }
}

impl HostName {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether the name is a subdomain of `suffix`, at any depth. A name is not a subdomain of
    /// itself.
    pub fn is_subdomain_of(&self, suffix: &HostName) -> bool {
        self.0
            .strip_suffix(suffix.as_str())
            .is_some_and(|front| front.ends_with('.'))
    }
}

/// Allows lookups in a table of names by `&str`, without allocating a name.
impl Borrow<str> for HostName {
    fn borrow(&self) -> &str {
        self.as_str()
    }
}

impl std::fmt::Display for HostName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// A host with an optional port, as in CONNECT, `Host` and `:authority`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Authority {
    /// The host.
    pub host: Host,
    /// The port, if there is one.
    pub port: Option<u16>,
}

impl Authority {
    /// Parses `host`, `host:port`, `[v6]` or `[v6]:port`. User information is rejected, and so is
    /// an IPv6 address without brackets, whose port would be ambiguous.
    pub fn parse(text: &str) -> Result<Self, BadHost> {
        if text.contains('@') {
            return Err(BadHost::UserInfo);
        }
        let (host, port) = if text.starts_with('[') {
            let end = text.find(']').ok_or(BadHost::BadIpv6)?;
            let (host, rest) = text.split_at(end + 1);
            match rest.strip_prefix(':') {
                Some(port) => (host, Some(port)),
                None if rest.is_empty() => (host, None),
                None => return Err(BadHost::BadIpv6),
            }
        } else {
            match text.split_once(':') {
                Some((_, rest)) if rest.contains(':') => return Err(BadHost::BadIpv6),
                Some((host, port)) => (host, Some(port)),
                None => (text, None),
            }
        };
        let port = port.map(parse_port).transpose()?;
        Ok(Self {
            host: Host::parse(host)?,
            port,
        })
    }
}

impl std::fmt::Display for Authority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.port {
            Some(port) => write!(f, "{}:{port}", self.host),
            None => write!(f, "{}", self.host),
        }
    }
}

/// A pattern of hosts in the configuration.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HostPattern {
    /// This name only.
    Exact(HostName),
    /// Every subdomain of this name, at any depth, but not the name itself.
    Wildcard(HostName),
    /// This address, in any notation.
    Ip(IpAddr),
    /// Every name, but no address. Files cannot contain this pattern; the rule that lets a sandbox
    /// read everywhere has it.
    Any,
}

impl HostPattern {
    /// Parses `example.com`, `*.example.com` or an address.
    ///
    /// A wildcard needs at least two labels after the star. Public suffixes such as `*.co.uk` are
    /// not detected, because their list changes often.
    pub fn parse(text: &str) -> Result<Self, BadHost> {
        if text == "*" || text == "*." {
            return Err(BadHost::BareWildcard);
        }
        let Some(suffix) = text.strip_prefix("*.") else {
            if text.contains('*') {
                return Err(BadHost::WildcardPlace);
            }
            return Ok(match Host::parse(text)? {
                Host::Name(name) => HostPattern::Exact(name),
                Host::Ip(ip) => HostPattern::Ip(ip),
            });
        };
        if suffix.contains('*') {
            return Err(BadHost::WildcardPlace);
        }
        match Host::parse(suffix)? {
            Host::Ip(_) => Err(BadHost::WildcardOverAddress),
            Host::Name(name) if !name.as_str().contains('.') => {
                Err(BadHost::WildcardOverTopLevel(name.as_str().to_owned()))
            }
            Host::Name(name) => Ok(HostPattern::Wildcard(name)),
        }
    }

    /// Whether the pattern matches `host`.
    pub fn matches(&self, host: &Host) -> bool {
        match (self, host) {
            (HostPattern::Exact(name), Host::Name(host)) => name == host,
            (HostPattern::Wildcard(suffix), Host::Name(host)) => host.is_subdomain_of(suffix),
            (HostPattern::Ip(ip), Host::Ip(host)) => ip == host,
            (HostPattern::Any, Host::Name(_)) => true,
            (HostPattern::Ip(_), Host::Name(_))
            | (HostPattern::Exact(_) | HostPattern::Wildcard(_) | HostPattern::Any, Host::Ip(_)) => {
                false
            }
        }
    }

    /// Whether this pattern matches every host that `other` matches.
    pub fn covers(&self, other: &HostPattern) -> bool {
        match (self, other) {
            (HostPattern::Wildcard(wide), HostPattern::Exact(name)) => name.is_subdomain_of(wide),
            (HostPattern::Wildcard(wide), HostPattern::Wildcard(narrow)) => {
                wide == narrow || narrow.is_subdomain_of(wide)
            }
            (HostPattern::Any, HostPattern::Ip(_)) => false,
            (HostPattern::Any, _) => true,
            (one, other) => one == other,
        }
    }
}

impl std::fmt::Display for HostPattern {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            HostPattern::Exact(name) => write!(f, "{name}"),
            HostPattern::Wildcard(suffix) => write!(f, "*.{suffix}"),
            HostPattern::Ip(ip) => write!(f, "{ip}"),
            HostPattern::Any => f.write_str("*"),
        }
    }
}

/// The class of an address. The dialer refuses all classes but [`AddressClass::Global`], unless
/// the operator configured an exception for the exact address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AddressClass {
    /// The public internet. Documentation ranges count as public, so that tests can use them;
    /// they are not routed.
    Global,
    /// This host.
    Loopback,
    /// 0.0.0.0/8 and `::`, which many systems treat as this host.
    ThisNetwork,
    /// RFC 1918.
    Private,
    /// fc00::/7.
    UniqueLocal,
    /// fec0::/10, deprecated but still routed in some networks.
    SiteLocal,
    /// 169.254.0.0/16 and fe80::/10.
    LinkLocal,
    /// Metadata services of clouds, which hand out credentials without authentication.
    Metadata,
    /// 100.64.0.0/10, carrier-grade NAT.
    CarrierNat,
    /// 198.18.0.0/15 and 2001:2::/48. The gate's synthetic DNS answers are in this range.
    Benchmark,
    /// Multicast groups.
    Multicast,
    /// Ranges without assigned hosts.
    Reserved,
}

impl AddressClass {
    /// Whether the dialer may connect without an exception.
    pub const fn is_dialable(self) -> bool {
        matches!(self, AddressClass::Global)
    }

    /// The name of the class, for messages and audit records.
    pub const fn as_str(self) -> &'static str {
        match self {
            AddressClass::Global => "global",
            AddressClass::Loopback => "loopback",
            AddressClass::ThisNetwork => "this network",
            AddressClass::Private => "private",
            AddressClass::UniqueLocal => "unique local",
            AddressClass::SiteLocal => "site local",
            AddressClass::LinkLocal => "link local",
            AddressClass::Metadata => "cloud metadata",
            AddressClass::CarrierNat => "carrier NAT",
            AddressClass::Benchmark => "benchmark",
            AddressClass::Multicast => "multicast",
            AddressClass::Reserved => "reserved",
        }
    }
}

/// Classifies `ip`. An IPv6 address that embeds an IPv4 address (mapped, compatible, translated,
/// NAT64, 6to4, Teredo) has the class of the embedded address, because a router may translate it.
pub fn classify(ip: IpAddr) -> AddressClass {
    match ip {
        IpAddr::V4(ip) => classify_v4(ip),
        IpAddr::V6(ip) => classify_v6(ip),
    }
}

fn classify_v4(ip: Ipv4Addr) -> AddressClass {
    match ip.octets() {
        // Metadata services, in the order of the patterns: most clouds; container and pod
        // credentials; Azure; Alibaba Cloud; Oracle Cloud.
        [169, 254, 169, 254 | 253 | 123]
        | [169, 254, 170, 2 | 23]
        | [168, 63, 129, 16]
        | [100, 100, 100, 200]
        | [192, 0, 0, 192] => AddressClass::Metadata,
        [0, ..] => AddressClass::ThisNetwork,
        [127, ..] => AddressClass::Loopback,
        [10, ..] | [172, 16..=31, ..] | [192, 168, ..] => AddressClass::Private,
        [169, 254, ..] => AddressClass::LinkLocal,
        [100, 64..=127, ..] => AddressClass::CarrierNat,
        [198, 18..=19, ..] => AddressClass::Benchmark,
        [224..=239, ..] => AddressClass::Multicast,
        // Protocol assignments, the deprecated 6to4 relay, and class E with broadcast.
        [192, 0, 0, _] | [192, 88, 99, _] | [240..=255, ..] => AddressClass::Reserved,
        _ => AddressClass::Global,
    }
}

fn classify_v6(ip: Ipv6Addr) -> AddressClass {
    if ip.is_unspecified() {
        return AddressClass::ThisNetwork;
    }
    if ip.is_loopback() {
        return AddressClass::Loopback;
    }
    let bits = ip.to_bits();
    match ip.segments() {
        // Compatible (::/96), mapped (::ffff:0:0/96), translated (::ffff:0:0:0/96), NAT64.
        [0, 0, 0, 0, 0, 0, ..]
        | [0, 0, 0, 0, 0, 0xffff, ..]
        | [0, 0, 0, 0, 0xffff, 0, ..]
        | [0x64, 0xff9b, 0, 0, 0, 0, ..] => classify_v4(embedded(bits, 96)),
        // NAT64 for local use (RFC 8215): each network chooses the prefix length, and so the
        // position of the address (RFC 6052, 2.2). The addresses at all positions must be global;
        // a translator drops 0/8, so zeros mean that the position is not the one in use.
        [0x64, 0xff9b, 1, ..] => [embedded_48(bits), embedded_56(bits), embedded_64(bits)]
            .into_iter()
            .map(classify_v4)
            .filter(|class| *class != AddressClass::ThisNetwork)
            .chain([classify_v4(embedded(bits, 96))])
            .find(|class| !class.is_dialable())
            .unwrap_or(AddressClass::Global),
        [0x2002, ..] => classify_v4(embedded(bits, 16)),
        // Teredo embeds the address of its server, and that of its client with all bits inverted.
        [0x2001, 0, ..] => [embedded(bits, 32), embedded(!bits, 96)]
            .into_iter()
            .map(classify_v4)
            .find(|class| !class.is_dialable())
            .unwrap_or(AddressClass::Global),
        [0x2001, 2, 0, ..] => AddressClass::Benchmark,
        // The rest of the protocol assignments, 2001::/23.
        [0x2001, 0..=0x1ff, ..] => AddressClass::Reserved,
        [0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254]
        | [0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254]
        | [0xfd00, 0x42, 0, 0, 0, 0, 0, 0x42] => AddressClass::Metadata,
        [0xfc00..=0xfdff, ..] => AddressClass::UniqueLocal,
        [0xfe80..=0xfebf, ..] => AddressClass::LinkLocal,
        [0xfec0..=0xfeff, ..] => AddressClass::SiteLocal,
        [0xff00..=0xffff, ..] => AddressClass::Multicast,
        // Global unicast is 2000::/3; the rest is not assigned.
        [0x2000..=0x3fff, ..] => AddressClass::Global,
        _ => AddressClass::Reserved,
    }
}

/// The 32 bits that start at bit `at`, counted from the left.
const fn embedded(bits: u128, at: u32) -> Ipv4Addr {
    let [a, b, c, d, ..] = (bits << at).to_be_bytes();
    Ipv4Addr::new(a, b, c, d)
}

/// RFC 6052: the embedded address skips bits 64 to 71, which are zero.
const fn embedded_48(bits: u128) -> Ipv4Addr {
    let [a, b, _, c, d, ..] = (bits << 48).to_be_bytes();
    Ipv4Addr::new(a, b, c, d)
}

const fn embedded_56(bits: u128) -> Ipv4Addr {
    let [a, _, b, c, d, ..] = (bits << 56).to_be_bytes();
    Ipv4Addr::new(a, b, c, d)
}

const fn embedded_64(bits: u128) -> Ipv4Addr {
    embedded(bits, 72)
}

fn normalise_name(text: &str) -> Result<Cow<'_, str>, BadHost> {
    let mapped = if is_normalised(text) {
        Cow::Borrowed(text)
    } else {
        map_name(text)?
    };
    // Checked after the mapping, because full-width characters map to dots and hyphens too.
    let name = match mapped {
        Cow::Borrowed(name) => Cow::Borrowed(name.strip_suffix('.').unwrap_or(name)),
        Cow::Owned(mut name) => {
            if name.ends_with('.') {
                name.pop();
            }
            Cow::Owned(name)
        }
    };
    if name.is_empty() {
        return Err(BadHost::Empty);
    }
    if name.starts_with('-') {
        return Err(BadHost::LeadingHyphen);
    }
    if name.len() > 253 {
        return Err(BadHost::TooLong);
    }
    for label in name.split('.') {
        match label.len() {
            0 => return Err(BadHost::EmptyLabel),
            1..=63 => {}
            _ => return Err(BadHost::LabelTooLong),
        }
        if let Some(bad) = label.bytes().find(|b| !is_name_byte(*b)) {
            return Err(BadHost::Forbidden(bad.into()));
        }
    }
    Ok(name)
}

/// Whether UTS-46 would not change the name. This is the fast path for most names.
fn is_normalised(text: &str) -> bool {
    text.bytes().all(|b| is_name_byte(b) || b == b'.')
        && !text.split('.').any(|label| label.starts_with("xn--"))
}

fn map_name(text: &str) -> Result<Cow<'_, str>, BadHost> {
    if let Some(bad) = text
        .chars()
        .find(|c| c.is_control() || c.is_whitespace() || matches!(c, '\\' | '/' | '@' | '%'))
    {
        return Err(match bad {
            '@' => BadHost::UserInfo,
            '%' => BadHost::Percent,
            other => BadHost::Forbidden(other),
        });
    }
    // Hyphens at the third and fourth position (`r3---sn.example`) and underscores (service
    // names) are common, and the strict profile (STD3) would refuse both.
    Uts46::new()
        .to_ascii(
            text.as_bytes(),
            AsciiDenyList::URL,
            Hyphens::Allow,
            DnsLength::Ignore,
        )
        .map_err(|_| BadHost::NotIdna)
}

const fn is_name_byte(byte: u8) -> bool {
    matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_')
}

/// The WHATWG rule: the last label is all digits, or a hexadecimal number.
fn ends_in_number(name: &str) -> bool {
    let last = name.rsplit('.').next().unwrap_or(name);
    last.bytes().all(|b| b.is_ascii_digit())
        || last
            .strip_prefix("0x")
            .is_some_and(|hex| hex.bytes().all(|b| b.is_ascii_hexdigit()))
}

/// Parses like `inet_aton`: one to four numbers, decimal, octal or hexadecimal, of which the last
/// one fills all remaining bytes.
fn parse_ipv4(name: &str) -> Option<Ipv4Addr> {
    let mut parts = name.split('.');
    let last = parts.next_back()?;
    let mut value: u32 = 0;
    let mut left: u32 = 32;
    for part in parts {
        left = left.checked_sub(8).filter(|left| *left > 0)?;
        let byte = parse_number(part).filter(|number| *number <= 255)?;
        value |= u32::try_from(byte).ok()? << left;
    }
    let rest = parse_number(last).filter(|number| *number < 1 << left)?;
    Some(Ipv4Addr::from_bits(value | u32::try_from(rest).ok()?))
}

fn parse_number(text: &str) -> Option<u64> {
    let (digits, radix) = if let Some(hex) = text.strip_prefix("0x") {
        (hex, 16)
    } else if text.len() > 1 && text.starts_with('0') {
        (text, 8)
    } else {
        (text, 10)
    };
    if digits.is_empty() {
        // `inet_aton` reads `0x` as zero.
        return (radix == 16).then_some(0);
    }
    if !digits.bytes().all(|b| b.is_ascii_alphanumeric()) {
        return None;
    }
    u64::from_str_radix(digits, radix).ok()
}

fn parse_ipv6(text: &str) -> Result<Host, BadHost> {
    let inner = match text.strip_prefix('[') {
        Some(rest) => rest.strip_suffix(']').ok_or(BadHost::BadIpv6)?,
        None => text,
    };
    if inner.contains("://") {
        return Err(BadHost::Url);
    }
    if inner.contains('%') {
        return Err(BadHost::ZoneId);
    }
    if inner.contains('@') {
        return Err(BadHost::UserInfo);
    }
    match inner.parse::<Ipv6Addr>() {
        Ok(ip) => Ok(Host::Ip(IpAddr::V6(ip).to_canonical())),
        Err(_) if inner.bytes().filter(|b| *b == b':').count() == 1 && inner == text => {
            Err(BadHost::UnexpectedPort)
        }
        Err(_) => Err(BadHost::BadIpv6),
    }
}

fn parse_port(text: &str) -> Result<u16, BadHost> {
    if text.is_empty() || text.len() > 5 || !text.bytes().all(|b| b.is_ascii_digit()) {
        return Err(BadHost::BadPort);
    }
    match text.parse() {
        Ok(0) | Err(_) => Err(BadHost::BadPort),
        Ok(port) => Ok(port),
    }
}

/// Fuzzing entry point: a parsed host formats to text that parses to the same host, and the
/// pattern of that text matches the host.
pub fn fuzz_check(text: &str) {
    if let Ok(host) = Host::parse(text) {
        let spelled = host.to_string();
        assert_eq!(Host::parse(&spelled).as_ref(), Ok(&host), "{text:?}");
        if let Ok(pattern) = HostPattern::parse(&spelled) {
            assert!(pattern.matches(&host), "{text:?}");
        }
        let _class = host.as_ip().map(classify);
    }
    if let Ok(authority) = Authority::parse(text) {
        let spelled = authority.to_string();
        assert_eq!(Authority::parse(&spelled), Ok(authority), "{text:?}");
    }
    if let Ok(pattern) = HostPattern::parse(text) {
        let spelled = pattern.to_string();
        assert_eq!(HostPattern::parse(&spelled), Ok(pattern), "{text:?}");
    }
}

#[cfg(test)]
mod tests;
