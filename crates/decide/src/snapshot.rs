//! The immutable rules of one configuration, and the pointer to the snapshot in force.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arc_swap::ArcSwap;
use config::Settings;
use config::bundle::BundleReadError;
use config::section::egress::{DomainRule, UnknownHostAction};
use config::section::git::MirrorSettings;
use config::section::policies::{ELICITATIONS, PUSHES, REQUESTS, TOOL_CALLS};
use credentials::table::CredentialTable;
use policy::github::GithubRules;
use policy::host::Host;
use policy::reason::Reason;
use policy::verdict::Denial;
use tokio::sync::watch;

use crate::bundles::Bundles;

/// All rules of one configuration. All checks of a request use the same snapshot; if another one
/// becomes current during the request, the request is decided again.
#[derive(Debug)]
pub struct PolicySnapshot {
    /// The unique number of the snapshot.
    pub number: u64,
    /// The settings.
    pub settings: Arc<Settings>,
    /// Whether some rule is limited to programs, so that the sender's program has to be looked up.
    pub names_programs: bool,
    /// The rules for GitHub's API.
    pub github: GithubRules,
    /// The credentials that requests may get.
    pub credentials: Arc<CredentialTable>,
    /// The operator's policies about requests.
    pub requests: Arc<Bundles>,
    /// The operator's policies about pushes.
    pub pushes: Arc<Bundles>,
    /// The operator's policies about tool calls and their results.
    pub calls: Arc<Bundles>,
    /// The operator's policies about requests of tool servers to their clients.
    pub elicitations: Arc<Bundles>,
}

fn next_number() -> u64 {
    static NEXT_NUMBER: AtomicU64 = AtomicU64::new(1);
    NEXT_NUMBER.fetch_add(1, Ordering::Relaxed)
}

impl PolicySnapshot {
    /// Loads the rules of `settings`. Blocks, because it reads policy bundles from disk.
    pub fn load(settings: Arc<Settings>) -> Result<Self, BundleReadError> {
        let names_programs = settings
            .allowlist()
            .rules()
            .any(|rule| !rule.programs.is_empty());
        // Unknown rule names were refused when the configuration file was read.
        let github = GithubRules::new(&settings.egress.github.allow, settings.git.read_public);
        let bundles = |entrypoint| Bundles::load(&settings, entrypoint).map(Arc::new);
        Ok(Self {
            number: next_number(),
            names_programs,
            github: github.unwrap_or_default(),
            credentials: Arc::new(CredentialTable::new(&settings.credentials)),
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
            credentials: Arc::new(CredentialTable::new(&settings.credentials)),
            requests: Arc::default(),
            pushes: Arc::default(),
            calls: Arc::default(),
            elicitations: Arc::default(),
            settings,
        }
    }

    /// The same rules for a sandbox with the additional domain rules `added`.
    #[must_use]
    pub fn with_added_rules(&self, added: &[DomainRule]) -> Self {
        let names_programs = added.iter().any(|rule| !rule.programs.is_empty());
        Self {
            number: next_number(),
            settings: match added {
                [] => Arc::clone(&self.settings),
                added => Arc::new(self.settings.with_added_rules(added)),
            },
            names_programs: self.names_programs || names_programs,
            github: self.github.clone(),
            credentials: Arc::clone(&self.credentials),
            requests: Arc::clone(&self.requests),
            pushes: Arc::clone(&self.pushes),
            calls: Arc::clone(&self.calls),
            elicitations: Arc::clone(&self.elicitations),
        }
    }

    /// Finds the mirror `name`. Upper and lower case and the suffix `.git` do not matter.
    pub fn mirror(&self, name: &str) -> Option<&MirrorSettings> {
        let name = name.strip_suffix(".git").unwrap_or(name);
        self.settings.git.mirrors.iter().find(|mirror| {
            let configured = mirror.name.strip_suffix(".git").unwrap_or(&mirror.name);
            configured.eq_ignore_ascii_case(name)
        })
    }

    /// Whether TLS connections to `host` are relayed without decryption.
    pub fn passes_unread(&self, host: &Host) -> bool {
        let patterns = &self.settings.egress.passthrough;
        patterns.iter().any(|pattern| pattern.matches(host))
    }

    /// Whether some policy bundle decides about messages of tools.
    pub fn governs_tools(&self) -> bool {
        !self.calls.is_empty() || !self.elicitations.is_empty()
    }

    /// The configured bundles for messages of tools that were skipped, and why.
    pub fn missing_tool_bundles(&self) -> Vec<String> {
        [self.calls.missing(), self.elicitations.missing()].concat()
    }

    /// Whether requests to hosts that are in no rule need the operator's approval.
    pub(crate) fn asks_about_hosts(&self) -> bool {
        self.settings.egress.unknown == UnknownHostAction::Ask
    }

    /// Whether `denial` becomes a question to the operator, because the host is in no rule.
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

    /// Makes all decisions that wait for an answer run again, after a change for one sandbox.
    pub fn announce(&self, number: u64) {
        self.changes.send_replace(number);
    }

    /// Subscribes to changes of the rules.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }
}
