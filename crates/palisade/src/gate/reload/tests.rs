use std::io::Write as _;

use control::metrics::ControlMetrics;
use mcp::fingerprint::Fingerprints;
use notify::event::{CreateKind, DataChange, RenameMode};
use policy::host::Host;
use tokio::signal::unix::{SignalKind, signal};

use super::*;
use crate::gate::ports::{SocketOwnerLookup, StoreAuditSink};
use crate::gate::{load_policy, open_manager, open_store, open_tools, open_traffic, tools};
use crate::paths::Paths;
use crate::telemetry::LogSink;
use crate::telemetry::redact::Redactor;

#[test]
fn file_is_open_from_its_first_write_to_its_close() {
    let path = PathBuf::from("/c/palisade.yaml");
    let mut writing = FileWrites::default();
    writing.config_files.insert(path.clone());
    let mut record = |kind: EventKind, path: &str| {
        writing.record(&notify::Event::new(kind).add_path(path.into()));
        writing.open.len()
    };
    let data = EventKind::Modify(ModifyKind::Data(DataChange::Any));
    let close = EventKind::Access(AccessKind::Close(AccessMode::Write));
    assert_eq!(record(data, "/c/other.log"), 0, "not a configuration file");
    assert_eq!(record(data, "/c/palisade.yaml"), 1);
    assert_eq!(record(data, "/c/palisade.yaml"), 1);
    assert_eq!(record(close, "/c/palisade.yaml"), 0);
    record(data, "/c/palisade.yaml");
    let renamed = EventKind::Modify(ModifyKind::Name(RenameMode::To));
    assert_eq!(
        record(renamed, "/c/palisade.yaml"),
        0,
        "the path names another file"
    );
    record(data, "/c/palisade.yaml");
    assert_eq!(
        record(EventKind::Create(CreateKind::File), "/c/palisade.yaml"),
        0
    );
}

/// A reloader with the parts of a gate, in a temporary directory.
struct Fixture {
    dir: tempfile::TempDir,
    reloader: Arc<Reloader>,
    stop: CancellationToken,
}

impl Fixture {
    async fn new(text: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let paths = Paths {
            state_dir: dir.path().join("state"),
            control: dir.path().join("state/control.sock"),
            config: ConfigPath::Named(dir.path().join("palisade.yaml")),
        };
        paths.prepare().unwrap();
        let sources = write(&dir, text);
        let settings = sources.settings(&read_environment_variable).unwrap();
        let telemetry = Arc::new(Telemetry::start(&settings, 0, LogSink::Stderr).unwrap());
        let stop = CancellationToken::new();
        let store = open_store(&paths, &settings).await.unwrap();
        let settings = Arc::new(settings);
        let socket_owners =
            SocketOwnerLookup(open_manager(&paths).await.unwrap().backend().clone());
        let policy = load_policy(Arc::clone(&settings)).await.unwrap();
        let traffic = open_traffic(&paths, &store, socket_owners, &policy, Redactor::default());
        let traffic = traffic.await.unwrap();
        let health_registry = Arc::new(HealthRegistry::default());
        let network_listeners = NetworkListeners::new(
            Arc::clone(&traffic),
            Arc::clone(&health_registry),
            stop.clone(),
        );
        let (process_metrics, metrics) =
            (ProcessMetrics::default(), mcp::metrics::Metrics::default());
        let counters = ControlMetrics::default();
        let registry = process_metrics.registry(store.clone(), &counters, &traffic, &metrics);
        let dependencies = tools::McpDependencies {
            policy: Arc::clone(&policy),
            questions: traffic.questions().clone(),
            audit: Arc::new(StoreAuditSink(store.clone())),
            fingerprints: Fingerprints::in_memory(),
            health_registry: Arc::clone(&health_registry),
            registry: Arc::new(registry),
            metrics,
            sandbox_launcher: Arc::new(tools::SandboxLauncher::default()),
        };
        let tools = open_tools(settings, dependencies, &stop);
        let tools = tools.await.unwrap();
        let (_, requests) = mpsc::channel(1);
        let reloader = Reloader {
            config: paths.config.clone(),
            health_registry,
            process_metrics,
            telemetry,
            store,
            policy,
            traffic,
            network_listeners: Arc::new(network_listeners),
            tools,
            requests: Mutex::new(requests),
            hangup: Mutex::new(signal(SignalKind::hangup()).unwrap()),
            last_fingerprint: Mutex::new(sources.fingerprint()),
            changed: Arc::new(Notify::new()),
        };
        Self {
            dir,
            reloader: Arc::new(reloader),
            stop,
        }
    }

    async fn reload(&self, text: &str) -> Result<Vec<String>, String> {
        self.reloader.reload(write(&self.dir, text)).await
    }

    /// Whether the policy in force allows the host.
    fn allows(&self, host: &str) -> bool {
        let host = Host::parse(host).unwrap();
        let snapshot = self.reloader.policy.load();
        let allowlist = snapshot.settings.allowlist();
        allowlist.judge_unread(&host, 443, None).is_ok()
    }
}

fn write(dir: &tempfile::TempDir, text: &str) -> Sources {
    let path = dir.path().join("palisade.yaml");
    let mut file = std::fs::File::create(&path).unwrap();
    write!(file, "version: \"1.0\"\n{text}").unwrap();
    Sources::read(Some(&path), &read_environment_variable).unwrap()
}

// Issue 14, number 10.
#[tokio::test]
async fn reload_refused_by_audit_keeps_the_traffic_rules() {
    let fixture = Fixture::new("egress: {domains: [old.example]}\n").await;
    let allowed = || (fixture.allows("old.example"), fixture.allows("new.example"));
    assert_eq!(allowed(), (true, false));
    // The audit writer has ended, so it cannot accept options.
    fixture.reloader.store.close().await.unwrap();
    let refused = fixture.reload("egress: {domains: [new.example]}\n").await;
    assert!(refused.is_err(), "{refused:?}");
    assert_eq!(allowed(), (true, false), "the old rules stay");
    let settings = fixture.reloader.policy.settings();
    assert_eq!(settings.egress.domains.len(), 1);
    let health = fixture.reloader.health_registry.report([]);
    assert!(!health.checks["config_current"]);
    fixture.stop.cancel();
}

// Issue 15, number 16. The clock is paused: it stops while files are read, and advances at once
// while the reloader waits.
#[tokio::test]
async fn changed_file_is_in_force_within_five_seconds() {
    let fixture = Fixture::new("egress: {domains: [old.example]}\n").await;
    tokio::time::pause();
    let running = tokio::spawn(Arc::clone(&fixture.reloader).run(fixture.stop.clone()));
    // The reloader has read the files, and waits.
    tokio::time::sleep(Duration::from_millis(10)).await;
    let fresh = fixture.dir.path().join("fresh");
    let text = "version: \"1.0\"\negress: {domains: [new.example]}\n";
    std::fs::write(&fresh, text).unwrap();
    std::fs::rename(fresh, fixture.dir.path().join("palisade.yaml")).unwrap();
    let changed = Instant::now();
    while !fixture.allows("new.example") {
        assert!(changed.elapsed() < Duration::from_secs(5));
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(!fixture.allows("old.example"));
    fixture.stop.cancel();
    running.await.unwrap().unwrap();
}
