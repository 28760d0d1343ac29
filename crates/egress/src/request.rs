//! Destination of a request, on which CONNECT target, TLS SNI, request target and `Host` must
//! agree.

use std::net::SocketAddr;

use http::header::HOST;
use http::request::Parts;
use http::uri::Scheme;
use policy::host::{Authority, BadHost, Host};
use policy::path::CleanPath;
use policy::reason::Reason;
use policy::verdict::Denial;

use crate::caller::ProgramLookup;
use crate::request_cx::RequestCx;
use crate::request_log::RequestLog;

/// Properties of a connection that are known before its first request.
#[derive(Clone, Debug)]
pub struct ConnectionInfo {
    /// The client's address.
    pub peer: Option<SocketAddr>,
    /// The address that the client connected to, before redirection to the gate. `None` on a
    /// shared network, where that is the gate's own address.
    pub original_destination: Option<SocketAddr>,
    /// The target of a CONNECT.
    pub tunnel: Option<(Host, u16)>,
    /// The SNI of the TLS hello: `None` without TLS, `Some(None)` for a hello without SNI.
    pub hello: Option<Option<Host>>,
    /// The program that opened the connection, looked up once. A tunnel shares the value of its
    /// connection.
    pub caller: ProgramLookup,
}

/// Where a request goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Destination {
    /// The host.
    pub host: Host,
    /// The port.
    pub port: u16,
    /// Whether TLS is used.
    pub tls: bool,
}

impl Destination {
    /// Whether the destination is the gate itself.
    pub fn is_internal(&self) -> bool {
        self.host.is_gate()
    }
}

impl ConnectionInfo {
    /// Writes host and port to a record, as far as they are known before the first request.
    pub fn write_destination(&self, log: &mut RequestLog) {
        let ConnectionInfo {
            tunnel,
            original_destination: original,
            ..
        } = self;
        let (host, port) = match (tunnel, original) {
            (Some((host, port)), _) => (host.to_string(), *port),
            (None, Some(original)) => (original.ip().to_string(), original.port()),
            (None, None) => return,
        };
        log.event.host = Some(host);
        log.event.port = Some(port);
    }

    /// The program that opened the connection, if a rule names programs and the lookup succeeds.
    pub async fn program(&self, cx: &RequestCx) -> Option<String> {
        if !cx.snapshot.names_programs {
            return None;
        }
        // On a shared network the original destination is unknown, and sockets cannot be looked up.
        let ends = (self.peer?, self.original_destination?);
        let (socket_owners, slots) = (cx.services.socket_owners(), &cx.sandbox.program_lookups);
        self.caller
            .program(socket_owners, cx.sandbox.id(), slots, ends)
            .await
    }

    /// The host on which CONNECT target and TLS hello agree, and the port. `None` without CONNECT
    /// and without TLS.
    pub fn agreed_host_and_port(&self) -> Result<Option<(Host, Option<u16>)>, Denial> {
        let hello = self.hello.as_ref().and_then(Option::as_ref);
        match (&self.tunnel, hello) {
            (Some((host, port)), Some(name)) if host == name => {
                Ok(Some((host.clone(), Some(*port))))
            }
            (Some((host, _)), Some(name)) => Err(mismatch_denial(format!(
                "the CONNECT target is {host} and the SNI is {name}"
            ))),
            (Some((host, port)), None) => Ok(Some((host.clone(), Some(*port)))),
            (None, Some(name)) => Ok(Some((
                name.clone(),
                self.original_destination.map(|original| original.port()),
            ))),
            (None, None) if self.hello.is_some() => Err(Denial::new(Reason::NameMismatch, "names")
                .with_message(
                    "The TLS hello has no SNI. Use a client that sends SNI, or use the proxy.",
                )),
            (None, None) => Ok(None),
        }
    }

    /// The destination of `request`. All names and ports must agree.
    pub fn destination(&self, request: &Parts) -> Result<Destination, Denial> {
        let in_tls = self.hello.is_some();
        let named = named_authority(request)?;
        let absolute = request.uri.scheme();
        let tls = match absolute {
            // HTTP/2 repeats the scheme in every request.
            Some(scheme) if *scheme == Scheme::HTTPS => true,
            Some(scheme) if *scheme == Scheme::HTTP => false,
            Some(scheme) => {
                return Err(bad_name_denial(format!(
                    "the scheme '{scheme}' is not supported"
                )));
            }
            None => in_tls,
        };
        if in_tls && !tls {
            return Err(mismatch_denial(
                "the request has the scheme http inside TLS".to_owned(),
            ));
        }
        let default = if tls { 443 } else { 80 };
        let port = named.port.unwrap_or(default);
        let destination = Destination {
            host: named.host,
            port,
            tls,
        };
        if let Some((host, expected)) = self.agreed_host_and_port()? {
            if host != destination.host || expected.is_some_and(|expected| expected != port) {
                let expected = expected.unwrap_or(default);
                return Err(mismatch_denial(format!(
                    "the connection is for {host}:{expected} and the request for {}:{port}",
                    destination.host
                )));
            }
        } else if let (None, Some(original)) = (absolute, self.original_destination)
            && original.port() != port
            && !destination.is_internal()
        {
            // A client without a proxy: the request must be for the port it connected to.
            return Err(mismatch_denial(format!(
                "the connection is to port {} and the request for {}:{port}",
                original.port(),
                destination.host
            )));
        }
        Ok(destination)
    }
}

/// The authority in the request's target or `Host`, which must agree.
fn named_authority(request: &Parts) -> Result<Authority, Denial> {
    let mut hosts = request.headers.get_all(HOST).iter();
    let host = hosts.next();
    if hosts.next().is_some() {
        return Err(framing_denial("the request has more than one Host"));
    }
    let host = match host {
        Some(value) => {
            let text = value
                .to_str()
                .map_err(|_| bad_name_denial("the Host header is not ASCII".to_owned()))?;
            Some(Authority::parse(text).map_err(bad_host_denial)?)
        }
        None => None,
    };
    let target = match request.uri.authority() {
        Some(authority) => Some(Authority::parse(authority.as_str()).map_err(bad_host_denial)?),
        None => None,
    };
    match (target, host) {
        (Some(target), Some(host)) => {
            let tls = request.uri.scheme() == Some(&Scheme::HTTPS);
            let default = if tls { 443 } else { 80 };
            let same = target.host == host.host
                && target.port.unwrap_or(default) == host.port.unwrap_or(default);
            if same {
                Ok(target)
            } else {
                Err(mismatch_denial(format!(
                    "the request target has the host {target} and the Host header has {host}"
                )))
            }
        }
        (Some(authority), None) | (None, Some(authority)) => Ok(authority),
        (None, None) => Err(framing_denial("the request has no Host")),
    }
}

/// The path and query of a request, normalised.
pub fn path_of(request: &Parts) -> Result<CleanPath, Denial> {
    let target = request
        .uri
        .path_and_query()
        .map_or("/", http::uri::PathAndQuery::as_str);
    let target = if target.is_empty() { "/" } else { target };
    CleanPath::parse(target).map_err(|error| bad_name_denial(error.to_string()))
}

/// The denial for names that differ.
pub fn mismatch_denial(evidence: String) -> Denial {
    Denial::new(Reason::NameMismatch, "names").with_evidence(evidence)
}

/// The denial for an invalid host.
pub fn bad_host_denial(error: BadHost) -> Denial {
    bad_name_denial(error.to_string())
}

fn bad_name_denial(sentence: String) -> Denial {
    let mut letters = sentence.chars();
    let first = letters.next().map(|c| c.to_ascii_uppercase());
    let sentence: String = first.into_iter().chain(letters).collect();
    Denial::new(Reason::BadName, "names").with_message(format!("{sentence}."))
}

/// The denial for a message with ambiguous framing.
pub fn framing_denial(evidence: &str) -> Denial {
    Denial::new(Reason::Framing, "framing").with_evidence(evidence)
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    fn host(text: &str) -> Host {
        Host::parse(text).unwrap()
    }

    fn parts(target: &str, hosts: &[&str]) -> Parts {
        let mut request = Request::builder().uri(target);
        for host in hosts {
            request = request.header(HOST, *host);
        }
        request.body(()).unwrap().into_parts().0
    }

    fn plain(port: u16) -> ConnectionInfo {
        ConnectionInfo {
            peer: None,
            original_destination: Some(SocketAddr::from(([192, 0, 2, 1], port))),
            tunnel: None,
            hello: None,
            caller: ProgramLookup::default(),
        }
    }

    fn tls(name: Option<&str>) -> ConnectionInfo {
        ConnectionInfo {
            hello: Some(name.map(host)),
            ..plain(443)
        }
    }

    fn tunnel(name: &str, port: u16, hello: Option<Option<&str>>) -> ConnectionInfo {
        ConnectionInfo {
            tunnel: Some((host(name), port)),
            hello: hello.map(|name| name.map(host)),
            ..plain(8080)
        }
    }

    #[test]
    fn matching_names_and_ports_give_the_destination() {
        for (connection_info, parts, shown) in [
            (plain(80), parts("/a", &["x.example"]), "x.example:80"),
            (
                plain(8000),
                parts("/a", &["X.example.:8000"]),
                "x.example:8000",
            ),
            (
                plain(8080),
                parts("http://x.example/a", &["x.example"]),
                "x.example:80",
            ),
            (
                plain(8080),
                parts("http://x.example:80/", &["x.example"]),
                "x.example:80",
            ),
            (
                tls(Some("x.example")),
                parts("/", &["x.example:443"]),
                "x.example:443",
            ),
            (
                tls(Some("x.example")),
                parts("https://x.example/", &[]),
                "x.example:443",
            ),
            (
                tunnel("x.example", 8443, Some(Some("x.example"))),
                parts("/", &["x.example:8443"]),
                "x.example:8443",
            ),
            (
                tunnel("x.example", 443, Some(None)),
                parts("/", &["x.example"]),
                "x.example:443",
            ),
            (
                tunnel("x.example", 80, None),
                parts("/", &["x.example"]),
                "x.example:80",
            ),
            (
                plain(8080),
                parts("/allowlist", &["palisade.internal"]),
                "palisade.internal:80",
            ),
        ] {
            let destination = connection_info.destination(&parts).unwrap();
            assert_eq!(format!("{}:{}", destination.host, destination.port), shown);
            assert_eq!(destination.tls, connection_info.hello.is_some());
        }
    }

    #[test]
    fn differing_names_or_ports_are_refused_as_mismatch() {
        for (connection_info, parts) in [
            (tls(Some("x.example")), parts("/", &["y.example"])),
            (tls(Some("x.example")), parts("/", &["x.example:8443"])),
            (
                tls(Some("x.example")),
                parts("http://x.example/", &["x.example"]),
            ),
            (tls(None), parts("/", &["x.example"])),
            (
                tunnel("x.example", 443, Some(Some("y.example"))),
                parts("/", &["x.example"]),
            ),
            (
                tunnel("x.example", 443, Some(Some("x.example"))),
                parts("/", &["y.example"]),
            ),
            (
                tunnel("x.example", 8443, Some(None)),
                parts("/", &["x.example"]),
            ),
            (tunnel("x.example", 443, None), parts("/", &["x.example"])),
            (plain(8080), parts("http://x.example/", &["y.example"])),
            (plain(8080), parts("http://x.example/", &["x.example:81"])),
            (plain(8080), parts("/", &["x.example"])),
            (plain(80), parts("/", &["x.example:81"])),
        ] {
            let denial = connection_info.destination(&parts).unwrap_err();
            assert_eq!(
                denial.reason,
                Reason::NameMismatch,
                "{connection_info:?} {parts:?}"
            );
        }
    }

    #[test]
    fn invalid_names_and_framing_are_refused_with_their_reason() {
        for (target, hosts, reason) in [
            ("/", vec!["a..example"], Reason::BadName),
            ("/", vec!["user@x.example"], Reason::BadName),
            ("http://u:p@x.example/", vec!["x.example"], Reason::BadName),
            ("/", vec!["x.example", "x.example"], Reason::Framing),
            ("/", vec![], Reason::Framing),
            ("ftp://x.example/", vec!["x.example"], Reason::BadName),
        ] {
            let denial = plain(80).destination(&parts(target, &hosts)).unwrap_err();
            assert_eq!(denial.reason, reason, "{target} {hosts:?}");
        }
        assert!(path_of(&parts("/a/%2e%2e/b", &[])).is_ok());
        assert_eq!(
            path_of(&parts("/a%5cb", &[])).unwrap_err().reason,
            Reason::BadName
        );
    }
}
