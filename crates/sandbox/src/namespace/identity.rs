//! User and group ids of a sandbox.
//!
//! If the gate runs as root: 65536 ids for each sandbox, far above those of users and of the usual
//! ranges of `/etc/subuid`; in the sandbox init has the id 0 and the agent 1000. Without root: the
//! operator's single id, which is 1000 in the sandbox for init and the agent. For an agent that is
//! root in the sandbox: a slice of the operator's `/etc/subuid` range.

use std::fs::write;
use std::path::Path;

use nix::unistd::{Gid, Uid};

use super::hardening;
use super::protocol::{Identity, LaunchSpec};
use super::step::{Step, StepError};
use super::subids::IDS_PER_SANDBOX;

/// The agent's user id in the sandbox.
pub(crate) const AGENT_UID: u32 = 1000;
/// The agent's group id in the sandbox.
pub(crate) const AGENT_GID: u32 = 1000;

/// The account of the agent's processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Account {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// Whether the sandbox has its own ids, so that a process must switch to the agent's.
    pub(crate) has_range: bool,
    /// The capabilities of its processes.
    pub(crate) capabilities: &'static [u32],
    /// Whether its processes run at idle priority, because no cgroup gives them a weight.
    pub(crate) idle: bool,
}

/// The number of ids of one sandbox.
pub(crate) const IDS_IN_RANGE: u32 = 1 << 16;
/// The first id of the first range. The ranges end at 2³¹, because some programs treat higher ids
/// as negative.
const FIRST_RANGE: u32 = 1 << 30;
/// Maximum number of ranges.
const MAX_RANGES: u32 = (1 << 14) - 1;

/// Chooses a free range that is not in `taken`, starting the search at a hash of `seed`. If the
/// range at `preferred` is free, that range is chosen.
pub(crate) fn choose(
    root: bool,
    seed: &str,
    taken: &[u32],
    preferred: Option<u32>,
) -> Option<Identity> {
    if !root {
        return Some(Identity::Single);
    }
    let is_range =
        |first: u32| first >= FIRST_RANGE && (first - FIRST_RANGE).is_multiple_of(IDS_IN_RANGE);
    if let Some(first) = preferred.filter(|first| is_range(*first) && !taken.contains(first)) {
        return Some(Identity::own_range(first));
    }
    // Two gates with different directories rarely start at the same range.
    let start = hash(seed);
    (0..MAX_RANGES)
        .map(|offset| FIRST_RANGE + (start.wrapping_add(offset) % MAX_RANGES) * IDS_IN_RANGE)
        .find(|first| !taken.contains(first))
        .map(Identity::own_range)
}

/// Hashes a text with FNV-1a.
pub(crate) fn hash(text: &str) -> u32 {
    text.bytes().fold(0x811c_9dc5_u32, |hash, byte| {
        (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
    })
}

impl Identity {
    fn own_range(first: u32) -> Self {
        Self::Range {
            first,
            subids: None,
        }
    }
}

/// The agent's ids on the host, if the sandbox has a range.
pub(crate) fn agent_on_host(identity: Identity, root: bool) -> Option<(u32, u32)> {
    match identity {
        Identity::Range { first, .. } if root => Some((first, first)),
        Identity::Range { first, .. } => Some((first + AGENT_UID, first + AGENT_GID)),
        Identity::Single => None,
    }
}

impl LaunchSpec {
    /// The agent's account.
    pub(crate) fn agent(&self) -> Account {
        let root = self.config.system.root;
        Account {
            uid: if root { 0 } else { AGENT_UID },
            gid: if root { 0 } else { AGENT_GID },
            has_range: matches!(self.identity, Identity::Range { .. }),
            capabilities: if root {
                hardening::ROOT_AGENT_CAPABILITIES
            } else {
                &[]
            },
            idle: !self.cgroup_limits.cpu,
        }
    }
}

/// The range in which a non-root agent has this user id on the host.
pub(crate) fn range_of_agent(user: u32) -> Option<u32> {
    user.checked_sub(AGENT_UID)
}

/// The conventional id of `nobody`.
const NOBODY: u32 = 65534;

/// Writes the id maps of a newly cloned process, from its parent namespace.
pub(crate) fn write_maps(pid: i32, identity: Identity) -> Result<(), StepError> {
    let process = Path::new("/proc").join(pid.to_string());
    let (uids, gids) = match identity {
        Identity::Range {
            first,
            subids: None,
        } => {
            let map = format!("0 {first} {IDS_IN_RANGE}\n");
            (map.clone(), map)
        }
        Identity::Range {
            first,
            subids: Some(_),
        } => {
            let last = IDS_PER_SANDBOX - 1;
            let map = format!("0 {first} {last}\n{NOBODY} {} 1\n", first + last);
            (map.clone(), map)
        }
        Identity::Single => {
            // Without privileges the kernel accepts a group map only if setgroups is denied.
            write(process.join("setgroups"), "deny").step("denying setgroups")?;
            (
                format!("{AGENT_UID} {} 1\n", Uid::effective()),
                format!("{AGENT_GID} {} 1\n", Gid::effective()),
            )
        }
    };
    write(process.join("uid_map"), uids).step("mapping user ids")?;
    write(process.join("gid_map"), gids).step("mapping group ids")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_never_overlap_and_stay_positive() {
        let mut taken = Vec::new();
        for _ in 0..200 {
            let Some(Identity::Range { first, .. }) = choose(true, "same", &taken, None) else {
                panic!("no range");
            };
            assert_eq!(first % IDS_IN_RANGE, 0);
            assert!(first >= FIRST_RANGE && i32::try_from(first + IDS_IN_RANGE - 1).is_ok());
            assert!(!taken.contains(&first));
            taken.push(first);
        }
        let free = Identity::own_range(FIRST_RANGE + 7000 * IDS_IN_RANGE);
        let choose_preferred = |first| choose(true, "same", &taken, Some(first));
        assert_eq!(
            choose_preferred(FIRST_RANGE + 7000 * IDS_IN_RANGE),
            Some(free)
        );
        for first in [taken[3], 0, 1000, FIRST_RANGE + 1] {
            let chosen = choose_preferred(first);
            assert!(matches!(chosen, Some(Identity::Range { first: other, .. }) if other != first));
        }
        assert_eq!(choose(false, "x", &taken, None), Some(Identity::Single));
    }
}
