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

use policy::rego::policy_bundle::{EvaluationSettings, PolicyBundle};
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
    /// The bundle does not compile.
    #[error("policies.bundles: {id}: {error}")]
    Invalid {
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
    let unreadable = |(inner, detail): BundleFileError| BundleReadError::Unreadable {
        id: id.to_owned(),
        path: match inner.as_os_str().is_empty() {
            true => path.to_owned(),
            false => path.join(inner),
        },
        detail,
    };
    let files = files(path).map_err(|error| match error {
        FilesError::Missing => BundleReadError::Missing {
            id: id.to_owned(),
            path: path.to_owned(),
        },
        FilesError::File(inner, detail) => unreadable((inner, detail)),
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
        BundleReadError::Invalid {
            id: bundle.id.clone(),
            error,
        }
    })
}

/// The loaded bundles of one entrypoint.
#[derive(Debug, Default)]
pub struct LoadedBundles {
    /// The bundles that exist, in the order of the settings.
    pub bundles: Vec<Arc<PolicyBundle>>,
    /// The optional bundles that do not exist.
    pub missing: Vec<BundleReadError>,
}

/// Loads the bundles whose entrypoint is `entrypoint` or a rule below it. Blocks. A required bundle
/// that does not exist, and a bundle that cannot be used, is an error.
pub fn load_for_entrypoint(
    section: &PoliciesSection,
    entrypoint: &str,
) -> Result<LoadedBundles, BundleReadError> {
    let mut found = LoadedBundles::default();
    for settings in &section.bundles {
        if !settings.decides(entrypoint) {
            continue;
        }
        let terms = EvaluationSettings {
            budget: Budget::with_time_limit(section.timeout),
            is_enforced: settings.mode == BundleMode::Enforce,
            fail_open: section.fail_open,
        };
        match read(settings) {
            Ok(bundle) => found
                .bundles
                .push(Arc::new(PolicyBundle::new(bundle, terms))),
            Err(problem @ BundleReadError::Missing { .. }) if !settings.required => {
                found.missing.push(problem);
            }
            Err(problem) => return Err(problem),
        }
    }
    Ok(found)
}

/// Why the files of a bundle cannot be read.
enum FilesError {
    /// The bundle does not exist.
    Missing,
    /// A file in the bundle, or the bundle itself if the path is empty.
    File(PathBuf, String),
}

/// One file of a bundle.
struct BundleFile {
    /// Path in the bundle: names only, none of them with a leading dot.
    path: PathBuf,
    bytes: Vec<u8>,
}

fn files(path: &Path) -> Result<Vec<BundleFile>, FilesError> {
    let metadata = std::fs::metadata(path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory => FilesError::Missing,
        _ => FilesError::File(PathBuf::new(), error.to_string()),
    })?;
    let read = if metadata.is_dir() {
        directory::read(path)
    } else {
        archive::read(path)
    };
    read.map_err(|(path, detail)| FilesError::File(path, detail))
}

/// A path in a bundle, and the error of the file.
type BundleFileError = (PathBuf, String);

/// The kind of a file, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FileKind {
    Rego,
    Json,
    Yaml,
}

/// The kind of the file at `path`. None for files that are not part of a bundle.
fn file_kind(path: &Path) -> Option<FileKind> {
    match path.extension()?.to_str()? {
        "rego" => Some(FileKind::Rego),
        "json" => Some(FileKind::Json),
        "yaml" | "yml" => Some(FileKind::Yaml),
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

/// Divides files into modules and merged data.
fn sort(mut files: Vec<BundleFile>) -> Result<(Vec<Module>, Value), BundleFileError> {
    files.sort_by(|a, b| a.path.cmp(&b.path));
    let mut modules = Vec::new();
    let mut data = Map::new();
    for BundleFile { path, bytes } in files {
        let read = match file_kind(&path) {
            None => continue,
            Some(FileKind::Rego) => String::from_utf8(bytes)
                .map(|text| {
                    modules.push(Module {
                        name: path.display().to_string(),
                        text,
                    });
                    None
                })
                .map_err(|_| "it is not UTF-8".to_owned()),
            Some(FileKind::Json) => serde_json::from_slice(&bytes)
                .map(Some)
                .map_err(|error| error.to_string()),
            Some(FileKind::Yaml) => read_yaml(&path, &bytes).map(Some),
        };
        let inserted = read.and_then(|value| match value {
            None => Ok(()),
            Some(Value::Object(fields)) => insert_data(&mut data, &path, fields),
            Some(_) => Err("the top level of a data file must be an object".to_owned()),
        });
        inserted.map_err(|detail| (path, detail))?;
    }
    Ok((modules, Value::Object(data)))
}

/// Inserts the fields of a data file at the path of its directory.
fn insert_data(
    data: &mut Map<String, Value>,
    path: &Path,
    fields: Map<String, Value>,
) -> Result<(), String> {
    let directories = path.parent().into_iter().flat_map(Path::components);
    let mut fields = fields;
    for part in directories.rev() {
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
        Content::Bool(value) => Value::Bool(*value),
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
