//! A sandbox's life, as it is recorded.
//!
//! ```text
//!                                     pause
//!        ┌──────────┐  started  ┌────────┐ ────────▶ ┌────────┐
//!   ───▶ │ creating │ ────────▶ │ active │           │ paused │
//!        └──────────┘           └────────┘ ◀──────── └────────┘
//!             │                     │      resume        │
//!             │ failed, or          │ delete             │ delete
//!             │ found after a crash ▼                    │
//!             │                ┌──────────┐              │
//!             └──────────────▶ │ deleting │ ◀────────────┘
//!                              └──────────┘ ───▶ gone
//! ```
//!
//! An active or paused one whose processes are gone (a reboot, a restored checkpoint) may be
//! restarted, and is active then. Pausing what is paused and resuming what is active change nothing. `creating` and
//! `deleting` are promises: whoever finds a record in one of them after a crash goes on
//! with the deletion, so nothing half-made is ever used.

use serde::{Deserialize, Serialize};

/// Where a sandbox is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// It is being made.
    Creating,
    /// Its processes run.
    Active,
    /// Its processes stand still.
    Paused,
    /// It is being removed.
    Deleting,
}

/// What happens to a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Its init answered.
    Started,
    /// Its new init answered, after its processes were gone.
    Restarted,
    /// Somebody wants it still.
    Pause,
    /// Somebody wants it to go on.
    Resume,
    /// Somebody wants it gone, or making it failed.
    Delete,
}

/// An event that has no arrow from where the sandbox is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a sandbox that is {phase} cannot be {wanted}", phase = .phase.as_str(), wanted = .event.as_str())]
pub struct Misstep {
    /// Where it is.
    pub phase: Phase,
    /// What was wanted.
    pub event: Event,
}

impl Phase {
    /// The word in rows and sentences.
    pub const fn as_str(self) -> &'static str {
        match self {
            Phase::Creating => "creating",
            Phase::Active => "active",
            Phase::Paused => "paused",
            Phase::Deleting => "deleting",
        }
    }

    /// Follows an arrow of the drawing.
    pub const fn after(self, event: Event) -> Result<Phase, Misstep> {
        match (self, event) {
            (Phase::Creating, Event::Started) => Ok(Phase::Active),
            (Phase::Active | Phase::Paused, Event::Pause) => Ok(Phase::Paused),
            (Phase::Active | Phase::Paused, Event::Resume | Event::Restarted) => Ok(Phase::Active),
            (_, Event::Delete) => Ok(Phase::Deleting),
            (Phase::Active | Phase::Paused | Phase::Deleting, Event::Started)
            | (
                Phase::Creating | Phase::Deleting,
                Event::Pause | Event::Resume | Event::Restarted,
            ) => Err(Misstep { phase: self, event }),
        }
    }

    /// Whether a record found in this phase, with nobody at work on it, is rubbish.
    pub const fn is_unfinished(self) -> bool {
        matches!(self, Phase::Creating | Phase::Deleting)
    }
}

impl Event {
    const fn as_str(self) -> &'static str {
        match self {
            Event::Started => "started",
            Event::Restarted => "restarted",
            Event::Pause => "paused",
            Event::Resume => "resumed",
            Event::Delete => "deleted",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PHASES: [Phase; 4] = [
        Phase::Creating,
        Phase::Active,
        Phase::Paused,
        Phase::Deleting,
    ];

    #[test]
    fn every_arrow_of_the_drawing_and_no_other() {
        use Event::{Delete, Pause, Restarted, Resume, Started};
        use Phase::{Active, Creating, Deleting, Paused};
        let arrows = [
            (Creating, Started, Active),
            (Creating, Delete, Deleting),
            (Active, Pause, Paused),
            (Active, Resume, Active),
            (Active, Restarted, Active),
            (Active, Delete, Deleting),
            (Paused, Pause, Paused),
            (Paused, Resume, Active),
            (Paused, Restarted, Active),
            (Paused, Delete, Deleting),
            (Deleting, Delete, Deleting),
        ];
        for phase in PHASES {
            for event in [Started, Restarted, Pause, Resume, Delete] {
                let drawn = arrows
                    .iter()
                    .find(|(from, by, _)| (*from, *by) == (phase, event))
                    .map(|(_, _, to)| *to);
                assert_eq!(phase.after(event).ok(), drawn, "{phase:?} {event:?}");
            }
        }
    }

    #[test]
    fn a_misstep_is_told_in_words() {
        let error = Phase::Deleting.after(Event::Pause).unwrap_err();
        assert_eq!(
            error.to_string(),
            "a sandbox that is deleting cannot be paused"
        );
    }

    #[test]
    fn only_the_promises_are_unfinished() {
        assert_eq!(PHASES.map(Phase::is_unfinished), [true, false, false, true]);
    }
}
