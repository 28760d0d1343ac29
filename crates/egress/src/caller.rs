//! Lookup of the program that opened a connection, once, when a rule needs it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use policy::id::SandboxId;
use policy::ports::SocketOwner;
use tokio::sync::{OnceCell, Semaphore};
use tokio::time::timeout;

/// How long a request waits for a lookup slot, and then for the result.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(1);

/// The program of a connection and of its tunnels. A failed lookup is cached too: only the next
/// connection repeats it.
#[derive(Clone, Debug, Default)]
pub struct ProgramLookup(Arc<OnceCell<Option<String>>>);

impl ProgramLookup {
    /// The program of `sandbox` whose socket has these addresses, if it can be determined. `slots`
    /// limits the number of concurrent lookups.
    pub async fn program(
        &self,
        socket_owners: &Arc<dyn SocketOwner>,
        sandbox: &SandboxId,
        slots: &Arc<Semaphore>,
        (from, to): (SocketAddr, SocketAddr),
    ) -> Option<String> {
        self.find(|| look_up(socket_owners, sandbox, slots, from, to))
            .await
    }

    /// The cached result, or that of a new lookup.
    async fn find<F>(&self, look_up: impl FnOnce() -> F) -> Option<String>
    where
        F: Future<Output = Option<String>>,
    {
        self.0.get_or_init(look_up).await.clone()
    }
}

async fn look_up(
    socket_owners: &Arc<dyn SocketOwner>,
    sandbox: &SandboxId,
    slots: &Arc<Semaphore>,
    from: SocketAddr,
    to: SocketAddr,
) -> Option<String> {
    let acquiring = Arc::clone(slots).acquire_owned();
    let slot = timeout(LOOKUP_TIMEOUT, acquiring).await.ok()?.ok()?;
    let (socket_owners, id) = (Arc::clone(socket_owners), sandbox.clone());
    // A separate task: a disconnected client must not free the slot of a lookup that is still
    // running.
    let lookup = tokio::spawn(async move {
        let program = socket_owners.owner(&id, from, to).await;
        drop(slot);
        program
    });
    timeout(LOOKUP_TIMEOUT, lookup).await.ok()?.ok()?
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::sync::Notify;

    use super::*;

    /// A lookup that returns its result once `may_answer` is notified.
    #[derive(Default)]
    struct SlowSocketOwner {
        lookups: AtomicUsize,
        may_answer: Notify,
    }

    #[async_trait::async_trait]
    impl SocketOwner for SlowSocketOwner {
        async fn owner(&self, _: &SandboxId, _: SocketAddr, _: SocketAddr) -> Option<String> {
            let lookups = self.lookups.fetch_add(1, Ordering::SeqCst);
            self.may_answer.notified().await;
            (lookups == 0).then(|| "/usr/bin/first".to_owned())
        }
    }

    struct LookupFixture {
        owner: Arc<SlowSocketOwner>,
        socket_owners: Arc<dyn SocketOwner>,
        slots: Arc<Semaphore>,
    }

    impl LookupFixture {
        fn new() -> Self {
            let owner = Arc::new(SlowSocketOwner::default());
            Self {
                socket_owners: Arc::clone(&owner) as _,
                owner,
                slots: Arc::new(Semaphore::new(1)),
            }
        }

        async fn look_up(&self) -> Option<String> {
            let id = SandboxId::parse("one").unwrap();
            let end = SocketAddr::from(([192, 0, 2, 1], 80));
            look_up(&self.socket_owners, &id, &self.slots, end, end).await
        }
    }

    #[tokio::test(start_paused = true)]
    async fn all_requests_of_a_connection_share_one_lookup() {
        let fixture = LookupFixture::new();
        let caller = ProgramLookup::default();
        fixture.owner.may_answer.notify_one();
        let tunnel = caller.clone();
        let both = tokio::join!(
            caller.find(|| fixture.look_up()),
            tunnel.find(|| fixture.look_up())
        );
        let first = Some("/usr/bin/first".to_owned());
        assert_eq!(both, (first.clone(), first.clone()));
        assert_eq!(caller.find(|| fixture.look_up()).await, first);
        assert_eq!(fixture.owner.lookups.load(Ordering::SeqCst), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn disconnected_client_keeps_its_slot_until_the_lookup_ends() {
        let fixture = LookupFixture::new();
        // The clock is paused, so the lookup has started when the timeout expires.
        assert!(
            timeout(LOOKUP_TIMEOUT / 2, fixture.look_up())
                .await
                .is_err()
        );
        assert_eq!(fixture.owner.lookups.load(Ordering::SeqCst), 1);
        assert_eq!(fixture.slots.available_permits(), 0);
        // A lookup without a free slot times out without a result.
        assert_eq!(fixture.look_up().await, None);
        assert_eq!(fixture.owner.lookups.load(Ordering::SeqCst), 1);
        fixture.owner.may_answer.notify_one();
        let free = fixture.slots.acquire().await.unwrap();
        drop(free);
    }

    #[tokio::test(start_paused = true)]
    async fn lookup_timeout_gives_no_program_and_is_cached() {
        let fixture = LookupFixture::new();
        let caller = ProgramLookup::default();
        assert_eq!(caller.find(|| fixture.look_up()).await, None);
        // The failure is cached for the connection.
        fixture.owner.may_answer.notify_one();
        assert_eq!(caller.find(|| fixture.look_up()).await, None);
        assert_eq!(fixture.owner.lookups.load(Ordering::SeqCst), 1);
    }
}
