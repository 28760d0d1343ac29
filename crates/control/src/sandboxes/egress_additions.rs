//! Hosts that a new sandbox may reach in addition to the operator's rules: by its tier, by presets,
//! and by its repository.
//!
//! The sandbox's row stores names, not rules, so that a sandbox has the current version of each
//! preset after an update of the program.

use config::Settings;
use config::presets::Preset;
use config::section::egress::DomainRule;
use config::section::sandbox::Tier;
use policy::endpoint::PathPattern;
use policy::host::{Host, HostPattern};
use policy::registration::Repo;
use sandbox::manager::row::SandboxRow;
use serde::{Deserialize, Serialize};

use super::repository::RepositoryInfo;
use crate::body::CreateBody;
use crate::reply::ControlError;

/// Maximum number of presets in one request.
const MAX_PRESETS: usize = 64;

/// The host of GitHub's repositories, which have further hosts for reads.
const GITHUB: &str = "github.com";

/// The additional hosts of one sandbox, as its row stores them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct EgressAdditions {
    /// The tier; none for sandboxes of earlier versions.
    pub(super) tier: Option<Tier>,
    /// Names of presets.
    pub(super) presets: Vec<String>,
    /// Repositories on git hosts that may be read.
    pub(super) reads: Vec<RepositoryReads>,
}

/// Repositories of one git host that a sandbox may read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RepositoryReads {
    host: String,
    repos: Vec<String>,
}

impl EgressAdditions {
    /// The additions for a new sandbox with the repositories `repos`.
    pub(super) fn plan(
        body: &CreateBody,
        host: &RepositoryInfo,
        repos: &[Repo],
        settings: &Settings,
    ) -> Result<Self, ControlError> {
        if body.presets.len() > MAX_PRESETS {
            return Err(ControlError::Bad(format!(
                "too many presets: at most {MAX_PRESETS}"
            )));
        }
        let tier = body.tier.unwrap_or(settings.sandbox.tier);
        let mut presets: Vec<String> = Vec::new();
        let mut add = |name: &str| {
            if presets.iter().all(|known| known != name) {
                presets.push(name.to_owned());
            }
        };
        for name in &body.presets {
            Preset::check_name(name).map_err(|unknown| ControlError::Bad(unknown.to_string()))?;
            add(name);
        }
        let mut reads = Vec::new();
        if tier != Tier::Locked {
            host.registries.iter().copied().for_each(&mut add);
            reads = repository_reads(host, repos, settings);
        }
        Ok(Self {
            tier: Some(tier),
            presets,
            reads,
        })
    }

    /// The additions in a sandbox's row; none if they cannot be parsed.
    pub(super) fn of(row: &SandboxRow) -> Self {
        let Some(kept) = row.egress.clone() else {
            return Self::default();
        };
        serde_json::from_value(kept)
            .inspect_err(|error| {
                tracing::warn!(sandbox = %row.id, %error, "sandbox row has invalid egress additions");
            })
            .unwrap_or_default()
    }

    /// The rules. Presets that this version does not have are left out.
    pub(super) fn rules(&self) -> Vec<DomainRule> {
        let mut rules = Vec::new();
        for name in &self.presets {
            match Preset::find(name) {
                Ok(preset) => rules.extend(preset.domains),
                Err(error) => tracing::warn!(%error, "preset of a sandbox does not exist"),
            }
        }
        let named = self.reads.iter().flat_map(RepositoryReads::rules);
        rules.extend(named);
        if self.tier == Some(Tier::Open) {
            rules.push(DomainRule {
                methods: read_methods(),
                rule_name: Some("tier:open".to_owned()),
                ..DomainRule::allow_all(HostPattern::Any)
            });
        }
        rules
    }

    /// What the additions allow, in one line; none if there are none.
    pub(super) fn line(&self) -> Option<String> {
        let mut parts = Vec::new();
        match self.presets.as_slice() {
            [] => {}
            [one] => parts.push(format!("preset {one}")),
            several => parts.push(format!("presets {}", several.join(", "))),
        }
        parts.extend(self.reads.iter().map(|reads| {
            let host = &reads.host;
            let repos: Vec<String> = reads
                .repos
                .iter()
                .map(|repo| format!("{host}/{repo}"))
                .collect();
            format!("reads of {}", repos.join(", "))
        }));
        if self.tier == Some(Tier::Open) {
            parts.push("reads of every host".to_owned());
        }
        let tier = self.tier.map_or("balanced", Tier::as_str);
        (!parts.is_empty()).then(|| format!("tier {tier}: {}", parts.join(", ")))
    }
}

/// The reads of the registered repositories. Where no remote is on a git host, the repositories may
/// be on any of them.
fn repository_reads(
    host: &RepositoryInfo,
    repos: &[Repo],
    settings: &Settings,
) -> Vec<RepositoryReads> {
    if repos.is_empty() {
        return Vec::new();
    }
    let hosts = match host.origin_host(&settings.git.hosts) {
        Some(origin) => vec![origin.clone()],
        None => settings.git.hosts.clone(),
    };
    let repos: Vec<String> = repos
        .iter()
        .map(|repo| repo.name.as_str().to_owned())
        .collect();
    let reads = |host: &Host| RepositoryReads {
        host: host.to_string(),
        repos: repos.clone(),
    };
    hosts.iter().map(reads).collect()
}

fn read_methods() -> Vec<String> {
    ["GET", "HEAD"].map(str::to_owned).into()
}

impl RepositoryReads {
    /// Rules for fetching the repositories, and for reading their files on GitHub's other hosts. The
    /// rules for git apply to each request as well.
    fn rules(&self) -> Vec<DomainRule> {
        let mut rules = Vec::new();
        let mut add = |host: &str, methods: Vec<String>, form: &[&str]| {
            let repos = self.repos.iter();
            let paths: Vec<PathPattern> = repos
                .flat_map(|repo| form.iter().map(move |form| form.replace("REPO", repo)))
                .filter_map(|path| PathPattern::parse(&path).ok())
                .collect();
            // A rule without paths would allow all of them.
            if let (Ok(host), false) = (HostPattern::parse(host), paths.is_empty()) {
                rules.push(DomainRule {
                    methods,
                    paths,
                    rule_name: Some("tier:balanced".to_owned()),
                    ..DomainRule::allow_all(host)
                });
            }
        };
        add(&self.host, read_methods(), &["/REPO/**", "/REPO.git/**"]);
        let fetch = ["/REPO/git-upload-pack", "/REPO.git/git-upload-pack"];
        add(&self.host, vec!["POST".to_owned()], &fetch);
        if self.host == GITHUB {
            add("raw.githubusercontent.com", read_methods(), &["/REPO/**"]);
            add("codeload.github.com", read_methods(), &["/REPO/**"]);
            add("api.github.com", read_methods(), &["/repos/REPO/**"]);
        }
        rules
    }
}

#[cfg(test)]
mod tests {
    use policy::registration::RepoName;

    use super::*;

    fn body(tier: Option<Tier>, presets: &[&str]) -> CreateBody {
        serde_json::from_value(serde_json::json!({
            "name": "fix", "tier": tier, "presets": presets,
        }))
        .unwrap()
    }

    fn repository() -> RepositoryInfo {
        RepositoryInfo {
            remotes: vec![(
                "origin".to_owned(),
                "git@github.com:acme/widgets.git".to_owned(),
            )],
            registries: vec!["crates", "npm"],
            ..RepositoryInfo::default()
        }
    }

    fn repos(names: &[&str]) -> Vec<Repo> {
        let repo = |name: &&str| Repo {
            name: RepoName::parse(name).unwrap(),
            max_receive_pack_bytes: None,
        };
        names.iter().map(repo).collect()
    }

    fn plan(tier: Option<Tier>, presets: &[&str], registered: &[&str]) -> EgressAdditions {
        let settings = Settings::default();
        let (body, repos) = (body(tier, presets), repos(registered));
        EgressAdditions::plan(&body, &repository(), &repos, &settings).unwrap()
    }

    #[test]
    fn tiers_add_what_their_names_say() {
        for (tier, presets, line) in [
            (
                None,
                &["claude"][..],
                "tier balanced: presets claude, crates, npm, reads of github.com/acme/widgets",
            ),
            (
                Some(Tier::Locked),
                &["claude"],
                "tier locked: preset claude",
            ),
            (
                Some(Tier::Balanced),
                &["npm"],
                "tier balanced: presets npm, crates, reads of github.com/acme/widgets",
            ),
            (
                Some(Tier::Open),
                &[],
                "tier open: presets crates, npm, reads of github.com/acme/widgets, reads of every host",
            ),
        ] {
            let planned = plan(tier, presets, &["acme/widgets"]);
            assert_eq!(planned.line().as_deref(), Some(line));
            let stored = serde_json::to_value(&planned).unwrap();
            assert_eq!(
                serde_json::from_value::<EgressAdditions>(stored).unwrap(),
                planned
            );
        }
        assert_eq!(
            plan(Some(Tier::Locked), &[], &["acme/widgets"]).line(),
            None
        );
        assert!(
            plan(Some(Tier::Locked), &[], &["acme/widgets"])
                .rules()
                .is_empty()
        );
    }

    #[test]
    fn repository_reads_name_the_registered_repositories_only() {
        let planned = plan(None, &[], &["acme/widgets", "acme/tools"]);
        let rules: Vec<DomainRule> = planned
            .rules()
            .into_iter()
            .filter(|rule| rule.rule_name.as_deref() == Some("tier:balanced"))
            .collect();
        let shown = serde_json::to_value(&rules).unwrap();
        assert_eq!(
            shown[0],
            serde_json::json!({
                "host": "github.com", "methods": ["GET", "HEAD"],
                "paths": ["/acme/widgets/**", "/acme/widgets.git/**", "/acme/tools/**", "/acme/tools.git/**"],
            })
        );
        assert_eq!(shown[1]["methods"], serde_json::json!(["POST"]));
        assert!(
            rules
                .iter()
                .all(|rule| !rule.paths.is_empty() && !rule.methods.is_empty())
        );
        assert!(plan(None, &[], &[]).reads.is_empty());
    }

    #[test]
    fn unknown_preset_is_refused_with_a_suggestion() {
        let (settings, body) = (Settings::default(), body(None, &["cluade"]));
        let error = EgressAdditions::plan(&body, &repository(), &[], &settings).unwrap_err();
        assert!(
            error.to_string().contains("did you mean 'claude'?"),
            "{error}"
        );
    }
}
