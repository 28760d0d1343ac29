//! DNS queries over UDP, in a closed loop.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tokio::net::UdpSocket;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::load::{CLIENTS, Figures, figures};
use crate::processes::{NAMES, name};

/// Time after which a query without an answer counts as lost; the client sends the next query.
const QUERY_TIMEOUT: Duration = Duration::from_secs(1);

/// Queries the same names repeatedly.
pub async fn query_repeatedly(at: SocketAddr, time: Duration) -> Figures {
    let started = Instant::now();
    let mut clients = JoinSet::new();
    for client in 0..CLIENTS {
        clients.spawn(run_client(at, client, started + time));
    }
    let micros = clients.join_all().await.concat();
    figures(micros, started.elapsed())
}

async fn run_client(at: SocketAddr, client: usize, end: Instant) -> Vec<u32> {
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    socket.connect(at).await.unwrap();
    let mut micros = Vec::new();
    let mut answer = [0; 512];
    for number in client.. {
        let started = Instant::now();
        if started >= end {
            break;
        }
        socket.send(&query(number)).await.unwrap();
        let Ok(read) = timeout(QUERY_TIMEOUT, socket.recv(&mut answer)).await else {
            continue;
        };
        assert!(read.unwrap() > 12, "incomplete answer");
        // The answer has no error code and one record.
        assert_eq!(
            (answer[3] & 15, answer[7]),
            (0, 1),
            "{}",
            name(number % NAMES)
        );
        micros.push(u32::try_from(started.elapsed().as_micros()).unwrap_or(u32::MAX));
    }
    micros
}

/// A query for an IPv4 address, as a stub resolver sends it.
fn query(number: usize) -> Vec<u8> {
    let mut bytes = vec![0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in name(number % NAMES).split('.') {
        bytes.push(u8::try_from(label.len()).unwrap());
        bytes.extend(label.as_bytes());
    }
    bytes.extend([0, 0, 1, 0, 1]);
    bytes
}
