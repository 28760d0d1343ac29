//! Host-side git operations: creating workspaces from the operator's repository, and importing,
//! snapshotting and merging the agent's work.
//!
//! ```text
//!   HostRepository ── head ──▶ CheckoutCache ── copy or spare ──▶ workspace (its own .git) ──▶ agent
//!    ▲                                                             │
//!    │ merge, apply                             Walk or a stream, import of a pack
//!    │                                                             ▼
//!   operator's branch ◀── diff, log, sensitive paths ── branch palisade/<slug>
//! ```
//!
//! Repositories are read and written with libgit2 and this module's own code. A workspace's `.git`
//! is never opened by libgit2 once an agent may have changed it; its ignore files are data, its
//! symbolic links are text, and every path in it is opened one component at a time.
//!
//! This module runs no program that a configuration names: no git command, hook, filter, fsmonitor
//! or text conversion. It follows no symbolic link of a workspace. It changes the operator's HEAD,
//! index and files only in [`host_repository::HostRepository::merge`],
//! [`host_repository::HostRepository::apply`] and [`host_repository::HostRepository::checkout`].
//!
//! **Ownership.** libgit2's ownership check stays on: a repository of another user is refused
//! unless the operator's own `safe.directory` lists it. A gate that runs as root therefore does not
//! act on a repository that another user prepared.

pub mod branch_checkout;
pub mod bundle;
pub mod checkout_cache;
mod copy;
pub mod diff;
mod dirty;
pub mod error;
pub mod host_repository;
pub mod import;
mod index;
mod journal;
pub mod languages;
pub mod manifest;
pub mod merge;
pub mod names;
mod ownership;
pub mod packing;
pub(crate) mod quarantine;
pub mod remote_url;
pub mod sensitive_paths;
pub mod snapshot;
mod tree;
mod uncommitted;
pub mod unimported;
pub mod walk;
pub mod workspace;
mod worktree_update;
