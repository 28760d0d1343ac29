//! Configuration files of the operator: schema, strict parsing, layers, and the `Settings`
//! snapshot.
//!
//! A file is parsed to a tree with positions; variables are expanded in its scalars; the tree
//! is validated against a schema derived from the types; the valid part is deserialised and
//! checked for consistency. All mistakes of all files are reported at once.
//!
//! This crate reads files only when it is called to do so.
//!
//! **Never here:** watching, starting anything, the process environment (the caller passes a lookup
//! function), following a link in a repository, the value of a secret or variable in a message.

pub mod bundle;
mod compilation;
mod consistency;
mod expansion;
mod file;
pub mod grants;
pub mod import;
mod layer;
pub mod leaf;
mod origin;
mod palisade_file;
pub mod policy_file;
pub mod presets;
mod problem;
mod reference;
mod referenced_files;
mod repository;
mod schema;
mod secret;
pub mod section;
mod settings;
mod sources;
mod tree;
mod trust;
mod unavailable;
mod validation;
mod version;

use std::path::Path;

pub use expansion::{Env, ExpandError, expand_word};
pub use origin::ValueOrigin;
pub use problem::{Problem, Problems};
pub use repository::{FILE_NAME, RepoFile, RepoSettings, TrustedRepoFile};
pub use secret::Secret;
pub use settings::{GATE_PORTS, LoadedDomainRule, MAX_CAPTURED_PORTS, Settings, ShownValue};
pub use sources::Sources;
pub use trust::{TrustEntry, TrustError, TrustStore};

/// Reads palisade.yaml at `path`, and everything that belongs to it. Without a path, every
/// value has its default.
pub fn load(path: Option<&Path>, env: Env<'_>) -> Result<Settings, Problems> {
    Sources::read(path, env)?.settings(env)
}

/// Every value, its origin, and secrets only as set or not.
pub fn show(settings: &Settings) -> Vec<ShownValue> {
    settings.show()
}

/// JSON Schema of palisade.yaml, with descriptions and defaults, for editors.
pub fn schema() -> serde_json::Value {
    palisade_file::PALISADE.schema.clone()
}

/// The file that `palisade config init` writes: a valid starter.
pub const TEMPLATE: &str = include_str!("template.yaml");

/// The text of docs/config.md: every key of every file, with type, default and description.
pub fn reference_markdown() -> String {
    reference::write()
}

/// Parses `bytes` as each kind of file and discards the result: for fuzzing, which finds panics
/// and hangs.
pub fn fuzz_check(bytes: &[u8]) {
    let env = |name: &str| (name.len() == 1).then(|| "1".to_owned());
    sources::fuzz_check(bytes, &env);
    repository::fuzz_check(bytes);
    import::fuzz_check(bytes);
}
