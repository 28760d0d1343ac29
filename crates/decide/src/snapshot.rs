//! The rules of one configuration, immutable, and the pointer to those in force.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arc_swap::ArcSwap;
use config::Settings;
use config::bundle::BundleReadError;
use config::section::egress::{DomainRule, UnknownHostAction};
use config::section::git::MirrorSettings;
use config::section::policies::{ELICITATIONS, PUSHES, REQUESTS, TOOL_CALLS};
use policy::github::GithubRules;
use policy::host::Host;
use policy::reason::Reason;
use policy::verdict::Denial;
use tokio::sync::watch;

use crate::bundles::Bundles;

/// All rules of one configuration. All checks of a request use the same snapshot; if another one
/// becomes current meanwhile, the request is decided again.
#[derive(Debug)]
pub struct PolicySnapshot {
    /// The unique number of the snapshot.
    pub number: u64,
    /// The settings.
    pub settings: Arc<Settings>,
    /// Whether some rule names programs, so that the sender's program has to be looked up.
    pub names_programs: bool,
    /// The rules for GitHub's API.
    pub github: GithubRules,
    /// The operator's policies about requests.
    pub requests: Arc<Bundles>,
    /// The operator's policies about pushes.
    pub pushes: Arc<Bundles>,
    /// The operator's policies about tool calls and their results.
    pub calls: Arc<Bundles>,
    /// The operator's policies about questions of tools.
    pub elicitations: Arc<Bundles>,
}

fn next_number() -> u64 {
    static NUMBERS: AtomicU64 = AtomicU64::new(1);
    NUMBERS.fetch_add(1, Ordering::Relaxed)
}

impl PolicySnapshot {
    /// Prepares the rules of `settings`. Reads policy bundles, so it blocks.
    pub fn load(settings: Arc<Settings>) -> Result<Self, BundleReadError> {
        let names_programs = settings
            .allowlist()
            .rules()
            .any(|rule| !rule.programs.is_empty());
        // Names of rules that do not exist were refused when the file was read.
        let github = GithubRules::new(&settings.egress.github.allow, settings.git.read_public);
        let bundles = |entrypoint| Bundles::load(&settings, entrypoint).map(Arc::new);
        Ok(Self {
            number: next_number(),
            names_programs,
            github: github.unwrap_or_default(),
            requests: bundles(REQUESTS)?,
            pushes: bundles(PUSHES)?,
            calls: bundles(TOOL_CALLS)?,
            elicitations: bundles(ELICITATIONS)?,
            settings,
        })
    }

    /// The rules of `settings` without any policy bundle.
    pub fn without_bundles(settings: Arc<Settings>) -> Self {
        let github = GithubRules::new(&settings.egress.github.allow, settings.git.read_public);
        Self {
            number: next_number(),
            names_programs: false,
            github: github.unwrap_or_default(),
            requests: Arc::default(),
            pushes: Arc::default(),
            calls: Arc::default(),
            elicitations: Arc::default(),
            settings,
        }
    }

    /// The same rules for a sandbox with the additional domain rules `added`.
    #[must_use]
    pub fn allowing(&self, added: &[DomainRule]) -> Self {
        let names_programs = added.iter().any(|rule| !rule.programs.is_empty());
        Self {
            number: next_number(),
            settings: match added {
                [] => Arc::clone(&self.settings),
                added => Arc::new(self.settings.allowing(added)),
            },
            names_programs: self.names_programs || names_programs,
            github: self.github.clone(),
            requests: Arc::clone(&self.requests),
            pushes: Arc::clone(&self.pushes),
            calls: Arc::clone(&self.calls),
            elicitations: Arc::clone(&self.elicitations),
        }
    }

    /// The mirror of that name, in any case and without `.git`.
    pub fn mirror(&self, name: &str) -> Option<&MirrorSettings> {
        let name = name.strip_suffix(".git").unwrap_or(name);
        self.settings.git.mirrors.iter().find(|mirror| {
            let own = mirror.name.strip_suffix(".git").unwrap_or(&mirror.name);
            own.eq_ignore_ascii_case(name)
        })
    }

    /// Whether TLS to `host` is passed on unread.
    pub fn passes_unread(&self, host: &Host) -> bool {
        let unread = &self.settings.egress.passthrough;
        unread.iter().any(|pattern| pattern.matches(host))
    }

    /// Whether some policy bundle decides about messages of tools.
    pub fn governs_tools(&self) -> bool {
        !self.calls.is_empty() || !self.elicitations.is_empty()
    }

    /// Bundles for messages of tools that are configured and were left out, and why.
    pub fn missing_tool_bundles(&self) -> Vec<String> {
        [self.calls.missing(), self.elicitations.missing()].concat()
    }

    /// Whether the operator decides about hosts that no rule names.
    pub(crate) fn asks_about_hosts(&self) -> bool {
        self.settings.egress.unknown == UnknownHostAction::Ask
    }

    /// Whether the operator decides about what `denial` refuses: a host that no rule names.
    pub(crate) fn asks_about(&self, denial: &Denial) -> bool {
        let unknown = matches!(denial.reason, Reason::HostDenied | Reason::IpLiteral);
        unknown && self.asks_about_hosts()
    }
}

/// The current snapshot, shared by all listeners.
#[derive(Debug)]
pub struct CurrentPolicy {
    snapshot: ArcSwap<PolicySnapshot>,
    changes: watch::Sender<u64>,
}

impl CurrentPolicy {
    /// Puts the first snapshot in force.
    pub fn new(snapshot: PolicySnapshot) -> Self {
        Self {
            changes: watch::Sender::new(snapshot.number),
            snapshot: ArcSwap::from_pointee(snapshot),
        }
    }

    /// The snapshot in force.
    pub fn load(&self) -> Arc<PolicySnapshot> {
        self.snapshot.load_full()
    }

    /// The settings in force.
    pub fn settings(&self) -> Arc<Settings> {
        Arc::clone(&self.snapshot.load().settings)
    }

    /// Puts another snapshot in force. Decisions that wait for an answer are made again.
    pub fn replace(&self, snapshot: Arc<PolicySnapshot>) {
        let number = snapshot.number;
        self.snapshot.store(snapshot);
        self.announce(number);
    }

    /// Makes all held decisions run again, after a change for one sandbox.
    pub fn announce(&self, number: u64) {
        self.changes.send_replace(number);
    }

    /// Receives every change from now on.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }
}
