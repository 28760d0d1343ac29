//! Connects to the first of several addresses that accepts (RFC 8305, "happy eyeballs").

use std::io::{Error, Result};
use std::net::SocketAddr;
use std::time::Duration;

use nix::sys::socket::{setsockopt, sockopt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinSet;

/// Addresses to try: a name may have hundreds.
const MAX_ADDRESSES: usize = 8;

/// Delay before the next address is tried in parallel (RFC 8305).
const STAGGER: Duration = Duration::from_millis(250);

/// TCP keepalive: a dead peer is detected after about two minutes.
const KEEPALIVE_IDLE: u32 = 60;
const KEEPALIVE_INTERVAL: u32 = 15;
const KEEPALIVE_COUNT: u32 = 4;

/// Connects to one of `addresses`. The error lists the error of each. The future has no timeout
/// of its own; dropping it cancels all attempts.
pub(super) async fn connect(
    addresses: &[SocketAddr],
) -> std::result::Result<(TcpStream, SocketAddr), String> {
    let mut remaining = addresses.iter().copied().take(MAX_ADDRESSES);
    let mut failures = Vec::new();
    let mut attempts = JoinSet::new();
    let mut try_next = |attempts: &mut JoinSet<_>| match remaining.next() {
        Some(address) => {
            attempts.spawn(async move { (address, dial(address).await) });
            true
        }
        None => false,
    };
    let mut more = try_next(&mut attempts);
    loop {
        tokio::select! {
            ended = attempts.join_next() => match ended {
                None => return Err(failures.join("; ")),
                Some(Ok((address, Ok(stream)))) => return Ok((stream, address)),
                Some(Ok((address, Err(error)))) => {
                    failures.push(format!("{address}: {error}"));
                    more = try_next(&mut attempts);
                }
                Some(Err(panicked)) => failures.push(panicked.to_string()),
            },
            () = tokio::time::sleep(STAGGER), if more => more = try_next(&mut attempts),
        }
    }
}

async fn dial(address: SocketAddr) -> Result<TcpStream> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    // Without Nagle: small requests must not wait for the ACK of the previous one.
    socket.set_nodelay(true)?;
    socket.set_keepalive(true)?;
    setsockopt(&socket, sockopt::TcpKeepIdle, &KEEPALIVE_IDLE).map_err(Error::from)?;
    setsockopt(&socket, sockopt::TcpKeepInterval, &KEEPALIVE_INTERVAL).map_err(Error::from)?;
    setsockopt(&socket, sockopt::TcpKeepCount, &KEEPALIVE_COUNT).map_err(Error::from)?;
    socket.connect(address).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn dialled_socket_has_nodelay_set() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let (stream, _) = connect(&[listener.local_addr().unwrap()]).await.unwrap();
        assert!(stream.nodelay().unwrap());
    }
}
