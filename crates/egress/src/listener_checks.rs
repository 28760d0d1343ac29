//! Health checks of the gate's listeners on shared networks, by connecting to them.
//!
//! The kernel completes a handshake even where nothing accepts any more, so a connection alone
//! proves little. A check therefore waits for a reaction of the loop that serves the socket. It
//! announces its own address first, by which the loops recognise the check: a check is no client,
//! and causes no audit record, no metric and no refusal.

use std::collections::HashSet;
use std::io::{Error, ErrorKind, Result};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::net::{TcpSocket, UdpSocket};
use tokio::time::{Instant, timeout, timeout_at};

/// How long all checks together may take. Container runtimes give a health check 3 s.
const TIMEOUT: Duration = Duration::from_secs(2);

/// When a datagram without an answer is sent again: a full socket buffer drops datagrams.
const RESEND_AFTER: Duration = Duration::from_millis(250);

/// The name of the check of `egress.listen`.
const PROXY: &str = "proxy_listening";

/// The name of the check of `egress.dns.listen`.
const DNS: &str = "dns_listening";

/// The outcome of a check: its name, and the error where it failed.
pub type CheckOutcome = (&'static str, std::result::Result<(), String>);

/// The listeners on shared networks, and the checks in flight.
#[derive(Debug, Default)]
pub struct ListenerChecks(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    proxies: Vec<SocketAddr>,
    resolvers: Vec<SocketAddr>,
    /// The local addresses of checks in flight.
    checking: HashSet<(IpAddr, u16)>,
}

impl ListenerChecks {
    /// Replaces the addresses that are checked: those of the proxy, and those for DNS.
    pub fn watch(&self, proxies: Vec<SocketAddr>, resolvers: Vec<SocketAddr>) {
        let mut state = self.state();
        state.proxies = proxies;
        state.resolvers = resolvers;
    }

    /// Whether a connection or datagram from `peer` belongs to a check.
    pub fn is_check(&self, peer: SocketAddr) -> bool {
        self.state().checking.contains(&key(peer))
    }

    /// Connects to every listener. A kind of listener that is not configured has no outcome.
    pub async fn run(&self) -> Vec<CheckOutcome> {
        let (proxies, resolvers) = {
            let state = self.state();
            (state.proxies.clone(), state.resolvers.clone())
        };
        let until = Instant::now() + TIMEOUT;
        let (proxy, dns) = tokio::join!(
            first_failure(&proxies, until, |at| self.check_stream(at)),
            first_failure(&resolvers, until, |at| self.check_datagrams(at)),
        );
        let mut outcomes = Vec::new();
        if !proxies.is_empty() {
            outcomes.push((PROXY, proxy));
        }
        if !resolvers.is_empty() {
            outcomes.push((DNS, dns));
        }
        outcomes
    }

    /// Connects, and waits until the accept loop closes the connection.
    async fn check_stream(&self, listener: SocketAddr) -> Result<()> {
        let listener = reachable_address(listener);
        let socket = match listener {
            SocketAddr::V4(_) => TcpSocket::new_v4()?,
            SocketAddr::V6(_) => TcpSocket::new_v6()?,
        };
        socket.bind(with_any_port(listener))?;
        let _announced = self.announce(socket.local_addr()?);
        let mut stream = socket.connect(listener).await?;
        match stream.read(&mut [0; 1]).await? {
            0 => Ok(()),
            _ => Err(Error::from(ErrorKind::InvalidData)),
        }
    }

    /// Sends a datagram, and waits until the loop that reads datagrams returns it.
    async fn check_datagrams(&self, listener: SocketAddr) -> Result<()> {
        let listener = reachable_address(listener);
        let socket = UdpSocket::bind(with_any_port(listener)).await?;
        let _announced = self.announce(socket.local_addr()?);
        socket.connect(listener).await?;
        loop {
            socket.send(b"check").await?;
            if let Ok(received) = timeout(RESEND_AFTER, socket.recv(&mut [0; 16])).await {
                return received.map(drop);
            }
        }
    }

    fn announce(&self, address: SocketAddr) -> AnnouncedAddress<'_> {
        let key = key(address);
        self.state().checking.insert(key);
        AnnouncedAddress { checks: self, key }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The address of a check in flight. Dropping it withdraws the address.
struct AnnouncedAddress<'a> {
    checks: &'a ListenerChecks,
    key: (IpAddr, u16),
}

impl Drop for AnnouncedAddress<'_> {
    fn drop(&mut self) {
        self.checks.state().checking.remove(&self.key);
    }
}

/// Checks one listener after the other, and reports the first that fails.
async fn first_failure<F>(
    listeners: &[SocketAddr],
    until: Instant,
    check: impl Fn(SocketAddr) -> F,
) -> std::result::Result<(), String>
where
    F: Future<Output = Result<()>>,
{
    for listener in listeners {
        let checked = timeout_at(until, check(*listener)).await;
        let error = match checked {
            Ok(Ok(())) => continue,
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no answer within {} s", TIMEOUT.as_secs()),
        };
        return Err(format!(
            "the listener at {listener} does not answer: {error}"
        ));
    }
    Ok(())
}

/// The address at which a listener on `address` can be reached: a wildcard listener is reached at
/// the loopback.
fn reachable_address(address: SocketAddr) -> SocketAddr {
    let mut reachable = address;
    match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => reachable.set_ip(Ipv4Addr::LOCALHOST.into()),
        IpAddr::V6(ip) if ip.is_unspecified() => reachable.set_ip(Ipv6Addr::LOCALHOST.into()),
        IpAddr::V4(_) | IpAddr::V6(_) => {}
    }
    reachable
}

/// The same address, at a port that the system chooses.
fn with_any_port(address: SocketAddr) -> SocketAddr {
    let mut local = address;
    local.set_port(0);
    local
}

fn key(address: SocketAddr) -> (IpAddr, u16) {
    (address.ip().to_canonical(), address.port())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn stopped_accept_loop_fails_although_the_kernel_connects() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let checks = Arc::new(ListenerChecks::default());
        checks.watch(vec![listener.local_addr().unwrap()], Vec::new());
        let serving = {
            let checks = Arc::clone(&checks);
            async move {
                let (stream, peer) = listener.accept().await.unwrap();
                assert!(checks.is_check(peer));
                drop(stream);
                listener
            }
        };
        let (outcomes, listener) = tokio::join!(checks.run(), serving);
        assert_eq!(outcomes, [(PROXY, Ok(()))]);

        // The kernel still completes handshakes for this socket.
        tokio::time::pause();
        let outcomes = checks.run().await;
        let error = outcomes[0].1.clone().unwrap_err();
        assert!(error.contains("no answer within 2 s"), "{error}");
        assert!(checks.state().checking.is_empty());
        drop(listener);
    }

    #[tokio::test]
    async fn wildcard_listener_is_checked_on_the_loopback() {
        let checks = ListenerChecks::default();
        assert_eq!(checks.run().await, []);
        for (listener, expected) in [
            ("0.0.0.0:8080", "127.0.0.1:8080"),
            ("[::]:8080", "[::1]:8080"),
            ("127.0.0.2:8080", "127.0.0.2:8080"),
        ] {
            let reached = reachable_address(listener.parse().unwrap());
            assert_eq!(reached, expected.parse().unwrap());
        }
    }
}
