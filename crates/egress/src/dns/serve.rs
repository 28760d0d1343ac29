//! Queries off a socket, so many at a time and each for so long.

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

use super::{Answered, Asker, Names, Outcome, Transport, Way};
use crate::datagram::{Datagrams, Ends};
use crate::listener_checks::ListenerChecks;

/// The longest query that is read. What is longer is no question.
const LONGEST_QUERY: usize = 4096;

/// Queries of one connection at a time; more wait in the kernel.
const MOST_PIPELINED: usize = 16;

/// How long a client may take to accept an answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// After a failure to receive: the cause lasts a moment.
const BREATH: Duration = Duration::from_millis(100);

async fn write_down(journal: &dyn AuditSink, event: Option<AuditEvent>) {
    if let Some(event) = event
        && let Err(event) = journal.try_record(Box::new(event))
    {
        journal.record(event).await;
    }
}

/// Where queries come from.
#[derive(Clone)]
pub enum Source {
    /// A socket inside the network of a sandbox: queries there are the sandbox's.
    Sandbox {
        /// The sandbox.
        sandbox: SandboxId,
        /// Who is registered.
        registry: Arc<dyn Registry>,
    },
    /// A network that several share: whoever is registered at the address.
    Shared {
        /// Who is registered.
        registry: Arc<dyn Registry>,
        /// The health checks of the gate itself.
        checks: Arc<ListenerChecks>,
    },
}

impl Source {
    fn asker(&self, peer: IpAddr) -> Asker {
        // Each query is identified anew: a listener outlives the registration of its sandbox.
        let lookup = match self {
            Source::Sandbox { sandbox, registry } => registry.by_id(sandbox),
            Source::Shared { registry, .. } => registry.by_ip(peer.to_canonical()),
        };
        match identify(lookup, None, wall_now()) {
            Ok(identity) => Asker::Known(identity.sandbox().clone()),
            Err(denial) => Asker::Unknown(denial),
        }
    }

    fn is_listener_check(&self, peer: SocketAddr) -> bool {
        match self {
            Source::Sandbox { .. } => false,
            Source::Shared { checks, .. } => checks.is_check(peer),
        }
    }

    /// On a shared network a synthetic address would lead nowhere.
    fn way(&self, names: &Names, transport: Transport, here: IpAddr) -> Way {
        match self {
            Source::Sandbox { .. } => Way {
                transport,
                mode: (names.policy)(None).snapshot.settings.egress.dns.mode,
                gate: None,
            },
            Source::Shared { .. } => Way {
                transport,
                mode: DnsMode::Forward,
                gate: Some(here),
            },
        }
    }
}

fn wall_now() -> UnixMillis {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    UnixMillis::new(0).plus(since.unwrap_or_default())
}

/// Answers datagrams until `stop`. A sandbox that has too many queries open, or asks too
/// fast, loses the next one, as it would on a busy network.
pub async fn serve_datagrams(
    names: Arc<Names>,
    datagrams: Datagrams,
    source: Source,
    journal: Arc<dyn AuditSink>,
    stop: CancellationToken,
) {
    let datagrams = Arc::new(datagrams);
    let mut answering = JoinSet::new();
    let mut buffer = vec![0; LONGEST_QUERY];
    loop {
        let received = tokio::select! {
            () = stop.cancelled() => break,
            // Reaps what has ended, so that the set stays as small as the work.
            Some(_) = answering.join_next() => continue,
            received = datagrams.receive(&mut buffer) => received,
        };
        let (length, ends) = match received {
            Ok(received) => received,
            Err(error) => {
                tracing::debug!(%error, "a query was lost");
                tokio::time::sleep(BREATH).await;
                continue;
            }
        };
        let query = buffer.get(..length).unwrap_or_default();
        if source.is_listener_check(ends.from) {
            if let Err(error) = datagrams.answer(query, ends).await {
                tracing::debug!(%error, "answering a listener check failed");
            }
            continue;
        }
        let asker = source.asker(ends.from.ip());
        let way = source.way(&names, Transport::Udp, ends.meant);
        let Some(place) = names.guest_of(&asker).enter(&names.pace()) else {
            names.metrics.count(Outcome::Dropped, None);
            continue;
        };
        let reply = Datagram {
            names: Arc::clone(&names),
            journal: Arc::clone(&journal),
            datagrams: Arc::clone(&datagrams),
            ends,
        };
        let query = query.to_vec();
        let answer = Box::pin(async move {
            reply.send(&asker, &query, &way).await;
            drop(place);
        });
        if let Some(waiting) = begin(answer).await {
            answering.spawn(waiting);
        }
    }
    // Each of them holds the socket.
    answering.shutdown().await;
}

/// Takes the first step of an answer, and gives it back if it has to wait. Most names are
/// remembered, and a task for each would cost more than the answer.
async fn begin(mut answer: Answering) -> Option<Answering> {
    let mut step = |cx: &mut Context<'_>| {
        // As in a task of its own, a panic ends this answer alone.
        catch_unwind(AssertUnwindSafe(|| answer.as_mut().poll(cx)))
    };
    let waits = matches!(poll_fn(|cx| Poll::Ready(step(cx))).await, Ok(Poll::Pending));
    waits.then_some(answer)
}

type Answering = Pin<Box<dyn Future<Output = ()> + Send>>;

/// One datagram's answer on its way.
struct Datagram {
    names: Arc<Names>,
    journal: Arc<dyn AuditSink>,
    datagrams: Arc<Datagrams>,
    ends: Ends,
}

impl Datagram {
    async fn send(&self, asker: &Asker, query: &[u8], way: &Way) {
        let Some(Answered { bytes, event }) = self.names.answer(asker, query, way).await else {
            return;
        };
        write_down(&*self.journal, event).await;
        match timeout(PATIENCE, self.datagrams.answer(&bytes, self.ends)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::debug!(%error, "an answer was lost"),
            Err(_) => tracing::debug!("an answer was not taken in time"),
        }
    }
}

/// Answers the queries of one connection, each as it is ready (RFC 7766, section 6.2.1.1),
/// until the client has been silent for too long or `stop`. How many connections there may
/// be is for whoever accepts them.
pub async fn serve_stream(
    names: Arc<Names>,
    stream: TcpStream,
    source: Source,
    journal: Arc<dyn AuditSink>,
    stop: CancellationToken,
) -> io::Result<()> {
    let peer = stream.peer_addr()?.ip();
    let here = stream.local_addr()?.ip();
    stream.set_nodelay(true)?;
    let (mut reader, mut writer) = stream.into_split();
    let mut answering: JoinSet<Option<Vec<u8>>> = JoinSet::new();
    let mut buffer = BytesMut::with_capacity(1024);
    let mut heard = Instant::now();
    let mut ended = false;
    loop {
        while answering.len() < MOST_PIPELINED {
            let query = match next_query(&mut buffer) {
                Frame::Whole(query) => query,
                Frame::Part => break,
                Frame::TooLong => return Ok(()),
            };
            heard = Instant::now();
            let asker = source.asker(peer);
            let way = source.way(&names, Transport::Tcp, here);
            let (names, journal) = (Arc::clone(&names), Arc::clone(&journal));
            answering.spawn(async move { answer(&names, &*journal, &asker, &query, &way).await });
        }
        if ended && answering.is_empty() {
            return Ok(());
        }
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            Some(answered) = answering.join_next() => {
                if let Ok(Some(bytes)) = answered {
                    let Ok(length) = u16::try_from(bytes.len()) else { return Ok(()) };
                    let mut framed = length.to_be_bytes().to_vec();
                    framed.extend(bytes);
                    match timeout(PATIENCE, writer.write_all(&framed)).await {
                        Ok(written) => written?,
                        Err(_) => return Ok(()),
                    }
                }
                heard = Instant::now();
            }
            read = reader.read_buf(&mut buffer), if !ended && answering.len() < MOST_PIPELINED => {
                // A client that has said all may still wait for answers.
                ended = read? == 0;
            }
            // Single bytes do not count as being heard, whole queries do.
            () = tokio::time::sleep_until(heard + names.limits.idle), if answering.is_empty() => {
                return Ok(());
            }
        }
    }
}

async fn answer(
    names: &Names,
    journal: &dyn AuditSink,
    asker: &Asker,
    query: &[u8],
    way: &Way,
) -> Option<Vec<u8>> {
    // A stream can wait for its turn, though not for ever.
    let deadline = Instant::now() + names.limits.deadline;
    let guest = names.guest_of(asker);
    let Some(_place) = guest.enter_by(&names.pace(), deadline).await else {
        names.metrics.count(Outcome::Dropped, None);
        return None;
    };
    let answered = names.answer_by(deadline, asker, query, way);
    let Answered { bytes, event } = answered.await?;
    write_down(journal, event).await;
    Some(bytes)
}

/// What the front of a stream holds.
enum Frame {
    Whole(BytesMut),
    Part,
    TooLong,
}

/// Two bytes of length, then a query (RFC 1035, section 4.2.2).
fn next_query(buffer: &mut BytesMut) -> Frame {
    let Some(length) = buffer.first_chunk::<2>() else {
        return Frame::Part;
    };
    let length = usize::from(u16::from_be_bytes(*length));
    if length > LONGEST_QUERY {
        return Frame::TooLong;
    }
    if buffer.len() < 2 + length {
        return Frame::Part;
    }
    buffer.advance(2);
    Frame::Whole(buffer.split_to(length))
}

/// See [`super::exercise`].
pub(super) fn exercise(bytes: &[u8]) {
    let mut buffer = BytesMut::from(bytes);
    while let Frame::Whole(query) = next_query(&mut buffer) {
        drop(super::message::read(&query));
    }
}
