//! The host's side of git: from the operator's repository to a workspace, and home again.
//!
//! ```text
//!   Home ── head ──▶ Checkouts ── copy or spare ──▶ workspace (its own .git) ──▶ agent
//!    ▲                                                   │
//!    │ merge, apply                   Walk or a helper's stream, import of a pack
//!    │                                                   ▼
//!   operator's branch ◀── diff, log, steering ── branch palisade/<slug>
//! ```
//!
//! Everything is read and written through libgit2 and our own code. A workspace's `.git` is
//! never opened once an agent may have touched it; its ignore files are data, its links are
//! text, and every path in it is opened one component at a time.
//!
//! **Never here:** a git command, a hook, a filter, an fsmonitor, a text conversion or any
//! other program that a configuration names; a link of a workspace followed; a change to the
//! operator's HEAD, index or files other than by [`home::Home::merge`],
//! [`home::Home::apply`] and [`home::Home::checkout`].
//!
//! **Ownership.** libgit2's check stays on: a repository that belongs to somebody else is
//! refused unless the operator's own `safe.directory` names it. A root gate thereby does not
//! act on a repository that another user prepared.

pub mod bundle;
pub mod checkout;
mod copy;
pub mod diff;
mod dirty;
pub mod error;
pub mod home;
pub mod import;
mod index;
mod journal;
mod landing;
pub mod manifest;
pub mod merge;
pub mod names;
pub(crate) mod objects;
mod ownership;
pub mod packing;
pub mod remote_url;
pub mod snapshot;
pub mod steering;
pub mod stray;
pub mod switch;
mod tree;
mod uncommitted;
pub mod walk;
pub mod workspace;
