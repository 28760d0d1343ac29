//! A repository's own file, and the list of trusted files.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use config::section::sandbox::SetupCommand;
use config::{FILE_NAME, RepoFile, TrustError, TrustStore};

const YAML: &str = "\
image: tools.example/agent:1
setup_command: make setup
ports: [3000, '8080:80']
env: [EDITOR, AWS_SECRET_ACCESS_KEY]
egress:
  domains: [docs.example]
";

struct Fixture {
    dir: tempfile::TempDir,
}

impl Fixture {
    fn new(yaml: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("repo")).unwrap();
        let fixture = Self { dir };
        fixture.write(yaml);
        fixture
    }

    fn repo(&self) -> std::path::PathBuf {
        self.dir.path().join("repo")
    }

    fn write(&self, yaml: &str) {
        std::fs::write(self.repo().join(FILE_NAME), yaml).unwrap();
    }

    fn file(&self) -> RepoFile {
        RepoFile::load(&self.repo()).unwrap().unwrap()
    }

    fn trust_list(&self) -> std::path::PathBuf {
        self.dir.path().join("trust.json")
    }

    fn store(&self) -> TrustStore {
        TrustStore::load(&self.trust_list()).unwrap()
    }
}

fn refused(yaml: &str) -> String {
    let fixture = Fixture::new(yaml);
    let problems = RepoFile::load(&fixture.repo()).unwrap_err();
    problems
        .to_string()
        .replace(&format!("{}/", fixture.repo().display()), "")
}

#[test]
fn file_has_no_effect_until_its_exact_content_is_trusted() {
    let fixture = Fixture::new(YAML);
    assert!(fixture.file().trusted_content(&fixture.store()).is_none());

    fixture.store().trust(&fixture.file()).unwrap();
    assert!(fixture.file().trusted_content(&fixture.store()).is_some());
    let mode = std::fs::metadata(fixture.trust_list())
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
    let left: Vec<_> = std::fs::read_dir(fixture.dir.path()).unwrap().collect();
    assert_eq!(
        left.len(),
        3,
        "repository, list and lock: no temporary file is left over"
    );

    fixture.write(&format!("{YAML}\n"));
    assert!(
        fixture.file().trusted_content(&fixture.store()).is_none(),
        "one byte more"
    );
    fixture.write(YAML);
    assert!(fixture.file().trusted_content(&fixture.store()).is_some());

    // The same content in another directory belongs to another repository.
    let other = fixture.dir.path().join("other");
    std::fs::create_dir(&other).unwrap();
    std::fs::write(other.join(FILE_NAME), YAML).unwrap();
    let copy = RepoFile::load(&other).unwrap().unwrap();
    assert!(copy.trusted_content(&fixture.store()).is_none());

    let listed = fixture.store().list();
    assert_eq!(listed.len(), 1);
    assert_eq!(
        listed[0].directory,
        std::fs::canonicalize(fixture.repo()).unwrap()
    );
    assert!(fixture.store().revoke(&fixture.repo()).unwrap());
    assert!(!fixture.store().revoke(&fixture.repo()).unwrap());
    assert!(fixture.file().trusted_content(&fixture.store()).is_none());
}

#[test]
fn changes_since_the_list_was_read_are_kept() {
    let fixture = Fixture::new(YAML);
    let other = fixture.dir.path().join("other");
    std::fs::create_dir(&other).unwrap();
    std::fs::write(other.join(FILE_NAME), YAML).unwrap();
    let other_file = RepoFile::load(&other).unwrap().unwrap();
    fixture.store().trust(&fixture.file()).unwrap();

    // One store was loaded before another store revokes an entry.
    let mut first_store = fixture.store();
    assert!(fixture.store().revoke(&fixture.repo()).unwrap());
    first_store.trust(&other_file).unwrap();
    assert!(fixture.file().trusted_content(&fixture.store()).is_none());
    assert!(
        fixture.file().trusted_content(&first_store).is_none(),
        "the store that wrote the list has the revocation too"
    );
    assert!(other_file.trusted_content(&fixture.store()).is_some());

    // A revocation keeps an entry that was added after the list was read.
    let mut revoking = fixture.store();
    fixture.store().trust(&fixture.file()).unwrap();
    assert!(revoking.revoke(&other).unwrap());
    assert_eq!(fixture.store().list().len(), 1);
    let mut outdated = fixture.store();
    assert!(fixture.store().revoke(&fixture.repo()).unwrap());
    assert!(!outdated.revoke(&fixture.repo()).unwrap());
    assert!(outdated.list().is_empty());
}

#[test]
fn concurrent_writers_of_the_trust_list_lose_no_entry() {
    let fixture = Fixture::new(YAML);
    let repos: Vec<_> = (0..8)
        .map(|n| {
            let repo = fixture.dir.path().join(format!("r{n}"));
            std::fs::create_dir(&repo).unwrap();
            std::fs::write(repo.join(FILE_NAME), YAML).unwrap();
            repo
        })
        .collect();
    std::thread::scope(|scope| {
        for repo in &repos {
            scope.spawn(|| {
                let file = RepoFile::load(repo).unwrap().unwrap();
                fixture.store().trust(&file).unwrap();
            });
        }
    });
    assert_eq!(fixture.store().list().len(), repos.len());
}

#[test]
fn deleted_repository_can_still_be_revoked() {
    let fixture = Fixture::new(YAML);
    let link = fixture.dir.path().join("link");
    std::os::unix::fs::symlink(fixture.dir.path(), &link).unwrap();
    let canonical = std::fs::canonicalize(fixture.repo()).unwrap();
    for written in [
        canonical.clone(),
        fixture.repo(),
        link.join("repo"),
        canonical.join("../repo/"),
        canonical.join("./"),
    ] {
        fixture.store().trust(&fixture.file()).unwrap();
        std::fs::remove_dir_all(fixture.repo()).unwrap();
        assert!(fixture.store().revoke(&written).unwrap(), "{written:?}");
        assert!(fixture.store().list().is_empty());
        std::fs::create_dir(fixture.repo()).unwrap();
        fixture.write(YAML);
    }
    // A link has replaced the directory: the trust in the path of the link is revoked nevertheless.
    fixture.store().trust(&fixture.file()).unwrap();
    std::fs::remove_dir_all(fixture.repo()).unwrap();
    std::os::unix::fs::symlink("/", fixture.repo()).unwrap();
    assert!(fixture.store().revoke(&canonical).unwrap());
}

#[test]
fn environment_names_must_also_be_in_the_operators_list() {
    let fixture = Fixture::new(YAML);
    let mut store = fixture.store();
    store.trust(&fixture.file()).unwrap();
    let trusted = fixture.file().trusted_content(&store).unwrap();
    let mut settings = config::Settings::default();
    settings.sandbox.env = vec!["EDITOR".into(), "LANG".into()];
    let effective = trusted.effective_settings(&settings);
    assert_eq!(effective.env, ["EDITOR"]);
    assert_eq!(effective.dropped, ["AWS_SECRET_ACCESS_KEY"]);
    assert_eq!(effective.image.as_deref(), Some("tools.example/agent:1"));
    assert_eq!(
        effective.setup_command,
        Some(SetupCommand::Shell("make setup".to_owned()))
    );
    let ports: Vec<_> = effective.ports.iter().map(|p| (p.host, p.inside)).collect();
    assert_eq!(ports, [(3000, 3000), (8080, 80)]);
    assert_eq!(effective.added_domains.len(), 1);
}

#[test]
fn a_repository_may_set_its_own_keys_and_no_others() {
    assert_eq!(
        refused("sandbox: {env: [X]}\nimages: a\nports: [0]\nenv: ['A=b']\n"),
        ".palisade.yaml:1:1: unknown key 'sandbox' at the top level; known keys: version, image, setup_command, ports, env or egress\n\
         .palisade.yaml:2:1: unknown key 'images' at the top level; did you mean 'image'?\n\
         .palisade.yaml:3:9: ports[0] must be at least 1, not 0\n\
         .palisade.yaml:4:7: env[0] must be the name of an environment variable, not 'A=b'"
    );
    assert!(RepoFile::load(Path::new("/nonexistent")).unwrap().is_none());
}

#[test]
fn variables_in_repository_files_are_not_expanded() {
    let fixture = Fixture::new("setup_command: echo ${HOME}\n");
    let mut store = fixture.store();
    store.trust(&fixture.file()).unwrap();
    let effective = fixture
        .file()
        .trusted_content(&store)
        .unwrap()
        .effective_settings(&config::Settings::default());
    assert_eq!(
        effective.setup_command,
        Some(SetupCommand::Shell("echo ${HOME}".to_owned()))
    );
}

#[test]
fn repository_file_that_is_a_link_pipe_or_large_is_refused() {
    let fixture = Fixture::new("");
    let path = fixture.repo().join(FILE_NAME);
    std::fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink("/etc/hostname", &path).unwrap();
    let problems = RepoFile::load(&fixture.repo()).unwrap_err().to_string();
    assert!(
        problems.ends_with("cannot be read: not a regular file"),
        "{problems}"
    );

    std::fs::remove_file(&path).unwrap();
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert!(RepoFile::load(&fixture.repo()).is_err());

    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, vec![b'#'; (64 << 10) + 1]).unwrap();
    let problems = RepoFile::load(&fixture.repo()).unwrap_err().to_string();
    assert!(problems.ends_with("larger than 65536 bytes"), "{problems}");

    let problems = refused("\"\\e]52;c;x\\a\": 1\nimage: \"\\e[2J\\u202e\"\n");
    assert!(
        !problems.contains('\u{1b}') && !problems.contains('\u{202e}'),
        "{problems}"
    );
}

#[test]
fn damaged_trust_list_is_an_error_and_not_an_empty_list() {
    let fixture = Fixture::new(YAML);
    for text in [
        "",
        "{}",
        "[]",
        "{\"version\":2,\"trusted\":{}}",
        "{\"version\":1,\"trusted\":{\"/x\":\"short\"}}",
        "{\"version\":1,\"trusted\":{},\"more\":1}",
    ] {
        std::fs::write(fixture.trust_list(), text).unwrap();
        let error = TrustStore::load(&fixture.trust_list()).unwrap_err();
        assert!(
            matches!(error, TrustError::Damaged { .. }),
            "{text}: {error}"
        );
    }
    std::fs::remove_file(fixture.trust_list()).unwrap();
    std::fs::create_dir(fixture.trust_list()).unwrap();
    let error = TrustStore::load(&fixture.trust_list()).unwrap_err();
    assert!(matches!(error, TrustError::Unreadable { .. }), "{error}");
}
