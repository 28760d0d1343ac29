//! Contract tests for all backends.
//!
//! A backend's tests include this file, implement [`BackendFixture`] and invoke `contract!(a new
//! fixture)` in a module, which defines one test for each function here.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::Read;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use policy::id::SandboxId;
use sandbox::contract::setup::{self, SetupEnd, SetupFailure};
use sandbox::contract::{
    ExecutionResult, Force, GatePorts, SandboxBackend, SandboxCommand, SandboxConfig, SandboxError,
    SandboxLimits, SandboxStatus, SystemConfig, TransferBounds,
};
use sandbox::name::Slug;
use sandbox::transfer::{TransferError, UnpackRules, pack, unpack};

/// A fixture for one backend; dropping it removes all sandboxes.
pub(crate) trait BackendFixture {
    /// The backend.
    fn backend(&self) -> &dyn SandboxBackend;

    /// The same backend without one of its prerequisites.
    fn unavailable(&self) -> Box<dyn SandboxBackend>;

    /// The traces of sandboxes on the host: directories, containers, cgroups.
    fn traces(&self) -> Vec<String>;
}

/// Defines one test for each function of the contract.
macro_rules! contract {
    ($fixture:expr) => {
        crate::suite::contract! { @each $fixture;
            a_created_sandbox_is_active_and_has_its_names
            pause_and_resume_are_idempotent
            a_paused_sandbox_keeps_its_files_and_runs_nothing
            an_idle_sandbox_is_deleted_without_force
            a_sandbox_in_which_a_command_runs_is_deleted_by_force_only
            a_failed_set_up_command_is_reported_with_its_last_lines
            deleting_twice_is_a_clear_not_found
            a_deleted_sandbox_leaves_no_trace_and_its_id_is_free
            every_call_for_an_unknown_sandbox_is_not_found
            command_returns_exit_code_and_separate_outputs
            input_environment_and_directory_reach_a_command
            a_command_that_takes_too_long_is_killed
            missing_program_is_named_in_the_error
            transfer_keeps_bytes_paths_modes_and_links
            a_single_file_goes_in_and_out
            an_upload_replaces_files_and_keeps_what_it_does_not_name
            a_transfer_beyond_its_bounds_is_refused
            truncated_archive_changes_nothing
            a_duplicate_is_a_clear_error_and_leaves_no_partial_state
            an_invalid_name_is_refused_before_the_backend_is_touched
            unavailable_backend_is_an_error_and_leaves_nothing
            listeners_are_the_same_at_every_call
        }
    };
    (@each $fixture:expr; $($test:ident)*) => {
        $(
            #[test]
            fn $test() {
                crate::suite::$test(&$fixture);
            }
        )*
    };
}
pub(crate) use contract;

const LARGE_BOUNDS: TransferBounds = TransferBounds {
    bytes: 16 << 20,
    entries: 1000,
};

/// Starts `sleep` in the background and waits until it runs.
const SLEEPER: &str = "sleep 4000 >/dev/null 2>&1 & \
                       until grep -qx sleep /proc/[0-9]*/comm 2>/dev/null; do :; done";

pub(crate) fn a_created_sandbox_is_active_and_has_its_names(fixture: &dyn BackendFixture) {
    let config = config("first");
    let made = fixture.backend().create(&config).unwrap();
    assert_eq!(made.name, config.name);
    assert_eq!(made.branch_name, "palisade/first");
    assert!(!made.container_id.is_empty());
    assert_eq!(made.status, SandboxStatus::Active);
    assert_eq!(fixture.backend().status(&config.id), SandboxStatus::Active);
}

pub(crate) fn pause_and_resume_are_idempotent(fixture: &dyn BackendFixture) {
    let id = create(fixture);
    let backend = fixture.backend();
    for _ in 0..2 {
        for _ in 0..2 {
            backend.pause(&id).unwrap();
            assert_eq!(backend.status(&id), SandboxStatus::Paused);
        }
        for _ in 0..2 {
            backend.resume(&id).unwrap();
            assert_eq!(backend.status(&id), SandboxStatus::Active);
        }
    }
    assert_eq!(stdout_of(fixture, &id, "echo on"), "on\n");
}

pub(crate) fn a_paused_sandbox_keeps_its_files_and_runs_nothing(fixture: &dyn BackendFixture) {
    let id = create(fixture);
    stdout_of(fixture, &id, "echo kept > file");
    fixture.backend().pause(&id).unwrap();
    let error = fixture
        .backend()
        .exec(&id, &SandboxCommand::shell("true"))
        .unwrap_err();
    assert!(matches!(error, SandboxError::Paused(_)), "{error}");
    fixture.backend().resume(&id).unwrap();
    assert_eq!(stdout_of(fixture, &id, "cat file"), "kept\n");
}

pub(crate) fn an_idle_sandbox_is_deleted_without_force(fixture: &dyn BackendFixture) {
    for paused in [false, true] {
        let id = create(fixture);
        assert_eq!(stdout_of(fixture, &id, "echo here"), "here\n");
        if paused {
            fixture.backend().pause(&id).unwrap();
        }
        fixture.backend().delete(&id, Force::No).unwrap();
        assert_eq!(fixture.backend().status(&id), SandboxStatus::Missing);
    }
}

pub(crate) fn a_sandbox_in_which_a_command_runs_is_deleted_by_force_only(
    fixture: &dyn BackendFixture,
) {
    let id = create(fixture);
    stdout_of(fixture, &id, SLEEPER);
    let error = fixture.backend().delete(&id, Force::No).unwrap_err();
    assert!(
        matches!(&error, SandboxError::Busy { name, what }
            if name.as_str() == "one" && what == "sleep is running"),
        "{error}"
    );
    assert_eq!(stdout_of(fixture, &id, "echo here"), "here\n");
    // A paused sandbox runs no command.
    fixture.backend().pause(&id).unwrap();
    fixture.backend().delete(&id, Force::No).unwrap();
    assert_eq!(fixture.backend().status(&id), SandboxStatus::Missing);
    let id = create(fixture);
    stdout_of(fixture, &id, SLEEPER);
    fixture.backend().delete(&id, Force::Yes).unwrap();
    assert_eq!(fixture.backend().status(&id), SandboxStatus::Missing);
}

pub(crate) fn a_failed_set_up_command_is_reported_with_its_last_lines(
    fixture: &dyn BackendFixture,
) {
    let id = create(fixture);
    let run = |line: &str, timeout| {
        let command = ["sh", "-c", line].map(str::to_owned);
        setup::run(fixture.backend(), &id, &command, timeout)
    };
    run("echo well > set-up", Duration::from_secs(60)).unwrap();
    assert_eq!(stdout_of(fixture, &id, "cat set-up"), "well\n");
    let line = "for n in $(seq 40); do echo $n; done; echo broken >&2; exit 3";
    match run(line, Duration::from_secs(60)) {
        Err(SandboxError::SetUp(SetupFailure { end, lines })) => {
            assert_eq!(end, SetupEnd::Exited(3));
            assert_eq!(lines.len(), 20);
            assert_eq!(
                lines.get(18..),
                Some(&["40", "broken"].map(str::to_owned)[..])
            );
        }
        other => panic!("{other:?}"),
    }
    let limit = Duration::from_millis(200);
    match run("sleep 4000", limit) {
        Err(SandboxError::SetUp(failure)) => assert_eq!(failure.end, SetupEnd::TimedOut(limit)),
        other => panic!("{other:?}"),
    }
}

pub(crate) fn deleting_twice_is_a_clear_not_found(fixture: &dyn BackendFixture) {
    let id = create(fixture);
    fixture.backend().delete(&id, Force::Yes).unwrap();
    for force in [Force::No, Force::Yes] {
        let error = fixture.backend().delete(&id, force).unwrap_err();
        assert_eq!(error.to_string(), format!("Sandbox '{id}' not found."));
    }
}

pub(crate) fn a_deleted_sandbox_leaves_no_trace_and_its_id_is_free(fixture: &dyn BackendFixture) {
    let before = fixture.traces();
    let id = create(fixture);
    assert_ne!(fixture.traces(), before);
    stdout_of(
        fixture,
        &id,
        "echo x > file; mkdir closed; chmod 0 closed; ln -s / root",
    );
    stdout_of(fixture, &id, "sleep 4000 >/dev/null 2>&1 &");
    fixture.backend().delete(&id, Force::Yes).unwrap();
    assert_eq!(fixture.traces(), before);
    assert_eq!(create(fixture), id);
    assert_eq!(stdout_of(fixture, &id, "ls -A"), "");
}

pub(crate) fn every_call_for_an_unknown_sandbox_is_not_found(fixture: &dyn BackendFixture) {
    let backend = fixture.backend();
    let id = config("unknown").id;
    let before = fixture.traces();
    assert_eq!(backend.status(&id), SandboxStatus::Missing);
    let answers = [
        backend.pause(&id).err(),
        backend.resume(&id).err(),
        backend.delete(&id, Force::No).err(),
        backend.delete(&id, Force::Yes).err(),
        backend.exec(&id, &SandboxCommand::shell("true")).err(),
        backend.listeners(&id).err(),
        backend
            .upload(&id, Path::new("."), &mut &[0; 1024][..], &LARGE_BOUNDS)
            .err(),
        backend
            .download(&id, Path::new("."), &mut Vec::new(), &LARGE_BOUNDS)
            .err(),
    ];
    for (place, answer) in answers.into_iter().enumerate() {
        let reply = answer.map(|error| error.to_string());
        let wanted = "Sandbox 'unknown' not found.";
        assert_eq!(reply.as_deref(), Some(wanted), "{place}");
    }
    assert_eq!(fixture.traces(), before);
}

pub(crate) fn command_returns_exit_code_and_separate_outputs(fixture: &dyn BackendFixture) {
    let id = create(fixture);
    for code in [0, 1, 7, 255] {
        let line = format!("printf out; printf err >&2; exit {code}");
        let result = shell(fixture, &id, &line);
        assert_eq!(
            (result.exit_code, text(&result.stdout), text(&result.stderr)),
            (code, "out".to_owned(), "err".to_owned())
        );
    }
    assert_eq!(shell(fixture, &id, "kill -9 $$").exit_code, 137);
    let result = shell(fixture, &id, "printf '\\000\\377\\n'");
    assert_eq!(result.stdout, [0, 255, b'\n']);
}

pub(crate) fn input_environment_and_directory_reach_a_command(fixture: &dyn BackendFixture) {
    let id = create(fixture);
    let mut command = SandboxCommand::shell("cat; echo $WORD; pwd");
    command.stdin = b"fed\n".to_vec();
    command.environment = vec![("WORD".into(), "said".into())];
    command.directory = Some("/tmp".into());
    let result = fixture.backend().exec(&id, &command).unwrap();
    assert_eq!(text(&result.stdout), "fed\nsaid\n/tmp\n");
    assert_eq!(stdout_of(fixture, &id, "pwd"), "/workspace\n");
}

pub(crate) fn a_command_that_takes_too_long_is_killed(fixture: &dyn BackendFixture) {
    let id = create(fixture);
    let mut command = SandboxCommand::shell("sleep 3000; echo late > /tmp/late");
    command.timeout = Some(Duration::from_millis(200));
    let error = fixture.backend().exec(&id, &command).unwrap_err();
    assert!(matches!(error, SandboxError::TimedOut { .. }), "{error}");
    wait_until("the end of the sleeper", || {
        let line = "cat /proc/[0-9]*/comm 2>/dev/null | grep -c sleep || true";
        stdout_of(fixture, &id, line) == "0\n"
    });
}

pub(crate) fn missing_program_is_named_in_the_error(fixture: &dyn BackendFixture) {
    let id = create(fixture);
    let error = fixture
        .backend()
        .exec(&id, &SandboxCommand::new(["no-such-program", "x"]))
        .unwrap_err();
    assert!(matches!(error, SandboxError::Start { .. }), "{error}");
    assert!(error.to_string().contains("'no-such-program'"), "{error}");
}

pub(crate) fn transfer_keeps_bytes_paths_modes_and_links(fixture: &dyn BackendFixture) {
    let id = create(fixture);
    let host = tempfile::tempdir().unwrap();
    let source = host.path().join("tree");
    let non_utf8_name = OsStr::from_bytes(b"odd \xff\n name");
    let long = "long-name/".repeat(20);
    std::fs::create_dir_all(source.join(&long)).unwrap();
    std::fs::create_dir(source.join(non_utf8_name)).unwrap();
    std::fs::create_dir(source.join("empty")).unwrap();
    let all: Vec<u8> = (0..=255).cycle().take(300_000).collect();
    for (path, mode) in [
        (PathBuf::from("plain"), 0o644),
        (PathBuf::from("tool"), 0o755),
        (PathBuf::from("secret"), 0o600),
        (PathBuf::from("fixed"), 0o400),
        (Path::new(non_utf8_name).join(non_utf8_name), 0o644),
        (Path::new(&long).join("file"), 0o644),
    ] {
        std::fs::write(source.join(&path), &all).unwrap();
        std::fs::set_permissions(source.join(path), PermissionsExt::from_mode(mode)).unwrap();
    }
    std::fs::write(source.join("nothing"), "").unwrap();
    symlink("plain", source.join("link")).unwrap();
    symlink("../plain", source.join("empty/up")).unwrap();
    symlink("nowhere", source.join("dangling")).unwrap();

    let up = upload(fixture, &id, Path::new("deep/er"), &source).unwrap();
    let line = "cd deep/er/tree && test -x tool -a ! -x plain && cmp plain tool && \
                readlink link empty/up dangling && stat -c %a tool secret fixed";
    assert_eq!(
        stdout_of(fixture, &id, line),
        "plain\n../plain\nnowhere\n755\n600\n400\n"
    );
    let back = host.path().join("back");
    let down = download(fixture, &id, Path::new("/workspace/deep/er/tree"), &back).unwrap();
    assert_eq!((up, down), (10, 10));
    assert_eq!(read_tree(&back.join("tree")), read_tree(&source));
}

pub(crate) fn a_single_file_goes_in_and_out(fixture: &dyn BackendFixture) {
    let id = create(fixture);
    let host = tempfile::tempdir().unwrap();
    let file = host.path().join("file");
    std::fs::write(&file, "content").unwrap();
    upload(fixture, &id, Path::new("/tmp/place"), &file).unwrap();
    assert_eq!(stdout_of(fixture, &id, "cat /tmp/place/file"), "content");
    let back = host.path().join("back");
    download(fixture, &id, Path::new("/tmp/place/file"), &back).unwrap();
    assert_eq!(std::fs::read(back.join("file")).unwrap(), b"content");
    let error = download(fixture, &id, Path::new("/tmp/nothing"), &back).unwrap_err();
    assert!(
        matches!(error, SandboxError::Transfer(TransferError::Missing(_))),
        "{error}"
    );
}

pub(crate) fn an_upload_replaces_files_and_keeps_what_it_does_not_name(
    fixture: &dyn BackendFixture,
) {
    let id = create(fixture);
    stdout_of(
        fixture,
        &id,
        "mkdir tree && echo old > tree/file && echo kept > tree/other",
    );
    let host = tempfile::tempdir().unwrap();
    let source = host.path().join("tree");
    std::fs::create_dir(&source).unwrap();
    std::fs::write(source.join("file"), "new\n").unwrap();
    upload(fixture, &id, Path::new("."), &source).unwrap();
    assert_eq!(
        stdout_of(fixture, &id, "cat tree/file tree/other"),
        "new\nkept\n"
    );
}

pub(crate) fn a_transfer_beyond_its_bounds_is_refused(fixture: &dyn BackendFixture) {
    let id = create(fixture);
    stdout_of(
        fixture,
        &id,
        "mkdir tree && head -c 2000 /dev/zero > tree/a && echo > tree/b",
    );
    let host = tempfile::tempdir().unwrap();
    let source = host.path().join("tree");
    download(fixture, &id, Path::new("tree"), host.path()).unwrap();
    for (bytes, entries) in [(1999, 100), (1 << 20, 2)] {
        let bounds = TransferBounds { bytes, entries };
        let mut archive = Vec::new();
        pack(&source, &mut archive, &mut |_| {}).unwrap();
        let up = fixture
            .backend()
            .upload(&id, Path::new("new"), &mut archive.as_slice(), &bounds);
        let down = fixture
            .backend()
            .download(&id, Path::new("tree"), &mut Vec::new(), &bounds);
        for result in [up, down] {
            assert!(
                matches!(
                    result,
                    Err(SandboxError::Transfer(
                        TransferError::TooLarge(1999) | TransferError::TooMany(2)
                    ))
                ),
                "{result:?}"
            );
        }
    }
    assert_eq!(stdout_of(fixture, &id, "ls -A"), "tree\n");
}

pub(crate) fn truncated_archive_changes_nothing(fixture: &dyn BackendFixture) {
    let id = create(fixture);
    let host = tempfile::tempdir().unwrap();
    std::fs::write(host.path().join("a"), vec![1; 5000]).unwrap();
    let mut archive = Vec::new();
    pack(&host.path().join("a"), &mut archive, &mut |_| {}).unwrap();
    for length in [0, 100, 512, 3000, 5632] {
        let archive = archive.as_slice();
        let error = fixture
            .backend()
            .upload(
                &id,
                Path::new("."),
                &mut archive.take(length),
                &LARGE_BOUNDS,
            )
            .unwrap_err();
        assert!(
            matches!(error, SandboxError::Transfer(TransferError::Malformed(_))),
            "{length}: {error}"
        );
    }
    assert_eq!(stdout_of(fixture, &id, "ls -A"), "");
}

pub(crate) fn a_duplicate_is_a_clear_error_and_leaves_no_partial_state(
    fixture: &dyn BackendFixture,
) {
    let id = create(fixture);
    stdout_of(fixture, &id, "echo mine > file");
    let before = fixture.traces();
    let mut again = config("one");
    again.environment = vec![("WHO".to_owned(), "the second".to_owned())];
    let error = fixture.backend().create(&again).unwrap_err();
    assert_eq!(error.to_string(), "Sandbox 'one' already exists.");
    assert_eq!(fixture.traces(), before);
    assert_eq!(fixture.backend().status(&id), SandboxStatus::Active);
    assert_eq!(stdout_of(fixture, &id, "cat file; echo $WHO"), "mine\n\n");
    // Also for a paused sandbox, and the first one can still be deleted.
    fixture.backend().pause(&id).unwrap();
    let error = fixture.backend().create(&again).unwrap_err();
    assert!(matches!(error, SandboxError::Exists(_)), "{error}");
    assert_eq!(fixture.backend().status(&id), SandboxStatus::Paused);
    fixture.backend().delete(&id, Force::No).unwrap();
}

pub(crate) fn an_invalid_name_is_refused_before_the_backend_is_touched(
    fixture: &dyn BackendFixture,
) {
    let before = fixture.traces();
    for name in ["", "---", "…", &"x".repeat(64)] {
        let error = SandboxError::from(Slug::from_name(name).unwrap_err());
        let start = format!("Invalid sandbox name: '{name}'. ");
        assert!(error.to_string().starts_with(&start), "{error}");
    }
    // A record or a request cannot contain such a name either.
    let whole = serde_json::to_value(config("one")).unwrap();
    for (field, value) in [
        ("name", "../up"),
        ("name", "Upper"),
        ("name", ""),
        ("id", "../up"),
        ("id", ""),
        ("id", "a/b"),
    ] {
        let mut bad = whole.clone();
        let fields = bad.as_object_mut().unwrap();
        fields.insert(field.to_owned(), value.into());
        let read = serde_json::from_value::<SandboxConfig>(bad);
        assert!(read.is_err(), "{field}: {value}");
    }
    assert_eq!(fixture.traces(), before);
}

pub(crate) fn unavailable_backend_is_an_error_and_leaves_nothing(fixture: &dyn BackendFixture) {
    let before = fixture.traces();
    let backend = fixture.unavailable();
    let config = config("one");
    let error = backend.create(&config).unwrap_err();
    assert!(matches!(error, SandboxError::Unavailable { .. }), "{error}");
    assert!(error.to_string().contains("is not available: "), "{error}");
    assert_eq!(backend.status(&config.id), SandboxStatus::Missing);
    assert_eq!(fixture.traces(), before);
}

pub(crate) fn listeners_are_the_same_at_every_call(fixture: &dyn BackendFixture) {
    let id = create(fixture);
    let query_listeners = || -> Vec<_> {
        let all = fixture.backend().listeners(&id).unwrap();
        all.iter().map(|one| (one.transport, one.address)).collect()
    };
    let first = query_listeners();
    assert_eq!(query_listeners(), first);
    for port in GatePorts::default().tcp {
        assert!(
            first.iter().any(|(_, address)| address.port() == port),
            "{port}: {first:?}"
        );
    }
}

fn config(name: &str) -> SandboxConfig {
    SandboxConfig {
        id: SandboxId::parse(name).unwrap(),
        name: Slug::from_name(name).unwrap(),
        environment: Vec::new(),
        ports: GatePorts::default(),
        limits: SandboxLimits::default(),
        system: SystemConfig::default(),
        trust: None,
        setup_command: None,
    }
}

fn create(fixture: &dyn BackendFixture) -> SandboxId {
    let config = config("one");
    fixture.backend().create(&config).unwrap();
    config.id
}

fn shell(fixture: &dyn BackendFixture, id: &SandboxId, line: &str) -> ExecutionResult {
    fixture
        .backend()
        .exec(id, &SandboxCommand::shell(line))
        .unwrap()
}

fn stdout_of(fixture: &dyn BackendFixture, id: &SandboxId, line: &str) -> String {
    let result = shell(fixture, id, line);
    assert_eq!(
        (result.exit_code, text(&result.stderr)),
        (0, String::new()),
        "{line}"
    );
    text(&result.stdout)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Uploads a tree and returns the number of files.
fn upload(
    fixture: &dyn BackendFixture,
    id: &SandboxId,
    to: &Path,
    source: &Path,
) -> Result<u64, SandboxError> {
    let mut archive = Vec::new();
    pack(source, &mut archive, &mut |_| {})?;
    let moved = fixture
        .backend()
        .upload(id, to, &mut archive.as_slice(), &LARGE_BOUNDS)?;
    assert_eq!(moved.left_out, [""; 0]);
    Ok(moved.files)
}

/// Downloads a tree and returns the number of files.
fn download(
    fixture: &dyn BackendFixture,
    id: &SandboxId,
    from: &Path,
    target: &Path,
) -> Result<u64, SandboxError> {
    let mut archive = Vec::new();
    let moved = fixture
        .backend()
        .download(id, from, &mut archive, &LARGE_BOUNDS)?;
    let arrived = unpack(
        &mut archive.as_slice(),
        target,
        &LARGE_BOUNDS,
        &UnpackRules::FOR_HOST,
    )?;
    assert_eq!(moved, arrived);
    Ok(moved.files)
}

/// A comparable form of a tree: for each path its mode, and its content or link.
fn read_tree(root: &Path) -> BTreeMap<Vec<u8>, (u32, Vec<u8>)> {
    let mut seen = BTreeMap::new();
    let mut places = vec![root.to_owned()];
    while let Some(place) = places.pop() {
        for entry in std::fs::read_dir(place).unwrap() {
            let path = entry.unwrap().path();
            let data = path.symlink_metadata().unwrap();
            let content = if data.is_symlink() {
                std::fs::read_link(&path)
                    .unwrap()
                    .into_os_string()
                    .into_vec()
            } else if data.is_dir() {
                places.push(path.clone());
                Vec::new()
            } else {
                std::fs::read(&path).unwrap()
            };
            let name = path.strip_prefix(root).unwrap().as_os_str().as_bytes();
            seen.insert(name.to_vec(), (data.permissions().mode(), content));
        }
    }
    seen
}

fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    while !condition() {
        assert!(
            std::time::Instant::now() < deadline,
            "timed out waiting for {what}"
        );
        let _ = nix::poll::poll(&mut [], 5_u8);
    }
}
