//! Writing alike events as one when a sandbox floods.

use std::collections::{HashMap, HashSet};

use policy::audit::AuditEvent;

use super::chain::ChainName;
use super::queue::Entry;

/// So many traffic events of one sandbox in one batch are a flood.
const FLOOD: usize = 64;

/// Merges alike traffic events of flooding sandboxes. Gives how many were merged away.
///
/// Alike is: the same in everything but request id, time, stage times and bytes. The one
/// that stays keeps the first one's request id and time, and has no stage times, because
/// those of many are nobody's. Approvals, lifecycle and configuration stay as they are.
pub(crate) fn merge_floods(entries: &mut Vec<Entry>) -> u64 {
    let mut traffic: HashMap<&ChainName, usize> = HashMap::new();
    for entry in entries.iter().filter(|e| e.event.kind.is_traffic()) {
        *traffic.entry(&entry.event.sandbox).or_default() += 1;
    }
    traffic.retain(|_, count| *count >= FLOOD);
    if traffic.is_empty() {
        return 0;
    }
    let flooding: HashSet<ChainName> = traffic.into_keys().cloned().collect();

    let before = entries.len();
    let mut kept: Vec<Entry> = Vec::with_capacity(before);
    let mut first_of: HashMap<String, usize> = HashMap::new();
    for entry in entries.drain(..) {
        if !entry.event.kind.is_traffic() || !flooding.contains(&entry.event.sandbox) {
            kept.push(entry);
            continue;
        }
        let likeness = likeness(&entry.event);
        match first_of.get(&likeness).and_then(|at| kept.get_mut(*at)) {
            Some(first) => {
                let (sum, more) = (&mut first.event, &entry.event);
                sum.count = sum.count.saturating_add(more.count);
                sum.bytes_in = sum.bytes_in.saturating_add(more.bytes_in);
                sum.bytes_out = sum.bytes_out.saturating_add(more.bytes_out);
                sum.ms.clear();
            }
            None => {
                first_of.insert(likeness, kept.len());
                kept.push(entry);
            }
        }
    }
    *entries = kept;
    u64::try_from(before - entries.len()).unwrap_or_default()
}

fn likeness(event: &AuditEvent) -> String {
    let mut alike = event.clone();
    alike.request_id = None;
    alike.ms.clear();
    alike.bytes_in = 0;
    alike.bytes_out = 0;
    alike.count = 1;
    serde_json::to_string(&alike).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use policy::audit::Kind;
    use policy::clock::UnixMillis;
    use policy::id::{RequestId, SandboxId};

    use super::*;

    fn entry(sandbox: &str, kind: Kind, host: &str, n: u64) -> Entry {
        let mut event = AuditEvent::new(kind);
        event.sandbox = Some(SandboxId::parse(sandbox).unwrap());
        event.host = Some(host.to_owned());
        event.bytes_in = n;
        event.request_id = Some(RequestId::new(n, 0));
        Entry {
            event,
            ts: UnixMillis::new(1),
            place: None,
        }
    }

    #[test]
    fn a_flood_becomes_one_record_with_a_count_and_the_sum() {
        let mut entries: Vec<_> = (0..100)
            .map(|n| entry("a", Kind::Http, if n % 2 == 0 { "x" } else { "y" }, n))
            .collect();
        entries.push(entry("b", Kind::Http, "x", 1));
        assert_eq!(merge_floods(&mut entries), 98);
        let first = &entries[0].event;
        assert_eq!(
            (first.count, first.bytes_in),
            (50, (0..100).step_by(2).sum())
        );
        assert_eq!(first.request_id, Some(RequestId::new(0, 0)));
        assert_eq!(entries.len(), 3);
    }

    #[test]
    fn few_or_important_events_are_never_merged() {
        let mut few: Vec<_> = (0..63).map(|n| entry("a", Kind::Dns, "x", n)).collect();
        assert_eq!(merge_floods(&mut few), 0);
        for kind in [Kind::Approval, Kind::Lifecycle, Kind::Config] {
            let mut many: Vec<_> = (0..200).map(|n| entry("a", kind, "x", n)).collect();
            many.extend((0..64).map(|n| entry("a", Kind::Http, "x", n)));
            assert_eq!(merge_floods(&mut many), 63);
            assert_eq!(many.len(), 201);
        }
    }
}
