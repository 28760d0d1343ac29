//! Merging of equal events when a sandbox floods the log.

use std::collections::HashMap;

use foldhash::fast::RandomState;
use policy::audit::{AuditEvent, Kind};
use policy::reason::Reason;
use policy::verdict::{RuleName, VerdictKind};

use super::chain::ChainName;
use super::queue::Entry;

/// Number of traffic events of one sandbox in one batch from which they count as a flood.
const FLOOD: usize = 64;

/// Merges equal traffic events of flooding sandboxes. Returns how many were merged away.
///
/// Events are equal if they differ only in request id, time, stage times and bytes. The merged
/// event has the first one's request id and time, and no stage times, because those of several
/// requests cannot be combined. Approvals, lifecycle and configuration events are never merged.
pub(crate) fn merge_floods(entries: &mut Vec<Entry>) -> u64 {
    let mut traffic: HashMap<&ChainName, usize, RandomState> = HashMap::default();
    for entry in entries.iter().filter(|e| e.event.kind.is_traffic()) {
        *traffic.entry(&entry.event.sandbox).or_default() += 1;
    }
    traffic.retain(|_, count| *count >= FLOOD);
    if traffic.is_empty() {
        return 0;
    }

    // For each event the index of the first one that is equal.
    let mut first_of: HashMap<MergeKey<'_>, usize, RandomState> = HashMap::default();
    let firsts: Vec<usize> = entries
        .iter()
        .enumerate()
        .map(|(index, Entry { event, .. })| {
            let floods = event.kind.is_traffic() && traffic.contains_key(&event.sandbox);
            match floods {
                true => *first_of.entry(MergeKey::of_event(event)).or_insert(index),
                false => index,
            }
        })
        .collect();

    let before = entries.len();
    let mut all: Vec<Option<Entry>> = entries.drain(..).map(Some).collect();
    for (index, first) in firsts.into_iter().enumerate() {
        if index == first {
            continue;
        }
        let merged = all.get_mut(index).and_then(Option::take);
        let sum = all.get_mut(first).and_then(Option::as_mut);
        if let (Some(Entry { event: more, .. }), Some(Entry { event: sum, .. })) = (merged, sum) {
            sum.count = sum.count.saturating_add(more.count);
            sum.bytes_in = sum.bytes_in.saturating_add(more.bytes_in);
            sum.bytes_out = sum.bytes_out.saturating_add(more.bytes_out);
            sum.ms.clear();
        }
    }
    entries.extend(all.into_iter().flatten());
    u64::try_from(before - entries.len()).unwrap_or_default()
}

/// The fields that must be equal in two events that are merged.
#[derive(PartialEq, Eq, Hash)]
struct MergeKey<'a> {
    kind: Kind,
    port: Option<u16>,
    reason: Option<Reason>,
    status: Option<u16>,
    unread: bool,
    verdict: Option<VerdictKind>,
    rule: Option<&'a RuleName>,
    sandbox: &'a ChainName,
    refs: &'a [String],
    texts: [Option<&'a str>; 10],
}

impl<'a> MergeKey<'a> {
    fn of_event(event: &'a AuditEvent) -> Self {
        // Destructured by name, so that a new field of the event cannot be forgotten here.
        let AuditEvent {
            agent,
            bundle,
            bytes_in: _,
            bytes_out: _,
            count: _,
            credential,
            event,
            host,
            kind,
            method,
            ms: _,
            operation,
            path,
            port,
            reason,
            refs,
            repo,
            request_id: _,
            rule,
            sandbox,
            stage,
            status,
            unread,
            verdict,
        } = event;
        let texts = [
            path, host, method, agent, bundle, credential, event, operation, repo, stage,
        ];
        Self {
            kind: *kind,
            port: *port,
            reason: *reason,
            status: *status,
            unread: *unread,
            verdict: *verdict,
            rule: rule.as_ref(),
            sandbox,
            refs,
            texts: texts.map(Option::as_deref),
        }
    }
}

#[cfg(test)]
mod tests {
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
            event: Box::new(event),
            ts: UnixMillis::new(1),
            slot: None,
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

    #[test]
    fn events_that_differ_in_a_field_are_not_merged() {
        let changes: [fn(&mut AuditEvent); 18] = [
            |e| e.agent = Some("a".to_owned()),
            |e| e.bundle = Some("b".to_owned()),
            |e| e.credential = Some("c".to_owned()),
            |e| e.event = Some("e".to_owned()),
            |e| e.host = Some("other".to_owned()),
            |e| e.kind = Kind::Dns,
            |e| e.method = Some("GET".to_owned()),
            |e| e.operation = Some("push".to_owned()),
            |e| e.path = Some("/p".to_owned()),
            |e| e.port = Some(443),
            |e| e.reason = Some(Reason::HostDenied),
            |e| e.refs = vec!["refs/heads/a".to_owned()],
            |e| e.repo = Some("o/r".to_owned()),
            |e| e.rule = Some(RuleName::from("rule")),
            |e| e.stage = Some("policy".to_owned()),
            |e| e.status = Some(200),
            |e| e.unread = true,
            |e| e.verdict = Some(VerdictKind::Allow),
        ];
        for (number, change) in changes.iter().enumerate() {
            let mut entries: Vec<_> = (0..100).map(|n| entry("a", Kind::Http, "x", n)).collect();
            for entry in entries.iter_mut().skip(1).step_by(2) {
                change(&mut entry.event);
            }
            assert_eq!(merge_floods(&mut entries), 98, "field {number}");
            let [one, other] = &entries[..] else {
                panic!("field {number}")
            };
            assert_eq!((one.event.count, other.event.count), (50, 50));
            assert!(one.event.ms.is_empty());
        }
    }
}
