//! DNS over UDP and TCP sockets, with limits on queries in flight and on their time.

use std::future::poll_fn;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::{Buf, BytesMut};
use config::section::egress::DnsMode;
use policy::audit::AuditEvent;
use policy::clock::UnixMillis;
use policy::id::SandboxId;
use policy::identity::identify;
use policy::ports::{AuditSink, Registry};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

use super::{DnsResponse, NameServer, QueryClient, QueryContext, QueryOutcome, Transport};
use crate::datagram::{DatagramAddresses, DatagramSocket};
use crate::listener_checks::ListenerChecks;

/// Longest query that is read.
const MAX_QUERY: usize = 4096;

/// Queries in flight per TCP connection; further ones wait in the kernel's buffer.
const MAX_PIPELINED: usize = 16;

/// Timeout of writing an answer to the client.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);

/// Delay after a failed receive, whose cause may last for a moment.
const RECEIVE_RETRY_DELAY: Duration = Duration::from_millis(100);

async fn record_event(audit: &dyn AuditSink, event: Option<AuditEvent>) {
    if let Some(event) = event
        && let Err(event) = audit.try_record(Box::new(event))
    {
        audit.record(event).await;
    }
}

/// Origin of the queries of a socket, by which their clients are identified.
#[derive(Clone)]
pub enum QuerySource {
    /// A socket inside the network of a sandbox: all its queries are the sandbox's.
    Sandbox {
        /// The sandbox.
        sandbox: SandboxId,
        /// The registered sandboxes.
        registry: Arc<dyn Registry>,
    },
    /// A network that several sandboxes share: clients are identified by their address.
    Shared {
        /// The registered sandboxes.
        registry: Arc<dyn Registry>,
        /// The health checks of the gate itself.
        checks: Arc<ListenerChecks>,
    },
}

impl QuerySource {
    fn identify_client(&self, peer: IpAddr) -> QueryClient {
        // Each query is identified anew: a listener outlives the registration of its sandbox.
        let lookup = match self {
            QuerySource::Sandbox { sandbox, registry } => registry.by_id(sandbox),
            QuerySource::Shared { registry, .. } => registry.by_ip(peer.to_canonical()),
        };
        match identify(lookup, None, wall_now()) {
            Ok(identity) => QueryClient::Known(identity.sandbox().clone()),
            Err(denial) => QueryClient::Unknown(denial),
        }
    }

    fn is_listener_check(&self, peer: SocketAddr) -> bool {
        match self {
            QuerySource::Sandbox { .. } => false,
            QuerySource::Shared { checks, .. } => checks.is_check(peer),
        }
    }

    /// The context of a query. On a shared network a synthetic address would not be reachable.
    fn context(&self, server: &NameServer, transport: Transport, local_ip: IpAddr) -> QueryContext {
        match self {
            QuerySource::Sandbox { .. } => QueryContext {
                transport,
                mode: (server.policy)(None).snapshot.settings.egress.dns.mode,
                gate: None,
            },
            QuerySource::Shared { .. } => QueryContext {
                transport,
                mode: DnsMode::Forward,
                gate: Some(local_ip),
            },
        }
    }
}

fn wall_now() -> UnixMillis {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    UnixMillis::new(0).plus(since.unwrap_or_default())
}

/// Answers datagrams until `stop`. Queries above a sandbox's rate or number in flight are dropped,
/// as on a busy network.
pub async fn serve_datagrams(
    server: Arc<NameServer>,
    datagrams: DatagramSocket,
    source: QuerySource,
    audit: Arc<dyn AuditSink>,
    stop: CancellationToken,
) {
    let datagrams = Arc::new(datagrams);
    let mut answers = JoinSet::new();
    let mut buffer = vec![0; MAX_QUERY];
    loop {
        let received = tokio::select! {
            () = stop.cancelled() => break,
            // Removes finished tasks, so that the set does not grow.
            Some(_) = answers.join_next() => continue,
            received = datagrams.receive(&mut buffer) => received,
        };
        let (length, addresses) = match received {
            Ok(received) => received,
            Err(error) => {
                tracing::debug!(%error, "receiving a dns datagram failed");
                tokio::time::sleep(RECEIVE_RETRY_DELAY).await;
                continue;
            }
        };
        let query = buffer.get(..length).unwrap_or_default();
        if source.is_listener_check(addresses.sender) {
            if let Err(error) = datagrams.answer(query, addresses).await {
                tracing::debug!(%error, "answering a dns listener check failed");
            }
            continue;
        }
        let client = source.identify_client(addresses.sender.ip());
        let context = source.context(&server, Transport::Udp, addresses.destination);
        let Some(slot) = server
            .client_state_of(&client)
            .try_acquire(&server.query_rate())
        else {
            server.metrics.count(QueryOutcome::Dropped, None);
            continue;
        };
        let reply = DatagramReply {
            server: Arc::clone(&server),
            audit: Arc::clone(&audit),
            datagrams: Arc::clone(&datagrams),
            addresses,
        };
        let query = query.to_vec();
        let answer = Box::pin(async move {
            reply.send(&client, &query, &context).await;
            drop(slot);
        });
        if let Some(waiting) = poll_once(answer).await {
            answers.spawn(waiting);
        }
    }
    // Each task holds the socket.
    answers.shutdown().await;
}

/// Polls an answer once, and returns it if it is not ready. Most answers are ready at once, and a
/// task for each would cost more than the answer.
async fn poll_once(mut answer: AnswerFuture) -> Option<AnswerFuture> {
    let mut step = |cx: &mut Context<'_>| {
        // As in a separate task, a panic ends only this answer.
        catch_unwind(AssertUnwindSafe(|| answer.as_mut().poll(cx)))
    };
    let waits = matches!(poll_fn(|cx| Poll::Ready(step(cx))).await, Ok(Poll::Pending));
    waits.then_some(answer)
}

type AnswerFuture = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The context for answering one datagram.
struct DatagramReply {
    server: Arc<NameServer>,
    audit: Arc<dyn AuditSink>,
    datagrams: Arc<DatagramSocket>,
    addresses: DatagramAddresses,
}

impl DatagramReply {
    async fn send(&self, client: &QueryClient, query: &[u8], context: &QueryContext) {
        let Some(DnsResponse { bytes, event }) = self.server.answer(client, query, context).await
        else {
            return;
        };
        record_event(&*self.audit, event).await;
        match timeout(WRITE_TIMEOUT, self.datagrams.answer(&bytes, self.addresses)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::debug!(%error, "sending a dns answer failed"),
            Err(_) => tracing::debug!("sending a dns answer timed out"),
        }
    }
}

/// Answers the queries of one connection, each when it is ready (RFC 7766, section 6.2.1.1), until
/// the idle timeout or `stop`. The accept loop limits the number of connections.
pub async fn serve_stream(
    server: Arc<NameServer>,
    stream: TcpStream,
    source: QuerySource,
    audit: Arc<dyn AuditSink>,
    stop: CancellationToken,
) -> io::Result<()> {
    let peer = stream.peer_addr()?.ip();
    let local_ip = stream.local_addr()?.ip();
    stream.set_nodelay(true)?;
    let (mut reader, mut writer) = stream.into_split();
    let mut answers: JoinSet<Option<Vec<u8>>> = JoinSet::new();
    let mut buffer = BytesMut::with_capacity(1024);
    let mut last_use = Instant::now();
    let mut at_eof = false;
    loop {
        while answers.len() < MAX_PIPELINED {
            let query = match next_query(&mut buffer) {
                Frame::Complete(query) => query,
                Frame::Incomplete => break,
                Frame::TooLong => return Ok(()),
            };
            last_use = Instant::now();
            let client = source.identify_client(peer);
            let context = source.context(&server, Transport::Tcp, local_ip);
            let (server, audit) = (Arc::clone(&server), Arc::clone(&audit));
            answers.spawn(async move { answer(&server, &*audit, &client, &query, &context).await });
        }
        if at_eof && answers.is_empty() {
            return Ok(());
        }
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            Some(answered) = answers.join_next() => {
                if let Ok(Some(bytes)) = answered {
                    let Ok(length) = u16::try_from(bytes.len()) else { return Ok(()) };
                    let mut framed = length.to_be_bytes().to_vec();
                    framed.extend(bytes);
                    match timeout(WRITE_TIMEOUT, writer.write_all(&framed)).await {
                        Ok(written) => written?,
                        Err(_) => return Ok(()),
                    }
                }
                last_use = Instant::now();
            }
            read = reader.read_buf(&mut buffer), if !at_eof && answers.len() < MAX_PIPELINED => {
                // A client that closed its sending side may still wait for answers.
                at_eof = read? == 0;
            }
            // Only complete queries reset the idle timeout, single bytes do not.
            () = tokio::time::sleep_until(last_use + server.limits.idle), if answers.is_empty() => {
                return Ok(());
            }
        }
    }
}

async fn answer(
    server: &NameServer,
    audit: &dyn AuditSink,
    client: &QueryClient,
    query: &[u8],
    context: &QueryContext,
) -> Option<Vec<u8>> {
    // Queries of a stream wait for a free slot until the deadline.
    let deadline = Instant::now() + server.limits.deadline;
    let client_state = server.client_state_of(client);
    let Some(_slot) = client_state
        .acquire_by(&server.query_rate(), deadline)
        .await
    else {
        server.metrics.count(QueryOutcome::Dropped, None);
        return None;
    };
    let answered = server.answer_by(deadline, client, query, context);
    let DnsResponse { bytes, event } = answered.await?;
    record_event(audit, event).await;
    Some(bytes)
}

/// The query at the start of a stream's buffer.
enum Frame {
    Complete(BytesMut),
    Incomplete,
    TooLong,
}

/// Splits off a query with its length prefix of two bytes (RFC 1035, section 4.2.2).
fn next_query(buffer: &mut BytesMut) -> Frame {
    let Some(length) = buffer.first_chunk::<2>() else {
        return Frame::Incomplete;
    };
    let length = usize::from(u16::from_be_bytes(*length));
    if length > MAX_QUERY {
        return Frame::TooLong;
    }
    if buffer.len() < 2 + length {
        return Frame::Incomplete;
    }
    buffer.advance(2);
    Frame::Complete(buffer.split_to(length))
}

/// See [`super::fuzz_check`].
pub(super) fn fuzz_check(bytes: &[u8]) {
    let mut buffer = BytesMut::from(bytes);
    while let Frame::Complete(query) = next_query(&mut buffer) {
        drop(super::message::parse(&query));
    }
}
