//! Properties of arbitrary files.

use config::section::tools::RuntimeKind;
use config::{Env, Settings, Sources};
use proptest::prelude::*;

fn load_bytes(bytes: &[u8], env: Env<'_>) -> Result<Settings, String> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("palisade.yaml");
    std::fs::write(&path, bytes).unwrap();
    config::load(Some(&path), env).map_err(|problems| problems.to_string())
}

fn name() -> impl Strategy<Value = String> {
    "[a-z][a-z0-9_-]{0,12}"
}

/// A YAML double-quoted scalar is a JSON string.
fn quoted(text: &str) -> String {
    serde_json::to_string(text).unwrap()
}

#[derive(Clone, Debug)]
struct ToolInput {
    name: String,
    command: Vec<String>,
    work_dir: Option<String>,
    env: Vec<(String, String)>,
    runtime: Option<(RuntimeKind, String, u16)>,
    description: Option<String>,
}

fn tool() -> impl Strategy<Value = ToolInput> {
    let kind = prop_oneof![
        Just(RuntimeKind::Local),
        Just(RuntimeKind::Sandbox),
        Just(RuntimeKind::E2b)
    ];
    (
        name(),
        prop::collection::vec("[ -#%-~]{1,20}", 1..4),
        prop::option::of("/?[a-z]{1,8}(/[a-z]{1,8}){0,2}"),
        prop::collection::vec(("[A-Z_][A-Z0-9_]{0,12}", "[ -#%-~é😀]{0,20}"), 0..4),
        prop::option::of((kind, name(), 1_u16..)),
        prop::option::of("[ -#%-~]{0,40}"),
    )
        .prop_map(|(name, mut command, work_dir, env, runtime, description)| {
            command[0] = format!("bin{}", command[0].trim());
            ToolInput {
                name,
                command,
                work_dir,
                env,
                runtime,
                description,
            }
        })
}

fn write_tool(tool: &ToolInput) -> String {
    let command: Vec<String> = tool.command.iter().map(|word| quoted(word)).collect();
    let mut yaml = format!(
        "  - name: {}\n    command: [{}]\n",
        quoted(&tool.name),
        command.join(", ")
    );
    if let Some(work_dir) = &tool.work_dir {
        yaml.push_str(&format!("    work_dir: {}\n", quoted(work_dir)));
    }
    if !tool.env.is_empty() {
        let entries = tool.env.iter();
        let entries = entries.map(|(name, value)| quoted(&format!("{name}={value}")));
        let entries = entries.collect::<Vec<_>>().join(", ");
        yaml.push_str(&format!("    env: [{entries}]\n"));
    }
    if let Some((kind, template, timeout)) = &tool.runtime {
        yaml.push_str(&format!(
            "    runtime: {{type: {}, template: {}, timeout: {timeout}s}}\n",
            kind.as_str(),
            quoted(template)
        ));
    }
    if let Some(description) = &tool.description {
        yaml.push_str(&format!("    description: {}\n", quoted(description)));
    }
    yaml
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    // **Feature: unified-sidecar, Property 1: Configuration Parsing Consistency**
    #[test]
    fn property_01_configuration_parsing_consistency(
        bundles in prop::collection::btree_map(name(), ("/[a-z/]{1,20}", "[a-z]+/[a-z]+"), 0..6),
        tools in prop::collection::vec(tool(), 0..6),
    ) {
        let mut tools = tools;
        tools.sort_by(|a, b| a.name.cmp(&b.name));
        tools.dedup_by(|a, b| a.name == b.name);
        let mut yaml = String::from("version: \"1.0\"\npolicies:\n  bundles:\n");
        for (id, (path, entrypoint)) in &bundles {
            yaml.push_str(&format!(
                "    - {{id: {}, path: {}, entrypoint: {}}}\n",
                quoted(id), quoted(path), quoted(entrypoint)
            ));
        }
        yaml.push_str("tools:\n");
        tools.iter().for_each(|tool| yaml.push_str(&write_tool(tool)));

        let settings = load_bytes(yaml.as_bytes(), &|_| None).map_err(TestCaseError::fail)?;
        prop_assert_eq!(settings.policies.bundles.len(), bundles.len());
        for (bundle, (id, (path, entrypoint))) in settings.policies.bundles.iter().zip(&bundles) {
            prop_assert_eq!(&bundle.id, id);
            prop_assert_eq!(bundle.path.to_str(), Some(path.as_str()));
            prop_assert_eq!(&bundle.entrypoint, entrypoint);
        }
        prop_assert_eq!(settings.tools.len(), tools.len());
        for (read, input) in settings.tools.iter().zip(&tools) {
            prop_assert_eq!(&read.name, &input.name);
            prop_assert_eq!(&read.command, &input.command);
            prop_assert_eq!(&read.description, &input.description);
            match (&read.work_dir, &input.work_dir) {
                (Some(read), Some(input)) if input.starts_with('/') => {
                    prop_assert_eq!(read.to_str(), Some(input.as_str()));
                }
                // Relative to the file's directory.
                (Some(read), Some(input)) => {
                    prop_assert!(read.is_absolute() && read.ends_with(input), "{:?}", read);
                }
                (read, input) => prop_assert_eq!(read.is_some(), input.is_some()),
            }
            let env = read.env.iter();
            let env: Vec<_> = env
                .map(|entry| (entry.name.clone(), entry.value.expose().to_owned()))
                .collect();
            prop_assert_eq!(&env, &input.env);
            let (kind, timeout) = match &input.runtime {
                Some((kind, _, timeout)) => (*kind, Some(u64::from(*timeout))),
                None => (RuntimeKind::Local, None),
            };
            prop_assert_eq!(read.runtime.kind, kind);
            prop_assert_eq!(read.runtime.timeout.map(|t| t.as_secs()), timeout);
        }
    }

    // **Feature: unified-sidecar, Property 13: Environment Variable Expansion**
    #[test]
    fn property_13_environment_variable_expansion(
        variable in "[A-Z][A-Z0-9_]{0,20}",
        value in any::<String>(),
        around in "[a-z: -]{0,8}",
    ) {
        let yaml = format!(
            "version: \"1.0\"\nsecrets:\n  plain: ${{{variable}}}\n  inside: \"{around}${{{variable}}}{around}\"\n"
        );
        let env = |name: &str| (name == variable).then(|| value.clone());
        let settings = load_bytes(yaml.as_bytes(), &env).map_err(TestCaseError::fail)?;
        prop_assert_eq!(settings.secrets["plain"].expose(), &value);
        let whole = format!("{around}{value}{around}");
        prop_assert_eq!(settings.secrets["inside"].expose(), &whole);

        // The variable of a secret may be unset; other variables must be set.
        let sentence = format!("the environment variable {variable} is not set");
        let unset = load_bytes(yaml.as_bytes(), &|_| None).map_err(TestCaseError::fail)?;
        prop_assert!(unset.secrets.values().all(config::Secret::is_empty));
        let warned = unset.warnings.iter().filter(|warning| warning.message.contains(&sentence));
        prop_assert_eq!(warned.count(), 2);
        let outside_secrets = format!(
            "version: \"1.0\"\ntools:\n- name: t\n  command: [\"${{{variable}}}\"]\n  description: \"{around}${{{variable}}}\"\n"
        );
        let problems = load_bytes(outside_secrets.as_bytes(), &|_| None).unwrap_err();
        prop_assert_eq!(problems.matches(&sentence).count(), 2, "{}", problems);
    }

    // **Feature: unified-sidecar, Property 16: E2B Runtime Configuration Parsing**
    #[test]
    fn property_16_e2b_runtime_configuration_parsing(
        template in "[A-Za-z0-9][A-Za-z0-9._-]{0,40}",
        timeout in 0_u32..1_000_000,
        unit in prop_oneof![Just("ms"), Just("s"), Just("m"), Just("")],
    ) {
        let yaml = format!(
            "version: \"1.0\"\ntools:\n  - name: t\n    command: [x]\n    runtime:\n      type: e2b\n      template: {}\n      timeout: {timeout}{unit}\n",
            quoted(&template)
        );
        let settings = load_bytes(yaml.as_bytes(), &|_| None).map_err(TestCaseError::fail)?;
        let runtime = &settings.tools[0].runtime;
        prop_assert_eq!(runtime.kind, RuntimeKind::E2b);
        prop_assert_eq!(runtime.template.as_deref(), Some(template.as_str()));
        let millis = match unit { "ms" => 1, "m" => 60_000, _ => 1000 };
        let expected = u128::from(timeout) * millis;
        prop_assert_eq!(runtime.timeout.map(|t| t.as_millis()), Some(expected));
    }

    /// Whatever the value of a variable is, it stays inside its string: no other value changes.
    #[test]
    fn a_variable_cannot_break_out_of_its_string(
        value in prop_oneof![
            any::<String>(),
            "[\"'\\\\\n:#&*!|>%@`{}\\[\\], -]{0,40}",
            Just("x\"\nserver: {auth_token: open}\n".to_owned()),
            Just("'\n- item: ${OTHER}\n".to_owned()),
            Just("&anchor *anchor << : ---\n...".to_owned()),
            Just("${V}${OTHER}$${".to_owned()),
        ],
        style in prop_oneof![Just("${V}"), Just("\"${V}\""), Just("'${V}'"), Just("|-\n    ${V}"), Just(">-\n    ${V}")],
    ) {
        let yaml = |text: &str| format!(
            "version: \"1.0\"\nsecrets:\n  before: b\n  k: {text}\n  after: a\nlogging: {{level: warn}}\n"
        );
        let env = |name: &str| (name == "V").then(|| value.clone());
        let settings = load_bytes(yaml(style).as_bytes(), &env).map_err(TestCaseError::fail)?;
        prop_assert_eq!(settings.secrets["k"].expose(), &value);
        let harmless = load_bytes(yaml("other").as_bytes(), &env).map_err(TestCaseError::fail)?;
        let changed = if value == "other" { vec![] } else { vec!["/secrets/k".to_owned()] };
        prop_assert_eq!(settings.diff(&harmless), changed);
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        config::fuzz_check(&bytes);
    }

    #[test]
    fn arbitrary_yaml_never_panics(text in "([a-z]{1,4}|[-:?,\\[\\]{}#&*!|>'\"%@` \n]|: |\n  |- |\\$\\{[A-Z]\\}|[0-9.]{1,3}){0,80}") {
        config::fuzz_check(text.as_bytes());
    }

    /// Damages a valid file in one place, so that the file reaches the later stages of loading.
    #[test]
    fn a_damaged_file_never_panics(
        at in any::<prop::sample::Index>(),
        length in 0_usize..20,
        patch in "[a-z0-9:\\[\\]{}\"' \n-]{0,20}",
    ) {
        for text in [
            include_str!("../data/palisade.yaml"),
            include_str!("../data/policy.yaml"),
            include_str!("../data/allowlist.yaml"),
        ] {
            let start = at.index(text.len());
            let end = (start + length).min(text.len());
            let damaged = format!("{}{patch}{}", &text[..start], &text[end..]);
            config::fuzz_check(damaged.as_bytes());
        }
    }

    #[test]
    fn equal_bytes_have_equal_fingerprints_and_others_do_not(a in ".{0,40}", b in ".{0,40}") {
        let fingerprint = |text: &str| {
            let dir = tempfile::tempdir().unwrap();
            std::fs::write(dir.path().join("palisade.yaml"), text).unwrap();
            let path = dir.path().join("palisade.yaml");
            let first = Sources::read(Some(&path), &|_| None).unwrap().fingerprint();
            std::fs::write(&path, a.as_bytes()).unwrap();
            (first, Sources::read(Some(&path), &|_| None).unwrap().fingerprint())
        };
        let (first, second) = fingerprint(&b);
        prop_assert_eq!(first == second, a == b);
    }
}
