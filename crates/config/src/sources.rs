//! The bytes of every configuration file, read at one moment.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::compilation::{Compiled, compile_policy};
use crate::consistency::check_file;
use crate::expansion::{Env, Expanded, expand_text};
use crate::file::{self, FileReadError, Links, OPERATOR_LIMIT};
use crate::grants::{self, GRANTS, GrantsFile};
use crate::layer::Layer;
use crate::origin::{self, OriginScope, ValueOrigin};
use crate::palisade_file::{File, PALISADE, resolve};
use crate::policy_file::{ALLOWLIST, AllowlistFile, POLICY, PolicyFile};
use crate::presets::Preset;
use crate::problem::{Problem, Problems};
use crate::referenced_files::ReferencedFiles;
use crate::section::egress::{DnsSettings, DomainRule};
use crate::settings::{
    LoadedDomainRule, MAX_CAPTURED_PORTS, Settings, captured_ports, operator_rules,
};
use crate::tree::{Content, Node, Tree, join};

/// Every file of a configuration, as it was when it was read.
///
/// A reload compares [`Sources::fingerprint`] and builds from the same bytes, so that a file that
/// changes in between is either seen whole or at the next reload.
#[derive(Clone, Debug)]
pub struct Sources {
    main: Option<SourceFile>,
    allowlist: Option<SourceFile>,
    policy: Option<SourceFile>,
    grants: Option<SourceFile>,
    /// Files that the settings refer to, which are not read here.
    referenced: Vec<ReferencedFiles>,
}

#[derive(Clone)]
struct SourceFile {
    path: PathBuf,
    /// The environment variable that contains the path.
    variable: Option<String>,
    content: Result<Vec<u8>, FileReadError>,
}

/// Shows path and size: never the content, nor the value of a variable.
impl std::fmt::Debug for SourceFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut parts = f.debug_struct("SourceFile");
        match &self.variable {
            Some(name) => parts.field("path", &format_args!("${{{name}}}")),
            None => parts.field("path", &self.path),
        };
        match &self.content {
            Ok(bytes) => parts.field("bytes", &bytes.len()),
            Err(why) => parts.field("unreadable", why),
        };
        parts.finish()
    }
}

impl SourceFile {
    fn read(path: PathBuf, variable: Option<String>) -> Self {
        let content = file::read(&path, OPERATOR_LIMIT, Links::Follow);
        Self {
            path,
            variable,
            content,
        }
    }

    fn bytes(&self) -> Option<&[u8]> {
        self.content.as_deref().ok()
    }
}

impl Sources {
    /// Reads palisade.yaml at `path`, the files it includes, and the grants beside it. Variables in
    /// the paths of included files come from `env`.
    ///
    /// A file that cannot be read is not an error yet: its absence is part of the fingerprint, and
    /// [`Sources::settings`] reports it.
    pub fn read(path: Option<&Path>, env: Env<'_>) -> Result<Self, Problems> {
        let Some(path) = path else {
            return Ok(Self {
                main: None,
                allowlist: None,
                policy: None,
                grants: None,
                referenced: referenced_files(None, |path| Some(PathBuf::from(path))),
            });
        };
        if path.file_name().is_none() {
            return Err(Problem::with_file(path, "does not name a file").into());
        }
        let main = SourceFile::read(path.to_owned(), None);
        let tree = main
            .bytes()
            .and_then(|bytes| Tree::parse(path, bytes, &mut Vec::new()));
        let resolve_path = |text: &str| {
            let Expanded { text, variable } = expand_text(text, env).ok()?;
            Some((resolve_included(path, Path::new(&text), env), variable))
        };
        let include = |pointer: &str| {
            let text = tree.as_ref()?.get(pointer)?.text()?;
            let (path, variable) = resolve_path(text)?;
            Some(SourceFile::read(path, variable))
        };
        Ok(Self {
            referenced: referenced_files(tree.as_ref(), |text| Some(resolve_path(text)?.0)),
            allowlist: include("/egress/allowlist"),
            policy: include("/egress/policy"),
            grants: Some(SourceFile::read(
                path.with_file_name(grants::FILE_NAME),
                None,
            )),
            main: Some(main),
        })
    }

    /// A hash of every file's path and content, or of the reason why it cannot be read.
    pub fn fingerprint(&self) -> [u8; 32] {
        let mut hash = Sha256::new();
        let mut add = |bytes: &[u8]| {
            hash.update((bytes.len() as u64).to_be_bytes());
            hash.update(bytes);
        };
        for source in [&self.main, &self.allowlist, &self.policy, &self.grants] {
            match source {
                None => add(b"none"),
                Some(source) => {
                    add(source.path.as_os_str().as_encoded_bytes());
                    match &source.content {
                        Ok(bytes) => {
                            add(b"read");
                            add(bytes);
                        }
                        Err(why) => {
                            add(b"unreadable");
                            add(why.to_string().as_bytes());
                        }
                    }
                }
            }
        }
        for referenced in &self.referenced {
            add(referenced.fingerprint());
        }
        hash.finalize().into()
    }

    /// Every path that was read, or would be read if it existed.
    pub fn paths(&self) -> Vec<PathBuf> {
        [&self.main, &self.allowlist, &self.policy, &self.grants]
            .into_iter()
            .flatten()
            .map(|source| source.path.clone())
            .collect()
    }

    /// For watching: every file of [`Sources::paths`] and every file that the settings refer to.
    pub fn files(&self) -> Vec<PathBuf> {
        let referenced = self.referenced.iter().flat_map(|files| &files.files);
        self.paths()
            .into_iter()
            .chain(referenced.cloned())
            .collect()
    }

    /// For watching: the directories in which a change would appear.
    pub fn directories(&self) -> BTreeSet<PathBuf> {
        let parents = self.paths();
        let parents = parents.iter().filter_map(|path| path.parent());
        let referenced = self.referenced.iter().flat_map(|files| &files.directories);
        parents
            .map(PathBuf::from)
            .chain(referenced.cloned())
            .collect()
    }

    /// Builds the settings from these bytes, or reports every mistake in them.
    ///
    /// Parsing needs many times the memory of the settings. A separate thread builds them and this
    /// function returns a copy, so that the memory of the thread is returned to the system as a
    /// whole and not fragmented by what remains in use.
    pub fn settings(&self, env: Env<'_>) -> Result<Settings, Problems> {
        let read = std::thread::scope(|scope| {
            let builder = std::thread::Builder::new().name("config".to_owned());
            let thread = builder.spawn_scoped(scope, || self.build(env));
            thread.ok().and_then(|thread| thread.join().ok())
        });
        let Some(built) = read else {
            return self.build(env);
        };
        let settings = built?;
        Ok(settings.clone())
    }

    fn build(&self, env: Env<'_>) -> Result<Settings, Problems> {
        let mut problems = Vec::new();
        let mut warnings = Vec::new();
        let mut origins = BTreeMap::new();
        let mut domains = Vec::new();
        let mut compiled = Compiled::default();

        let mut main = self.read_main(env, &mut problems);
        if let Some(main) = &mut main {
            check_file(main, &mut problems, &mut warnings);
            warnings.append(&mut main.warnings);
            origin::record(
                &main.tree,
                &main.tree.root,
                "",
                OriginScope::All,
                &mut origins,
            );
            add_domains(
                main,
                "/egress/domains",
                |file| &file.egress.domains,
                &mut domains,
                &mut origins,
            );
        }

        let allowlist = self.included_bytes(
            &self.allowlist,
            main.as_ref(),
            "/egress/allowlist",
            &mut problems,
        );
        let allowlist = allowlist.and_then(|(path, bytes)| {
            Layer::<AllowlistFile>::read(&ALLOWLIST, path, bytes, Some(env), &mut problems)
        });
        // The gate writes grants from requests of agents, so variables in them are not expanded.
        let grants = self.grants_bytes(&mut problems);
        let grants = grants.and_then(|(path, bytes)| {
            Layer::<GrantsFile>::read(&GRANTS, path, bytes, None, &mut problems)
        });
        if let Some(layer) = &allowlist {
            add_domains(
                layer,
                "/domains",
                |file| &file.domains,
                &mut domains,
                &mut origins,
            );
        }
        let mut sandbox_domains = BTreeMap::new();
        if let Some(layer) = grants {
            add_domains(
                &layer,
                "/domains",
                |file| &file.domains,
                &mut domains,
                &mut origins,
            );
            add_sandbox_origins(&layer, &mut origins);
            let own = layer.value.sandboxes.into_iter();
            sandbox_domains.extend(own.map(|(id, own)| (id, own.domains)));
        }

        if let Some(main) = &main {
            add_presets(main, &mut domains);
            let transparent = &main.value.egress.transparent_ports;
            let rules = domains.iter().map(|domain| &domain.rule);
            let rules = rules.chain(sandbox_domains.values().flatten());
            let captured = captured_ports(transparent, rules).len();
            if captured > MAX_CAPTURED_PORTS {
                let message = format!(
                    "egress.transparent_ports and the ports of rules are {captured} different \
                     ports: a sandbox captures at most {MAX_CAPTURED_PORTS}"
                );
                problems.push(
                    main.problem("/egress", message)
                        .with_hint("list fewer ports"),
                );
            }
        }

        let policy =
            self.included_bytes(&self.policy, main.as_ref(), "/egress/policy", &mut problems);
        let policy = policy.and_then(|(path, bytes)| {
            Layer::<PolicyFile>::read(&POLICY, path, bytes, Some(env), &mut problems)
        });
        if let Some(layer) = &policy {
            origin::record(
                &layer.tree,
                &layer.tree.root,
                "/policy",
                OriginScope::All,
                &mut origins,
            );
        }
        let default = PolicyFile::default();
        let rules = policy.as_ref().map_or(&default, |layer| &layer.value);
        compile_policy(rules, policy.as_ref(), &mut compiled, &mut problems);

        if !problems.is_empty() {
            return Err(problems.into());
        }
        let mut file = main.map(|layer| layer.value).unwrap_or_default();
        if let Some(source) = &self.main {
            let home = env("HOME").map(PathBuf::from);
            file.resolve_paths(&absolute_directory(&source.path), home.as_deref());
        }
        compiled.allowlist = policy::allowlist::Allowlist::new(operator_rules(&domains));
        let policy = policy.map_or(default, |layer| layer.value);
        let warnings = Problems::from(warnings).into_iter().collect();
        let mut settings = Settings::new(file, policy, domains, compiled, origins, warnings);
        settings.sandbox_domains = sandbox_domains;
        Ok(settings)
    }

    fn read_main(&self, env: Env<'_>, problems: &mut Vec<Problem>) -> Option<Layer<File>> {
        let source = self.main.as_ref()?;
        match &source.content {
            Ok(bytes) => Layer::read(&PALISADE, &source.path, bytes, Some(env), problems),
            Err(why) => {
                let message = format!("cannot be read: {why}");
                problems.push(Problem::with_file(&source.path, message));
                None
            }
        }
    }

    /// The bytes of an included file. A path that is set must name an existing file.
    fn included_bytes<'s>(
        &self,
        source: &'s Option<SourceFile>,
        main: Option<&Layer<File>>,
        pointer: &str,
        problems: &mut Vec<Problem>,
    ) -> Option<(&'s Path, &'s [u8])> {
        let source = source.as_ref()?;
        match &source.content {
            Ok(bytes) => Some((&source.path, bytes)),
            Err(why) => {
                let path = match &source.variable {
                    Some(name) => format!("${{{name}}}"),
                    None => source.path.display().to_string(),
                };
                let message = format!("{path} cannot be read: {why}");
                problems.extend(main.map(|main| main.problem(pointer, message)));
                None
            }
        }
    }

    /// The bytes of the grants file, which may be absent.
    fn grants_bytes(&self, problems: &mut Vec<Problem>) -> Option<(&Path, &[u8])> {
        let source = self.grants.as_ref()?;
        match &source.content {
            Ok(bytes) => Some((&source.path, bytes)),
            Err(FileReadError::Missing) => None,
            Err(why) => {
                let message = format!("cannot be read: {why}");
                problems.push(Problem::with_file(&source.path, message));
                None
            }
        }
    }
}

/// The files that a configuration file refers to. `find` resolves a path in the file.
fn referenced_files(
    tree: Option<&Tree>,
    find: impl Fn(&str) -> Option<PathBuf>,
) -> Vec<ReferencedFiles> {
    let list = |pointer: &str| match tree?.get(pointer).map(|node| &node.content) {
        Some(Content::List(items)) => Some(items.as_slice()),
        _ => None,
    };
    let bundles = list("/policies/bundles").map_or(0, <[Node]>::len);
    let mut found: Vec<ReferencedFiles> = (0..bundles)
        .filter_map(|index| {
            let path = tree?.get(&format!("/policies/bundles/{index}/path"))?;
            Some(ReferencedFiles::bundle(&find(path.text()?)?))
        })
        .collect();
    let uses_system = list("/egress/dns/upstreams")
        .is_none_or(|upstreams| upstreams.iter().any(|node| node.text() == Some("system")));
    if uses_system {
        let written = tree.and_then(|tree| tree.get("/egress/dns/resolv_conf")?.text());
        let default = DnsSettings::default().resolv_conf;
        let path = written.map_or(Some(default), find);
        found.extend(path.map(ReferencedFiles::file));
    }
    found
}

fn add_domains<T>(
    layer: &Layer<T>,
    pointer: &str,
    list: impl Fn(&T) -> &Vec<DomainRule>,
    domains: &mut Vec<LoadedDomainRule>,
    origins: &mut BTreeMap<String, ValueOrigin>,
) {
    for (index, rule) in list(&layer.value).iter().enumerate() {
        let original = layer.original_pointer(&format!("{pointer}/{index}"));
        let node = layer.tree.get(&original);
        if let Some(node) = node {
            let merged = format!("/domains/{}", domains.len());
            origin::record(&layer.tree, node, &merged, OriginScope::Variables, origins);
        }
        domains.push(LoadedDomainRule {
            rule: rule.clone(),
            origin: node.map_or(ValueOrigin::Default, |node| {
                ValueOrigin::of_node(&layer.tree, node)
            }),
        });
    }
}

/// Records the position of each rule for one sandbox.
fn add_sandbox_origins(layer: &Layer<GrantsFile>, origins: &mut BTreeMap<String, ValueOrigin>) {
    for (id, own) in &layer.value.sandboxes {
        for index in 0..own.domains.len() {
            let inside = format!("/domains/{index}");
            let original = layer.original_pointer(&format!("{}{inside}", join("/sandboxes", id)));
            if let Some(node) = layer.tree.get(&original) {
                let shown = format!("{}{inside}", join("/sandbox_domains", id));
                origins.insert(shown, ValueOrigin::of_node(&layer.tree, node));
            }
        }
    }
}

/// Adds the rules of `egress.presets`, whose origin is the name in the list. Unknown names have been
/// reported.
fn add_presets(main: &Layer<File>, domains: &mut Vec<LoadedDomainRule>) {
    let names = &main.value.egress.presets;
    for (index, name) in names.iter().enumerate() {
        let is_repeated = names.iter().take(index).any(|earlier| earlier == name);
        let Some(preset) = Preset::find(name).ok().filter(|_| !is_repeated) else {
            continue;
        };
        let original = main.original_pointer(&format!("/egress/presets/{index}"));
        let origin = main
            .tree
            .get(&original)
            .map_or(ValueOrigin::Default, |node| {
                ValueOrigin::of_node(&main.tree, node)
            });
        domains.extend(preset.domains.into_iter().map(|rule| LoadedDomainRule {
            rule,
            origin: origin.clone(),
        }));
    }
}

/// Resolves the path of an included file.
fn resolve_included(including: &Path, path: &Path, env: Env<'_>) -> PathBuf {
    let home = env("HOME").map(PathBuf::from);
    let base = including.parent().unwrap_or(Path::new(""));
    resolve(path, base, home.as_deref())
}

/// The directory of `file`, absolute.
fn absolute_directory(file: &Path) -> PathBuf {
    let directory = file.parent().unwrap_or(Path::new(""));
    std::path::absolute(directory).unwrap_or_else(|_| directory.to_owned())
}

/// See [`crate::fuzz_check`].
pub(crate) fn fuzz_check(bytes: &[u8], env: Env<'_>) {
    let file = |name: &str| {
        Some(SourceFile {
            path: PathBuf::from(name),
            variable: None,
            content: Ok(bytes.to_vec()),
        })
    };
    let sources = Sources {
        main: file("palisade.yaml"),
        allowlist: file("allowlist.yaml"),
        policy: file("policy.yaml"),
        grants: file(grants::FILE_NAME),
        referenced: Vec::new(),
    };
    let empty = Sources {
        allowlist: None,
        policy: None,
        grants: None,
        ..sources.clone()
    };
    for sources in [sources, empty] {
        if let Ok(settings) = sources.settings(env) {
            settings.diff(&Settings::default());
            settings.show();
        }
    }
}
