//! Writing alike events as one when a sandbox floods.

use std::collections::HashMap;

use foldhash::fast::RandomState;
use policy::audit::{AuditEvent, Kind};
use policy::reason::Reason;
use policy::verdict::{RuleName, Word};

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
    let mut traffic: HashMap<&ChainName, usize, RandomState> = HashMap::default();
    for entry in entries.iter().filter(|e| e.event.kind.is_traffic()) {
        *traffic.entry(&entry.event.sandbox).or_default() += 1;
    }
    traffic.retain(|_, count| *count >= FLOOD);
    if traffic.is_empty() {
        return 0;
    }

    // Where each one goes, as the place of the first that is alike.
    let mut first_of: HashMap<Likeness<'_>, usize, RandomState> = HashMap::default();
    let places: Vec<usize> = entries
        .iter()
        .enumerate()
        .map(|(place, Entry { event, .. })| {
            let floods = event.kind.is_traffic() && traffic.contains_key(&event.sandbox);
            match floods {
                true => *first_of.entry(Likeness::of(event)).or_insert(place),
                false => place,
            }
        })
        .collect();

    let before = entries.len();
    let mut all: Vec<Option<Entry>> = entries.drain(..).map(Some).collect();
    for (place, first) in places.into_iter().enumerate() {
        if place == first {
            continue;
        }
        let merged = all.get_mut(place).and_then(Option::take);
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

/// What must be the same in two events that are written as one.
#[derive(PartialEq, Eq, Hash)]
struct Likeness<'a> {
    kind: Kind,
    port: Option<u16>,
    reason: Option<Reason>,
    status: Option<u16>,
    unread: bool,
    verdict: Option<Word>,
    rule: Option<&'a RuleName>,
    sandbox: &'a ChainName,
    refs: &'a [String],
    texts: [Option<&'a str>; 10],
}

impl<'a> Likeness<'a> {
    fn of(event: &'a AuditEvent) -> Self {
        // Taken apart by name, so that a field added to the event cannot be forgotten here.
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

    #[test]
    fn events_that_differ_in_what_was_decided_stay_apart() {
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
            |e| e.verdict = Some(Word::Allow),
        ];
        for (number, change) in changes.iter().enumerate() {
            let mut entries: Vec<_> = (0..100).map(|n| entry("a", Kind::Http, "x", n)).collect();
            for odd in entries.iter_mut().skip(1).step_by(2) {
                change(&mut odd.event);
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
