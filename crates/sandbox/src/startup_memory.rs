//! Releases pages of the program's own file that were needed only to start.
//!
//! The kernel maps the pages around each touched page and keeps them mapped while there is memory,
//! so an idle process stays as large as at its start. Released pages stay in the page cache, and
//! are mapped again when needed.

use std::fs;
use std::io;
use std::path::Path;

/// A range of the address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mapping {
    start: usize,
    length: usize,
}

/// Releases the unmodified mappings of the program's file. Blocks.
pub fn release_startup_memory() -> io::Result<()> {
    let program = fs::read_link("/proc/self/exe")?;
    let maps = fs::read_to_string("/proc/self/smaps")?;
    for Mapping { start, length } in unmodified_mappings(&maps, &program) {
        // SAFETY: the mapping is a private, read-only mapping of a file, and none of its pages
        // was modified. The kernel therefore reads a released page from the file again, with the
        // same content.
        let result = unsafe {
            libc::madvise(
                std::ptr::with_exposed_provenance_mut(start),
                length,
                libc::MADV_DONTNEED,
            )
        };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Returns the mappings of `program` that are read-only and were never written: pages in which the
/// loader relocated addresses differ from the file (proc_pid_smaps(5), `Anonymous`).
fn unmodified_mappings(maps: &str, program: &Path) -> Vec<Mapping> {
    let mut found = Vec::new();
    let mut current = None;
    for line in maps.lines() {
        if let Some(mapping) = parse_header(line, program) {
            current = mapping;
        } else if line.split_whitespace().eq(["Anonymous:", "0", "kB"]) {
            found.extend(current.take());
        }
    }
    found
}

/// Parses the first line of a mapping; `Some(None)` if it is not a mapping of the program. The last
/// field may contain spaces.
fn parse_header(line: &str, program: &Path) -> Option<Option<Mapping>> {
    let (range, rest) = line.split_once(' ')?;
    let (start, end) = range.split_once('-')?;
    let start = usize::from_str_radix(start, 16).ok()?;
    let end = usize::from_str_radix(end, 16).ok()?;
    let mut fields = rest.splitn(5, ' ');
    let rights = fields.next()?;
    let file = fields.nth(3).map_or("", str::trim_start);
    let is_program = matches!(rights, "r--p" | "r-xp") && Path::new(file) == program;
    Some(is_program.then_some(Mapping {
        start,
        length: end.saturating_sub(start),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
5000-7000 r--p 00000000 fe:00 7                          /opt/a program
Rss:                   8 kB
Anonymous:             0 kB
7000-a000 r-xp 00002000 fe:00 7                          /opt/a program
Anonymous:             0 kB
a000-b000 r--p 00005000 fe:00 7                          /opt/a program
Anonymous:             4 kB
b000-c000 rw-p 00006000 fe:00 7                          /opt/a program
Anonymous:             0 kB
c000-d000 rw-p 00000000 00:00 0 
Anonymous:             0 kB
d000-e000 r-xp 00000000 fe:00 8                          /opt/another
Anonymous:             0 kB
";

    #[test]
    fn only_unmodified_file_mappings_are_released() {
        let found = unmodified_mappings(MAPS, Path::new("/opt/a program"));
        let expected = [(0x5000, 0x2000), (0x7000, 0x3000)];
        assert_eq!(
            found,
            expected.map(|(start, length)| Mapping { start, length })
        );
    }

    #[test]
    fn process_shrinks_and_continues_after_release() {
        let resident = || {
            let status = fs::read_to_string("/proc/self/status").unwrap();
            let line = status.lines().find(|line| line.starts_with("RssFile:"));
            let number = line.and_then(|line| line.split_whitespace().nth(1));
            number.unwrap().parse::<u64>().unwrap()
        };
        let before = resident();
        release_startup_memory().unwrap();
        let after = resident();
        assert!(after < before, "{before} kB, and then {after} kB");
    }
}
