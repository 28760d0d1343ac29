//! Subordinate ids of the operator, from `/etc/subuid` and `/etc/subgid`.
//!
//! The ids are divided into slices, one for each sandbox. In the sandbox, the ids of a slice are 0
//! to 4094, and the last id of the slice is 65534, the conventional `nobody`. The 65536 ids that
//! distributions grant to a user suffice for sixteen sandboxes.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fmt;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use nix::unistd::{Gid, Uid, User};
use serde::{Deserialize, Serialize};

use super::subid_map::{Extent, MappingTools, SubidMap};

/// The number of subordinate ids of a sandbox.
pub(crate) const IDS_PER_SANDBOX: u32 = 1 << 12;

/// Minimum id: lower ones belong to the system and to users, and are never used.
const MIN_ID: u32 = 1 << 16;
/// Maximum id: some programs treat higher ones as negative.
const MAX_ID: u32 = 1 << 31;

/// The first id of a new line, as in `useradd`.
const DEFAULT_FIRST_ID: u32 = 100_000;
/// The number of ids of a new line, as in `useradd`.
const DEFAULT_ID_COUNT: u32 = 1 << 16;

/// The ids of one sandbox: as many groups as users.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SubidSlice {
    /// The first user.
    pub(crate) first: u32,
    /// The first group.
    pub(crate) groups: u32,
}

/// The subordinate ids of an operator.
#[derive(Debug)]
pub(crate) struct SubidGrant {
    users: Vec<Range>,
    groups: Vec<Range>,
    tools: MappingTools,
    user: u32,
    group: u32,
}

/// A half-open range.
type Range = (u32, u32);

/// Why subordinate ids are not available, and the remedy.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct SubidsUnavailable {
    /// The problem.
    pub(crate) found: String,
    /// The remedy.
    pub(crate) fix: String,
}

impl fmt::Display for SubidsUnavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {}", self.found, self.fix)
    }
}

impl SubidGrant {
    /// Reads the operator's subordinate ids.
    pub(crate) fn read() -> Result<Self, SubidsUnavailable> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let tool = |name: &str| find_tool(name, &path).ok_or_else(|| missing_tool(name));
        let tools = MappingTools {
            users: tool("newuidmap")?,
            groups: tool("newgidmap")?,
        };
        let (user, group) = (Uid::effective(), Gid::effective());
        let name = User::from_uid(user).ok().flatten().map(|user| user.name);
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let lines = (read("/etc/subuid"), read("/etc/subgid"));
        let users = granted_ranges(&lines.0, name.as_deref(), user.as_raw());
        let groups = granted_ranges(&lines.1, name.as_deref(), user.as_raw());
        let grant = Self {
            users,
            groups,
            tools,
            user: user.as_raw(),
            group: group.as_raw(),
        };
        if grant.slices().is_empty() {
            let user_name = name.unwrap_or_else(|| user.to_string());
            return Err(grant.missing_line(&user_name, &[&lines.0, &lines.1]));
        }
        Ok(grant)
    }

    /// Chooses ids for a new sandbox: not in `taken`, and not used by a process that another gate
    /// of the operator may have started.
    pub(crate) fn choose(
        &self,
        seed: &str,
        taken: &[u32],
    ) -> Result<SubidSlice, SubidsUnavailable> {
        let slices = self.slices();
        let running_user_ids = running_user_ids();
        let is_free = |slice: &&SubidSlice| {
            let ids = slice.first..slice.first.saturating_add(IDS_PER_SANDBOX);
            !taken.iter().any(|first| ids.contains(first))
                && running_user_ids.range(ids).next().is_none()
        };
        // Two gates with different directories rarely start at the same slice.
        let start = super::identity::hash(seed) as usize % slices.len().max(1);
        let free = slices.iter().cycle().skip(start).take(slices.len());
        free.into_iter()
            .find(is_free)
            .copied()
            .ok_or_else(|| SubidsUnavailable {
                found: format!(
                    "all {} slices of the ids of /etc/subuid are in use",
                    slices.len()
                ),
                fix: "delete a sandbox, or add more subordinate ids".to_owned(),
            })
    }

    /// The number of sandboxes that the ids suffice for.
    pub(crate) fn capacity(&self) -> usize {
        self.slices().len()
    }

    /// The subid map of these sandboxes and the operator. Ids have the same numbers inside and
    /// outside, except that the groups of a slice have the numbers of its users.
    pub(crate) fn map_for(&self, slices: &[SubidSlice]) -> SubidMap {
        let extents = |own: u32, outside: fn(&SubidSlice) -> u32| {
            let slices = slices.iter().map(|slice| Extent {
                first_inside: slice.first,
                first_outside: outside(slice),
                count: IDS_PER_SANDBOX,
            });
            slices.chain([Extent::identical(own, 1)]).collect()
        };
        SubidMap {
            tools: self.tools.clone(),
            users: extents(self.user, |slice| slice.first),
            groups: extents(self.group, |slice| slice.groups),
        }
    }

    /// The subid map of all granted ids, for removing files without a record.
    pub(crate) fn map_for_all(&self) -> SubidMap {
        let extents = |ranges: &[Range], own: u32| {
            let granted = ranges
                .iter()
                .map(|(from, to)| Extent::identical(*from, to - from));
            granted.chain([Extent::identical(own, 1)]).collect()
        };
        SubidMap {
            tools: self.tools.clone(),
            users: extents(&self.users, self.user),
            groups: extents(&self.groups, self.group),
        }
    }

    fn slices(&self) -> Vec<SubidSlice> {
        let first_ids = |ranges: &[Range]| -> Vec<u32> {
            let count = |(from, to): &Range| (to - from) / IDS_PER_SANDBOX;
            let firsts = ranges.iter().flat_map(|range| {
                (0..count(range)).map(move |offset| range.0 + offset * IDS_PER_SANDBOX)
            });
            firsts.collect()
        };
        let contains_id =
            |first: u32, id: u32| (first..first.saturating_add(IDS_PER_SANDBOX)).contains(&id);
        first_ids(&self.users)
            .into_iter()
            .zip(first_ids(&self.groups))
            .map(|(first, groups)| SubidSlice { first, groups })
            // The operator's group is mapped to its own number, so no other group may be mapped to
            // that number.
            .filter(|slice| !contains_id(slice.first, self.group))
            .collect()
    }

    fn missing_line(&self, user_name: &str, lines: &[&str]) -> SubidsUnavailable {
        let missing: Vec<&str> = [(&self.users, "/etc/subuid"), (&self.groups, "/etc/subgid")]
            .into_iter()
            .filter(|(ranges, _)| !ranges.iter().any(|(from, to)| to - from >= IDS_PER_SANDBOX))
            .map(|(_, file)| file)
            .collect();
        let missing = if missing.is_empty() {
            "/etc/subuid".to_owned()
        } else {
            missing.join(" and ")
        };
        let from = first_free(lines);
        let to = from + DEFAULT_ID_COUNT - 1;
        SubidsUnavailable {
            found: format!(
                "{missing} has no line that grants {IDS_PER_SANDBOX} or more ids to {user_name}"
            ),
            fix: format!(
                "as root: usermod --add-subuids {from}-{to} --add-subgids {from}-{to} {user_name}"
            ),
        }
    }
}

fn missing_tool(name: &str) -> SubidsUnavailable {
    SubidsUnavailable {
        found: format!("{name}, which maps ids, is missing or not setuid"),
        fix: "as root: apt install uidmap (elsewhere the package is called shadow-utils)"
            .to_owned(),
    }
}

/// The ranges that a file grants to a user: sorted, without overlaps, and without real ids.
fn granted_ranges(lines: &str, name: Option<&str>, uid: u32) -> Vec<Range> {
    let number = uid.to_string();
    let mut ranges: Vec<Range> = parse(lines)
        .filter(|(user_name, _)| Some(*user_name) == name || *user_name == number)
        .map(|(_, (from, to))| (from.max(MIN_ID), to.min(MAX_ID)))
        .filter(|(from, to)| from < to)
        .collect();
    ranges.sort_unstable();
    let mut merged: Vec<Range> = Vec::new();
    for (from, to) in ranges {
        match merged.last_mut() {
            Some(last) if from <= last.1 => last.1 = last.1.max(to),
            _ => merged.push((from, to)),
        }
    }
    // The operator's own id is never used.
    merged.retain(|(from, to)| !(*from..*to).contains(&uid));
    merged
}

/// Parses every valid line: `user_name:first:count`.
fn parse(lines: &str) -> impl Iterator<Item = (&str, Range)> {
    lines.lines().filter_map(|line| {
        let mut words = line.trim().split(':');
        let user_name = words.next().filter(|user_name| !user_name.is_empty())?;
        let from: u32 = words.next()?.parse().ok()?;
        let count: u32 = words.next()?.parse().ok()?;
        Some((user_name, (from, from.checked_add(count)?)))
    })
}

/// The first id after all granted ranges.
fn first_free(lines: &[&str]) -> u32 {
    let ends = lines
        .iter()
        .flat_map(|lines| parse(lines))
        .map(|(_, (_, to))| to)
        .filter(|to| *to < MAX_ID - DEFAULT_ID_COUNT);
    ends.max().unwrap_or(DEFAULT_FIRST_ID).max(DEFAULT_FIRST_ID)
}

/// Finds a mapping tool that only root can change, in a directory that only root can change, with
/// setuid or a file capability.
fn find_tool(name: &str, path: &OsStr) -> Option<PathBuf> {
    let default_directories = ["/usr/bin", "/bin", "/usr/local/bin"].map(PathBuf::from);
    std::env::split_paths(path)
        .chain(default_directories)
        .filter(|directory| directory.is_absolute() && is_only_writable_by_root(directory))
        .map(|directory| directory.join(name))
        .find(|tool| {
            tool.metadata().is_ok_and(|data| {
                let mode = data.permissions().mode();
                data.is_file()
                    && mode & 0o111 != 0
                    && is_only_writable_by_root(tool)
                    && (mode & libc::S_ISUID != 0 || has_capability(tool))
            })
        })
}

/// Whether only root can change the path.
fn is_only_writable_by_root(path: &Path) -> bool {
    path.metadata()
        .is_ok_and(|data| data.uid() == 0 && data.mode() & 0o022 == 0)
}

fn has_capability(path: &Path) -> bool {
    let Ok(path) = std::ffi::CString::new(path.as_os_str().as_bytes()) else {
        return false;
    };
    let name = c"security.capability";
    // SAFETY: both strings outlive the call, which writes nothing, because the size of the buffer
    // is 0.
    let length = unsafe { libc::getxattr(path.as_ptr(), name.as_ptr(), std::ptr::null_mut(), 0) };
    length > 0
}

/// The user ids of all processes on this machine, without zombies.
fn running_user_ids() -> BTreeSet<u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries
        .filter(|entry| {
            entry
                .file_name()
                .as_bytes()
                .first()
                .is_some_and(u8::is_ascii_digit)
        })
        .filter_map(|entry| fs::read_to_string(entry.path().join("status")).ok())
        .flat_map(|status| {
            let words = |name: &str| {
                let line = status.lines().find_map(|line| line.strip_prefix(name));
                line.unwrap_or_default().split_whitespace()
            };
            let is_zombie = words("State:").next().is_some_and(|state| state == "Z");
            let ids = words("Uid:").filter(|_| !is_zombie);
            ids.filter_map(|id| id.parse().ok()).collect::<Vec<u32>>()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grant(subuid: &str, subgid: &str) -> SubidGrant {
        SubidGrant {
            users: granted_ranges(subuid, Some("ann"), 2000),
            groups: granted_ranges(subgid, Some("ann"), 2000),
            tools: MappingTools {
                users: "/usr/bin/newuidmap".into(),
                groups: "/usr/bin/newgidmap".into(),
            },
            user: 2000,
            group: 2000,
        }
    }

    #[test]
    fn lines_match_by_name_and_number_and_malformed_are_skipped() {
        for (lines, expected) in [
            ("ann:100000:65536\n", vec![(100_000, 165_536)]),
            ("2000:100000:65536", vec![(100_000, 165_536)]),
            ("bob:100000:65536", vec![]),
            ("anna:100000:65536\n20000:1:2", vec![]),
            ("ann:100000", vec![]),
            ("ann:x:65536\nann::\n#\n\n:::", vec![]),
            ("ann:4294967295:2", vec![]),
            // Never ids of root, users or the operator.
            ("ann:0:65536", vec![]),
            ("ann:0:70000", vec![(65_536, 70_000)]),
            // Overlapping ranges are merged.
            (
                "ann:200000:100\nann:100000:65536\n2000:120000:65536",
                vec![(100_000, 185_536), (200_000, 200_100)],
            ),
        ] {
            assert_eq!(
                granted_ranges(lines, Some("ann"), 2000),
                expected,
                "{lines}"
            );
        }
    }

    #[test]
    fn no_two_sandboxes_have_an_id_in_common() {
        let grant = grant("ann:1000000000:65536\n", "ann:1100000000:65536\n");
        let mut taken = Vec::new();
        for _ in 0..16 {
            let slice = grant.choose("same", &taken).unwrap();
            assert_eq!(slice.groups - 1_100_000_000, slice.first - 1_000_000_000);
            for other in &taken {
                assert!(slice.first.abs_diff(*other) >= IDS_PER_SANDBOX);
            }
            taken.push(slice.first);
        }
        let unavailable = grant.choose("same", &taken).unwrap_err();
        assert!(
            unavailable.fix.contains("delete a sandbox"),
            "{unavailable}"
        );
    }

    #[test]
    fn missing_line_is_suggested_without_overlap() {
        let lines = "bob:100000:65536\neve:165536:65536\n";
        let grant = grant(lines, "");
        assert!(grant.slices().is_empty());
        let unavailable = grant.missing_line("ann", &[lines, ""]).to_string();
        assert!(
            unavailable.contains("/etc/subuid and /etc/subgid"),
            "{unavailable}"
        );
        let fix = "usermod --add-subuids 231072-296607 --add-subgids 231072-296607 ann";
        assert!(unavailable.contains(fix), "{unavailable}");
    }

    #[test]
    fn only_roots_own_tools_are_trusted() {
        let directory = tempfile::tempdir().unwrap();
        let tool = directory.path().join("newuidmap");
        fs::write(&tool, "").unwrap();
        fs::set_permissions(&tool, fs::Permissions::from_mode(0o4755)).unwrap();
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o777)).unwrap();
        let found = find_tool("newuidmap", directory.path().as_os_str());
        assert_ne!(found, Some(tool), "its directory is writable by others");
        assert_eq!(find_tool("palisade-has-no-such-tool", OsStr::new("")), None);
    }
}
