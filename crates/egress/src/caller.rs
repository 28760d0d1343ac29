//! Which program opened a connection: asked for once, when a rule wants to know.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use policy::id::SandboxId;
use policy::ports::SocketOwner;
use tokio::sync::{OnceCell, Semaphore};
use tokio::time::timeout;

/// How long a request waits for its turn to ask, and then for the answer.
const PATIENCE: Duration = Duration::from_secs(1);

/// What was found out, for the connection and whatever is inside it. That it is not certain
/// is found out too: the next connection may have more luck.
#[derive(Clone, Debug, Default)]
pub struct Caller(Arc<OnceCell<Option<String>>>);

impl Caller {
    /// The program of `sandbox` whose socket has these ends, if it is certain. `turns` limits how
    /// many are asked about at a time.
    pub async fn program(
        &self,
        programs: &Arc<dyn SocketOwner>,
        sandbox: &SandboxId,
        turns: &Arc<Semaphore>,
        (from, to): (SocketAddr, SocketAddr),
    ) -> Option<String> {
        self.find(|| ask(programs, sandbox, turns, from, to)).await
    }

    /// What was found out, or is now.
    async fn find<F>(&self, ask: impl FnOnce() -> F) -> Option<String>
    where
        F: Future<Output = Option<String>>,
    {
        self.0.get_or_init(ask).await.clone()
    }
}

async fn ask(
    programs: &Arc<dyn SocketOwner>,
    sandbox: &SandboxId,
    places: &Arc<Semaphore>,
    from: SocketAddr,
    to: SocketAddr,
) -> Option<String> {
    let turn = Arc::clone(places).acquire_owned();
    let place = timeout(PATIENCE, turn).await.ok()?.ok()?;
    let (programs, id) = (Arc::clone(programs), sandbox.clone());
    // A task of its own: a client that goes away must not give up the place of a question
    // that is still being answered.
    let answer = tokio::spawn(async move {
        let program = programs.owner(&id, from, to).await;
        drop(place);
        program
    });
    timeout(PATIENCE, answer).await.ok()?.ok()?
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::sync::Notify;

    use super::*;

    /// Says who it is once it may.
    #[derive(Default)]
    struct Slow {
        asked: AtomicUsize,
        may: Notify,
    }

    #[async_trait::async_trait]
    impl SocketOwner for Slow {
        async fn owner(&self, _: &SandboxId, _: SocketAddr, _: SocketAddr) -> Option<String> {
            let asked = self.asked.fetch_add(1, Ordering::SeqCst);
            self.may.notified().await;
            (asked == 0).then(|| "/usr/bin/first".to_owned())
        }
    }

    struct World {
        slow: Arc<Slow>,
        programs: Arc<dyn SocketOwner>,
        places: Arc<Semaphore>,
    }

    impl World {
        fn new() -> Self {
            let slow = Arc::new(Slow::default());
            Self {
                programs: Arc::clone(&slow) as _,
                slow,
                places: Arc::new(Semaphore::new(1)),
            }
        }

        async fn ask(&self) -> Option<String> {
            let id = SandboxId::parse("one").unwrap();
            let end = SocketAddr::from(([192, 0, 2, 1], 80));
            ask(&self.programs, &id, &self.places, end, end).await
        }
    }

    #[tokio::test(start_paused = true)]
    async fn all_requests_of_a_connection_ask_once() {
        let world = World::new();
        let caller = Caller::default();
        world.slow.may.notify_one();
        let tunnel = caller.clone();
        let both = tokio::join!(caller.find(|| world.ask()), tunnel.find(|| world.ask()));
        let first = Some("/usr/bin/first".to_owned());
        assert_eq!(both, (first.clone(), first.clone()));
        assert_eq!(caller.find(|| world.ask()).await, first);
        assert_eq!(world.slow.asked.load(Ordering::SeqCst), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_goes_away_leaves_its_place_taken_until_the_answer() {
        let world = World::new();
        // Time passes for nothing else: given up once the question was asked.
        assert!(timeout(PATIENCE / 2, world.ask()).await.is_err());
        assert_eq!(world.slow.asked.load(Ordering::SeqCst), 1);
        assert_eq!(world.places.available_permits(), 0);
        // Whoever comes now waits for a while, and then it is uncertain.
        assert_eq!(world.ask().await, None);
        assert_eq!(world.slow.asked.load(Ordering::SeqCst), 1);
        world.slow.may.notify_one();
        let free = world.places.acquire().await.unwrap();
        drop(free);
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_does_not_come_is_that_it_is_uncertain() {
        let world = World::new();
        let caller = Caller::default();
        assert_eq!(caller.find(|| world.ask()).await, None);
        // And stays so for the connection.
        world.slow.may.notify_one();
        assert_eq!(caller.find(|| world.ask()).await, None);
        assert_eq!(world.slow.asked.load(Ordering::SeqCst), 1);
    }
}
