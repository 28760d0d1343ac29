//! Policy bundles on disk: a directory of `.rego`, `.json` and `.yaml` files, or an OPA
//! bundle (`.tar.gz`) of the same.
//!
//! A data file's directory is its path into `data`, as in OPA: `lists/hosts.json` is found
//! under `data.lists`. Names that begin with a dot are left alone (`.manifest`, `.git`), and
//! files that end in `_test.rego` are tests, which decide nothing.
//! Everything is bounded, and nothing outside the bundle is read.

mod archive;
mod directory;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use policy::rego::judge::{Judge, Terms};
use policy::rego::{self, Budget, BundleError, Module};
use serde_json::{Map, Value};

use crate::section::policies::{BundleMode, BundleSettings, PoliciesSection};
use crate::tree::{Content, Node, Tree};

/// The most files of one bundle.
const MOST_FILES: usize = 2000;

/// The most bytes of one bundle, unpacked: 32 MiB.
const MOST_BYTES: u64 = 32 * 1024 * 1024;

/// How deep its directories may nest.
const DEEPEST: usize = 16;

/// Why a bundle is not there.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BundleReadError {
    /// Nothing is at its path.
    #[error("policies.bundles: {id}: there is nothing at {}", path.display())]
    Missing {
        /// Which bundle.
        id: String,
        /// Where it should be.
        path: PathBuf,
    },
    /// It cannot be read.
    #[error("policies.bundles: {id}: {} cannot be used: {detail}", path.display())]
    Unreadable {
        /// Which bundle.
        id: String,
        /// The file or directory.
        path: PathBuf,
        /// What is wrong with it.
        detail: String,
    },
    /// It cannot be compiled.
    #[error("policies.bundles: {id}: {error}")]
    Wrong {
        /// Which bundle.
        id: String,
        /// What is wrong.
        error: BundleError,
    },
}

/// What a bundle is made of.
#[derive(Clone, Debug)]
pub struct BundleContents {
    /// The policy.
    pub modules: Vec<Module>,
    /// Its tests: files whose names end in `_test.rego`. They decide nothing.
    pub tests: Vec<Module>,
    /// The data.
    pub data: Value,
}

/// Reads a bundle without compiling it. Blocks.
pub fn open(id: &str, path: &Path) -> Result<BundleContents, BundleReadError> {
    let unreadable = |(inner, detail): At| BundleReadError::Unreadable {
        id: id.to_owned(),
        path: match inner.as_os_str().is_empty() {
            true => path.to_owned(),
            false => path.join(inner),
        },
        detail,
    };
    let files = files(path).map_err(|fault| match fault {
        Fault::Missing => BundleReadError::Missing {
            id: id.to_owned(),
            path: path.to_owned(),
        },
        Fault::At(inner, detail) => unreadable((inner, detail)),
    })?;
    let (all, data) = sort(files).map_err(unreadable)?;
    let (tests, modules) = all
        .into_iter()
        .partition(|module| module.name.ends_with("_test.rego"));
    Ok(BundleContents {
        modules,
        tests,
        data,
    })
}

/// Reads and compiles a bundle. Blocks.
pub fn read(bundle: &BundleSettings) -> Result<rego::Bundle, BundleReadError> {
    let BundleContents { modules, data, .. } = open(&bundle.id, &bundle.path)?;
    rego::Bundle::compile(&bundle.id, &bundle.entrypoint, &modules, &data).map_err(|error| {
        BundleReadError::Wrong {
            id: bundle.id.clone(),
            error,
        }
    })
}

/// The bundles that judge by one entrypoint.
#[derive(Debug, Default)]
pub struct LoadedBundles {
    /// Those that are there, in the order of the settings.
    pub judges: Vec<Arc<Judge>>,
    /// Those that are not, and need not be.
    pub missing: Vec<BundleReadError>,
}

/// Reads the bundles for `entrypoint`, or for something below it. Blocks. One that is not
/// there and has to be, or that cannot be used, is an error.
pub fn judges(
    section: &PoliciesSection,
    entrypoint: &str,
) -> Result<LoadedBundles, BundleReadError> {
    let mut found = LoadedBundles::default();
    for named in &section.bundles {
        if !named.decides(entrypoint) {
            continue;
        }
        let terms = Terms {
            budget: Budget::of(section.timeout),
            counts: named.mode == BundleMode::Enforce,
            fail_open: section.fail_open,
        };
        match read(named) {
            Ok(bundle) => found.judges.push(Arc::new(Judge::new(bundle, terms))),
            Err(problem @ BundleReadError::Missing { .. }) if !named.required => {
                found.missing.push(problem);
            }
            Err(problem) => return Err(problem),
        }
    }
    Ok(found)
}

/// Why there are no files.
enum Fault {
    /// Nothing is there.
    Missing,
    /// Something in it, or the bundle itself where the path is empty.
    At(PathBuf, String),
}

/// One file of a bundle.
struct Piece {
    /// Its path in the bundle: names only, none of them with a dot in front.
    path: PathBuf,
    bytes: Vec<u8>,
}

fn files(path: &Path) -> Result<Vec<Piece>, Fault> {
    let metadata = std::fs::metadata(path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory => Fault::Missing,
        _ => Fault::At(PathBuf::new(), error.to_string()),
    })?;
    let read = if metadata.is_dir() {
        directory::read(path)
    } else {
        archive::read(path)
    };
    read.map_err(|(path, detail)| Fault::At(path, detail))
}

/// A path in a bundle, and what is wrong there.
type At = (PathBuf, String);

/// What a file is for, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    Rego,
    Json,
    Yaml,
}

/// What the file at `path` is for. Nothing for files that are none of ours.
fn use_of(path: &Path) -> Option<Use> {
    match path.extension()?.to_str()? {
        "rego" => Some(Use::Rego),
        "json" => Some(Use::Json),
        "yaml" | "yml" => Some(Use::Yaml),
        _ => None,
    }
}

/// Counts what was read of a bundle.
#[derive(Default)]
struct Count {
    files: usize,
    bytes: u64,
}

impl Count {
    /// How many bytes may still come.
    fn left(&self) -> u64 {
        MOST_BYTES.saturating_sub(self.bytes)
    }

    fn add(&mut self, bytes: usize) -> Result<(), String> {
        self.files += 1;
        self.bytes += bytes as u64;
        if self.files > MOST_FILES {
            return Err(format!("the bundle has more than {MOST_FILES} files"));
        }
        if self.bytes > MOST_BYTES {
            return Err(format!("the bundle has more than {MOST_BYTES} bytes"));
        }
        Ok(())
    }
}

/// Tells policy from data.
fn sort(mut pieces: Vec<Piece>) -> Result<(Vec<Module>, Value), At> {
    pieces.sort_by(|a, b| a.path.cmp(&b.path));
    let mut modules = Vec::new();
    let mut data = Map::new();
    for Piece { path, bytes } in pieces {
        let read = match use_of(&path) {
            None => continue,
            Some(Use::Rego) => String::from_utf8(bytes)
                .map(|text| {
                    modules.push(Module {
                        name: path.display().to_string(),
                        text,
                    });
                    None
                })
                .map_err(|_| "it is not UTF-8".to_owned()),
            Some(Use::Json) => serde_json::from_slice(&bytes)
                .map(Some)
                .map_err(|error| error.to_string()),
            Some(Use::Yaml) => read_yaml(&path, &bytes).map(Some),
        };
        let put = read.and_then(|value| match value {
            None => Ok(()),
            Some(Value::Object(fields)) => put(&mut data, &path, fields),
            Some(_) => Err("data is an object".to_owned()),
        });
        put.map_err(|detail| (path, detail))?;
    }
    Ok((modules, Value::Object(data)))
}

/// Puts the fields of a data file where its directory says.
fn put(
    data: &mut Map<String, Value>,
    path: &Path,
    fields: Map<String, Value>,
) -> Result<(), String> {
    let above = path.parent().into_iter().flat_map(Path::components);
    let mut fields = fields;
    for part in above.rev() {
        let name = part.as_os_str().to_str().ok_or("its path is not UTF-8")?;
        fields = Map::from_iter([(name.to_owned(), Value::Object(fields))]);
    }
    merge(data, fields, "data")
}

fn merge(
    into: &mut Map<String, Value>,
    from: Map<String, Value>,
    path: &str,
) -> Result<(), String> {
    for (key, value) in from {
        let path = format!("{path}.{key}");
        match (into.get_mut(&key), value) {
            (Some(Value::Object(into)), Value::Object(from)) => merge(into, from, &path)?,
            (Some(_), _) => return Err(format!("{path} is in another file, too")),
            (None, value) => {
                into.insert(key, value);
            }
        }
    }
    Ok(())
}

fn read_yaml(path: &Path, bytes: &[u8]) -> Result<Value, String> {
    let mut problems = Vec::new();
    let tree = Tree::parse(path, bytes, &mut problems);
    match (tree, problems.first()) {
        (Some(tree), None) => Ok(value_of(&tree.root)),
        (_, Some(problem)) => Err(problem.to_string()),
        (None, None) => Err("it is no YAML".to_owned()),
    }
}

fn value_of(node: &Node) -> Value {
    match &node.content {
        Content::Faulty | Content::Absent | Content::Null => Value::Null,
        Content::Bool(one) => Value::Bool(*one),
        Content::Number(number) => Value::Number(number.clone()),
        Content::Text(text) => Value::String(text.clone()),
        Content::List(items) => items.iter().map(value_of).collect(),
        Content::Map(entries) => entries
            .iter()
            .map(|entry| (entry.key.clone(), value_of(&entry.value)))
            .collect(),
    }
}

#[cfg(test)]
mod tests;
