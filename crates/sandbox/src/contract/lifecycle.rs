//! State machine of a sandbox's recorded phases.
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
//! An active or paused sandbox whose processes are gone (after a reboot or a restored checkpoint)
//! can be restarted and is then active. Pausing a paused sandbox and resuming an active one change
//! nothing. A record in phase `creating` or `deleting` after a crash means that the deletion is
//! continued, so an incomplete sandbox is never used.

use serde::{Deserialize, Serialize};

/// The recorded phase of a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// The creation is in progress.
    Creating,
    /// The processes run.
    Active,
    /// The processes are frozen.
    Paused,
    /// The deletion is in progress.
    Deleting,
}

/// An event that changes the phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LifecycleEvent {
    /// The init process responded.
    Started,
    /// The new init process responded, after the old processes were gone.
    Restarted,
    /// A pause was requested.
    Pause,
    /// A resume was requested.
    Resume,
    /// A deletion was requested, or the creation failed.
    Delete,
}

/// An event that is not allowed in the current phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a sandbox that is {phase} cannot be {wanted}", phase = .phase.as_str(), wanted = .event.as_str())]
pub struct InvalidTransition {
    /// The current phase.
    pub phase: Phase,
    /// The rejected event.
    pub event: LifecycleEvent,
}

impl Phase {
    /// The name in rows and messages.
    pub const fn as_str(self) -> &'static str {
        match self {
            Phase::Creating => "creating",
            Phase::Active => "active",
            Phase::Paused => "paused",
            Phase::Deleting => "deleting",
        }
    }

    /// Returns the phase after an event.
    pub const fn after(self, event: LifecycleEvent) -> Result<Phase, InvalidTransition> {
        match (self, event) {
            (Phase::Creating, LifecycleEvent::Started) => Ok(Phase::Active),
            (Phase::Active | Phase::Paused, LifecycleEvent::Pause) => Ok(Phase::Paused),
            (Phase::Active | Phase::Paused, LifecycleEvent::Resume | LifecycleEvent::Restarted) => {
                Ok(Phase::Active)
            }
            (_, LifecycleEvent::Delete) => Ok(Phase::Deleting),
            (Phase::Active | Phase::Paused | Phase::Deleting, LifecycleEvent::Started)
            | (
                Phase::Creating | Phase::Deleting,
                LifecycleEvent::Pause | LifecycleEvent::Resume | LifecycleEvent::Restarted,
            ) => Err(InvalidTransition { phase: self, event }),
        }
    }

    /// Whether a record in this phase, unless an operation holds its lock, was left by a crash.
    pub const fn is_unfinished(self) -> bool {
        matches!(self, Phase::Creating | Phase::Deleting)
    }
}

impl LifecycleEvent {
    const fn as_str(self) -> &'static str {
        match self {
            LifecycleEvent::Started => "started",
            LifecycleEvent::Restarted => "restarted",
            LifecycleEvent::Pause => "paused",
            LifecycleEvent::Resume => "resumed",
            LifecycleEvent::Delete => "deleted",
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
    fn phase_follows_exactly_the_drawn_transitions() {
        use LifecycleEvent::{Delete, Pause, Restarted, Resume, Started};
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
    fn invalid_transition_names_phase_and_event() {
        let error = Phase::Deleting.after(LifecycleEvent::Pause).unwrap_err();
        assert_eq!(
            error.to_string(),
            "a sandbox that is deleting cannot be paused"
        );
    }

    #[test]
    fn creating_and_deleting_are_unfinished() {
        assert_eq!(PHASES.map(Phase::is_unfinished), [true, false, false, true]);
    }
}
