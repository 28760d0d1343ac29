//! Policy bundles on disk: a directory of `.rego`, `.json` and `.yaml` files, or an OPA bundle
//! (`.tar.gz`) of such files.
//!
//! A data file's directory is its path into `data`, as in OPA: `lists/hosts.json` is found under
//! `data.lists`. Names that begin with a dot are ignored (`.manifest`, `.git`), and files that end
//! in `_test.rego` are tests, which are not part of the policy. Every size is limited, and nothing
//! outside the bundle is read.

mod archive;
mod directory;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use policy::rego::policy_bundle::{BundleTerms, PolicyBundle};
use policy::rego::{self, Budget, BundleError, Module};
use serde_json::{Map, Value};

use crate::section::policies::{BundleMode, BundleSettings, PoliciesSection};
use crate::tree::{Content, Node, Tree};

/// Maximum number of files in one bundle.
const MAX_FILES: usize = 2000;

/// Maximum size of one bundle, unpacked: 32 MiB.
const MAX_BYTES: u64 = 32 * 1024 * 1024;

/// Maximum nesting depth of directories.
const MAX_DEPTH: usize = 16;

/// Why a bundle cannot be loaded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BundleReadError {
    /// Nothing exists at the path.
    #[error("policies.bundles: {id}: {} does not exist", path.display())]
    Missing {
        /// The bundle's name.
        id: String,
        /// The configured path.
        path: PathBuf,
    },
    /// The bundle cannot be read.
    #[error("policies.bundles: {id}: {} cannot be used: {detail}", path.display())]
    Unreadable {
        /// The bundle's name.
        id: String,
        /// The file or directory.
        path: PathBuf,
        /// Why it cannot be read.
        detail: String,
    },
    /// The bundle cannot be compiled.
    #[error("policies.bundles: {id}: {error}")]
    Wrong {
        /// The bundle's name.
        id: String,
        /// The compiler's error.
        error: BundleError,
    },
}

/// The files of a bundle.
#[derive(Clone, Debug)]
pub struct BundleContents {
    /// The policy modules.
    pub modules: Vec<Module>,
    /// The test modules: files whose names end in `_test.rego`. They are not part of the policy.
    pub tests: Vec<Module>,
    /// The merged data.
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

/// The loaded bundles of one entrypoint.
#[derive(Debug, Default)]
pub struct LoadedBundles {
    /// The bundles that exist, in the order of the settings.
    pub judges: Vec<Arc<PolicyBundle>>,
    /// The optional bundles that do not exist.
    pub missing: Vec<BundleReadError>,
}

/// Loads the bundles for `entrypoint`, or for a rule below it. Blocks. A required bundle that does
/// not exist, and a bundle that cannot be used, is an error.
pub fn judges(
    section: &PoliciesSection,
    entrypoint: &str,
) -> Result<LoadedBundles, BundleReadError> {
    let mut found = LoadedBundles::default();
    for named in &section.bundles {
        if !named.decides(entrypoint) {
            continue;
        }
        let terms = BundleTerms {
            budget: Budget::of(section.timeout),
            is_enforced: named.mode == BundleMode::Enforce,
            fail_open: section.fail_open,
        };
        match read(named) {
            Ok(bundle) => found
                .judges
                .push(Arc::new(PolicyBundle::new(bundle, terms))),
            Err(problem @ BundleReadError::Missing { .. }) if !named.required => {
                found.missing.push(problem);
            }
            Err(problem) => return Err(problem),
        }
    }
    Ok(found)
}

/// Why the files of a bundle cannot be read.
enum Fault {
    /// The bundle does not exist.
    Missing,
    /// A file in the bundle, or the bundle itself if the path is empty.
    At(PathBuf, String),
}

/// One file of a bundle.
struct BundleFile {
    /// Path in the bundle: names only, none of them with a leading dot.
    path: PathBuf,
    bytes: Vec<u8>,
}

fn files(path: &Path) -> Result<Vec<BundleFile>, Fault> {
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

/// A path in a bundle, and what is wrong with the file.
type At = (PathBuf, String);

/// The kind of a file, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    Rego,
    Json,
    Yaml,
}

/// The kind of the file at `path`. None for files that are not part of a bundle.
fn use_of(path: &Path) -> Option<Use> {
    match path.extension()?.to_str()? {
        "rego" => Some(Use::Rego),
        "json" => Some(Use::Json),
        "yaml" | "yml" => Some(Use::Yaml),
        _ => None,
    }
}

/// Counts the files and bytes of a bundle.
#[derive(Default)]
struct Count {
    files: usize,
    bytes: u64,
}

impl Count {
    /// How many more bytes may be read.
    fn left(&self) -> u64 {
        MAX_BYTES.saturating_sub(self.bytes)
    }

    fn add(&mut self, bytes: usize) -> Result<(), String> {
        self.files += 1;
        self.bytes += bytes as u64;
        if self.files > MAX_FILES {
            return Err(format!("the bundle has more than {MAX_FILES} files"));
        }
        if self.bytes > MAX_BYTES {
            return Err(format!("the bundle has more than {MAX_BYTES} bytes"));
        }
        Ok(())
    }
}

/// Sorts files into policy, tests and data.
fn sort(mut files: Vec<BundleFile>) -> Result<(Vec<Module>, Value), At> {
    files.sort_by(|a, b| a.path.cmp(&b.path));
    let mut modules = Vec::new();
    let mut data = Map::new();
    for BundleFile { path, bytes } in files {
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
            Some(_) => Err("the top level of a data file must be an object".to_owned()),
        });
        put.map_err(|detail| (path, detail))?;
    }
    Ok((modules, Value::Object(data)))
}

/// Inserts the fields of a data file at the path of its directory.
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
            (Some(_), _) => return Err(format!("{path} is also in another file")),
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
        (None, None) => Err("it is not YAML".to_owned()),
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
