use std::collections::BTreeSet;

use policy::host::HostPattern;

use super::*;

#[test]
fn every_preset_parses_without_problems() {
    for (name, text) in FILES {
        let (preset, problems) = parse(name, text).unwrap();
        assert!(problems.is_empty(), "{problems:?}");
        assert_eq!(preset.name, name);
        assert!(!preset.domains.is_empty(), "{name}");
        assert!(preset.description.len() < 100, "{name}");
    }
    assert_eq!(Preset::all().len(), FILES.len());
}

#[test]
fn preset_files_and_names_agree() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("presets");
    let files: BTreeSet<String> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    let names: BTreeSet<String> = Preset::names().map(|name| format!("{name}.yaml")).collect();
    assert_eq!(files, names);
}

#[test]
fn registries_and_tools_allow_only_reads() {
    for preset in Preset::all() {
        if preset.kind == PresetKind::Agent {
            continue;
        }
        for rule in &preset.domains {
            let host = &rule.host;
            assert_eq!(rule.methods, ["GET", "HEAD"], "{}: {host}", preset.name);
        }
    }
    // Hosts to which packages are published.
    for preset in Preset::all() {
        for rule in &preset.domains {
            let host = rule.host.to_string();
            assert!(
                !["upload.pypi.org", "www.nuget.org"].contains(&host.as_str()),
                "{}: {host}",
                preset.name
            );
        }
    }
}

#[test]
fn rules_of_presets_use_public_names_and_default_ports() {
    for preset in Preset::all() {
        for rule in &preset.domains {
            assert!(!matches!(rule.host, HostPattern::Ip(_)), "{}", preset.name);
            assert!(
                rule.ports.is_empty() && rule.deny.is_empty(),
                "{}",
                preset.name
            );
            let name = format!("preset:{}", preset.name);
            assert_eq!(rule.rule_name.as_ref(), Some(&name));
        }
    }
}

#[test]
fn programs_select_the_preset_of_their_agent() {
    for (program, expected) in [
        ("claude", Some("claude")),
        ("/opt/tools/bin/codex", Some("codex")),
        ("./gemini", Some("gemini")),
        // A registry has no program.
        ("npm", None),
        ("go", None),
        ("bash", None),
        ("", None),
    ] {
        assert_eq!(
            Preset::for_program(Path::new(program)),
            expected,
            "{program}"
        );
    }
}

#[test]
fn unknown_names_are_refused_with_a_suggestion() {
    let error = |name: &str| Preset::find(name).unwrap_err().to_string();
    assert_eq!(
        error("cluade"),
        "no preset is called 'cluade'; did you mean 'claude'?"
    );
    assert_eq!(
        error("frobnicate\u{1b}"),
        "no preset is called 'frobnicate\\u{1b}'; palisade preset list shows their names"
    );
}
