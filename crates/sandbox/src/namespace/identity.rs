//! Who the sandbox is, inside and outside.
//!
//! As root: 65536 ids of its own, far above those of people and of `/etc/subuid`'s usual
//! ranges; init is 0 inside and the agent 1000. Else the operator's one id, which is 1000
//! inside, for both.

use std::fs::write;
use std::path::Path;

use nix::unistd::{Gid, Uid};

use super::protocol::Identity;
use super::step::{Step, Stumble};

/// The agent inside.
pub(crate) const AGENT_UID: u32 = 1000;
/// Its group.
pub(crate) const AGENT_GID: u32 = 1000;

/// Ids of one sandbox.
const RANGE: u32 = 1 << 16;
/// The first of all ranges, and how many there are: from 2³⁰ up to 2³¹, above which ids are
/// negative to some programs.
const FIRST: u32 = 1 << 30;
const RANGES: u32 = (1 << 14) - 1;

/// Chooses ids: a range nobody in `taken` has, starting the search at a place of its own.
pub(crate) fn choose(root: bool, seed: &str, taken: &[u32]) -> Option<Identity> {
    if !root {
        return Some(Identity::Single);
    }
    // FNV-1a: two gates with different directories rarely begin at the same place.
    let start = seed.bytes().fold(0x811c_9dc5_u32, |hash, byte| {
        (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
    });
    (0..RANGES)
        .map(|offset| FIRST + (start.wrapping_add(offset) % RANGES) * RANGE)
        .find(|first| !taken.contains(first))
        .map(|first| Identity::Range { first })
}

/// Writes the maps of a process that has just been cloned. From outside.
pub(crate) fn write_maps(pid: i32, identity: Identity) -> Result<(), Stumble> {
    let process = Path::new("/proc").join(pid.to_string());
    let (uids, gids) = match identity {
        Identity::Range { first } => {
            let map = format!("0 {first} {RANGE}\n");
            (map.clone(), map)
        }
        Identity::Single => {
            // Without privilege a group map is only taken from somebody who cannot drop groups.
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
            let Some(Identity::Range { first }) = choose(true, "same", &taken) else {
                panic!("no range");
            };
            assert_eq!(first % RANGE, 0);
            assert!(first >= FIRST && i32::try_from(first + RANGE - 1).is_ok());
            assert!(!taken.contains(&first));
            taken.push(first);
        }
        assert_eq!(choose(false, "x", &taken), Some(Identity::Single));
    }
}
