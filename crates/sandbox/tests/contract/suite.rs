//! What every backend promises, said once.
//!
//! A backend's own tests include this file, implement [`Bench`] for what differs, and say
//! `contract!(a new bench)` in a module: that is one test for each sentence.

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

/// A place to try one backend; gone with the test, with every sandbox in it.
pub(crate) trait Bench {
    /// The backend.
    fn backend(&self) -> &dyn SandboxBackend;

    /// The same kind of backend where something that it needs is missing.
    fn unavailable(&self) -> Box<dyn SandboxBackend>;

    /// What there is of sandboxes outside of them: directories, containers, cgroups.
    fn traces(&self) -> Vec<String>;
}

/// One test for each sentence of the contract.
macro_rules! contract {
    ($bench:expr) => {
        crate::suite::contract! { @each $bench;
            a_created_sandbox_is_active_and_has_its_names
            pause_and_resume_are_idempotent
            a_paused_sandbox_keeps_its_files_and_runs_nothing
            an_idle_sandbox_is_deleted_without_force
            a_sandbox_in_which_a_command_runs_is_deleted_by_force_only
            a_failed_set_up_command_is_reported_with_its_last_lines
            deleting_twice_is_a_clear_not_found
            a_deleted_sandbox_leaves_no_trace_and_its_id_is_free
            what_nobody_has_is_not_found_whatever_is_asked
            a_command_returns_its_code_and_its_outputs_apart
            input_environment_and_directory_reach_a_command
            a_command_that_takes_too_long_is_killed
            a_program_that_is_not_there_is_named
            bytes_paths_modes_and_links_survive_the_way_in_and_out
            a_single_file_goes_in_and_out
            an_upload_replaces_files_and_keeps_what_it_does_not_name
            a_transfer_beyond_its_bounds_is_refused
            half_an_archive_changes_nothing
            a_duplicate_is_a_clear_error_and_leaves_no_partial_state
            an_invalid_name_is_refused_before_the_backend_is_touched
            a_backend_that_is_not_available_says_so_and_leaves_nothing
            listeners_are_the_same_for_whoever_asks_again
        }
    };
    (@each $bench:expr; $($sentence:ident)*) => {
        $(
            #[test]
            fn $sentence() {
                crate::suite::$sentence(&$bench);
            }
        )*
    };
}
pub(crate) use contract;

const ROOMY: TransferBounds = TransferBounds {
    bytes: 16 << 20,
    entries: 1000,
};

/// Leaves `sleep` running, and ends when it is that.
const SLEEPER: &str = "sleep 4000 >/dev/null 2>&1 & \
                       until grep -qx sleep /proc/[0-9]*/comm 2>/dev/null; do :; done";

pub(crate) fn a_created_sandbox_is_active_and_has_its_names(bench: &dyn Bench) {
    let config = config("first");
    let made = bench.backend().create(&config).unwrap();
    assert_eq!(made.name, config.name);
    assert_eq!(made.branch_name, "palisade/first");
    assert!(!made.container_id.is_empty());
    assert_eq!(made.status, SandboxStatus::Active);
    assert_eq!(bench.backend().status(&config.id), SandboxStatus::Active);
}

pub(crate) fn pause_and_resume_are_idempotent(bench: &dyn Bench) {
    let id = create(bench);
    let backend = bench.backend();
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
    assert_eq!(says(bench, &id, "echo on"), "on\n");
}

pub(crate) fn a_paused_sandbox_keeps_its_files_and_runs_nothing(bench: &dyn Bench) {
    let id = create(bench);
    says(bench, &id, "echo kept > file");
    bench.backend().pause(&id).unwrap();
    let error = bench
        .backend()
        .exec(&id, &SandboxCommand::shell("true"))
        .unwrap_err();
    assert!(matches!(error, SandboxError::Paused(_)), "{error}");
    bench.backend().resume(&id).unwrap();
    assert_eq!(says(bench, &id, "cat file"), "kept\n");
}

pub(crate) fn an_idle_sandbox_is_deleted_without_force(bench: &dyn Bench) {
    for paused in [false, true] {
        let id = create(bench);
        assert_eq!(says(bench, &id, "echo here"), "here\n");
        if paused {
            bench.backend().pause(&id).unwrap();
        }
        bench.backend().delete(&id, Force::No).unwrap();
        assert_eq!(bench.backend().status(&id), SandboxStatus::Missing);
    }
}

pub(crate) fn a_sandbox_in_which_a_command_runs_is_deleted_by_force_only(bench: &dyn Bench) {
    let id = create(bench);
    says(bench, &id, SLEEPER);
    let error = bench.backend().delete(&id, Force::No).unwrap_err();
    assert!(
        matches!(&error, SandboxError::Busy { name, what }
            if name.as_str() == "one" && what == "sleep is running"),
        "{error}"
    );
    assert_eq!(says(bench, &id, "echo here"), "here\n");
    // One that stands still runs nothing.
    bench.backend().pause(&id).unwrap();
    bench.backend().delete(&id, Force::No).unwrap();
    assert_eq!(bench.backend().status(&id), SandboxStatus::Missing);
    let id = create(bench);
    says(bench, &id, SLEEPER);
    bench.backend().delete(&id, Force::Yes).unwrap();
    assert_eq!(bench.backend().status(&id), SandboxStatus::Missing);
}

pub(crate) fn a_failed_set_up_command_is_reported_with_its_last_lines(bench: &dyn Bench) {
    let id = create(bench);
    let run = |line: &str, timeout| {
        let command = ["sh", "-c", line].map(str::to_owned);
        setup::run(bench.backend(), &id, &command, timeout)
    };
    run("echo well > set-up", Duration::from_secs(60)).unwrap();
    assert_eq!(says(bench, &id, "cat set-up"), "well\n");
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

pub(crate) fn deleting_twice_is_a_clear_not_found(bench: &dyn Bench) {
    let id = create(bench);
    bench.backend().delete(&id, Force::Yes).unwrap();
    for force in [Force::No, Force::Yes] {
        let error = bench.backend().delete(&id, force).unwrap_err();
        assert_eq!(error.to_string(), format!("Sandbox '{id}' not found."));
    }
}

pub(crate) fn a_deleted_sandbox_leaves_no_trace_and_its_id_is_free(bench: &dyn Bench) {
    let before = bench.traces();
    let id = create(bench);
    assert_ne!(bench.traces(), before);
    says(
        bench,
        &id,
        "echo x > file; mkdir closed; chmod 0 closed; ln -s / root",
    );
    says(bench, &id, "sleep 4000 >/dev/null 2>&1 &");
    bench.backend().delete(&id, Force::Yes).unwrap();
    assert_eq!(bench.traces(), before);
    assert_eq!(create(bench), id);
    assert_eq!(says(bench, &id, "ls -A"), "");
}

pub(crate) fn what_nobody_has_is_not_found_whatever_is_asked(bench: &dyn Bench) {
    let backend = bench.backend();
    let id = config("nobody").id;
    let before = bench.traces();
    assert_eq!(backend.status(&id), SandboxStatus::Missing);
    let answers = [
        backend.pause(&id).err(),
        backend.resume(&id).err(),
        backend.delete(&id, Force::No).err(),
        backend.delete(&id, Force::Yes).err(),
        backend.exec(&id, &SandboxCommand::shell("true")).err(),
        backend.listeners(&id).err(),
        backend
            .upload(&id, Path::new("."), &mut &[0; 1024][..], &ROOMY)
            .err(),
        backend
            .download(&id, Path::new("."), &mut Vec::new(), &ROOMY)
            .err(),
    ];
    for (place, answer) in answers.into_iter().enumerate() {
        let said = answer.map(|error| error.to_string());
        let wanted = "Sandbox 'nobody' not found.";
        assert_eq!(said.as_deref(), Some(wanted), "{place}");
    }
    assert_eq!(bench.traces(), before);
}

pub(crate) fn a_command_returns_its_code_and_its_outputs_apart(bench: &dyn Bench) {
    let id = create(bench);
    for code in [0, 1, 7, 255] {
        let line = format!("printf out; printf err >&2; exit {code}");
        let result = shell(bench, &id, &line);
        assert_eq!(
            (result.exit_code, text(&result.stdout), text(&result.stderr)),
            (code, "out".to_owned(), "err".to_owned())
        );
    }
    assert_eq!(shell(bench, &id, "kill -9 $$").exit_code, 137);
    let result = shell(bench, &id, "printf '\\000\\377\\n'");
    assert_eq!(result.stdout, [0, 255, b'\n']);
}

pub(crate) fn input_environment_and_directory_reach_a_command(bench: &dyn Bench) {
    let id = create(bench);
    let mut command = SandboxCommand::shell("cat; echo $WORD; pwd");
    command.stdin = b"fed\n".to_vec();
    command.environment = vec![("WORD".into(), "said".into())];
    command.directory = Some("/tmp".into());
    let result = bench.backend().exec(&id, &command).unwrap();
    assert_eq!(text(&result.stdout), "fed\nsaid\n/tmp\n");
    assert_eq!(says(bench, &id, "pwd"), "/workspace\n");
}

pub(crate) fn a_command_that_takes_too_long_is_killed(bench: &dyn Bench) {
    let id = create(bench);
    let mut command = SandboxCommand::shell("sleep 3000; echo late > /tmp/late");
    command.timeout = Some(Duration::from_millis(200));
    let error = bench.backend().exec(&id, &command).unwrap_err();
    assert!(matches!(error, SandboxError::TimedOut { .. }), "{error}");
    until("the end of the sleeper", || {
        let line = "cat /proc/[0-9]*/comm 2>/dev/null | grep -c sleep || true";
        says(bench, &id, line) == "0\n"
    });
}

pub(crate) fn a_program_that_is_not_there_is_named(bench: &dyn Bench) {
    let id = create(bench);
    let error = bench
        .backend()
        .exec(&id, &SandboxCommand::new(["no-such-program", "x"]))
        .unwrap_err();
    assert!(matches!(error, SandboxError::Start { .. }), "{error}");
    assert!(error.to_string().contains("'no-such-program'"), "{error}");
}

pub(crate) fn bytes_paths_modes_and_links_survive_the_way_in_and_out(bench: &dyn Bench) {
    let id = create(bench);
    let host = tempfile::tempdir().unwrap();
    let source = host.path().join("tree");
    let odd = OsStr::from_bytes(b"odd \xff\n name");
    let long = "long-name/".repeat(20);
    std::fs::create_dir_all(source.join(&long)).unwrap();
    std::fs::create_dir(source.join(odd)).unwrap();
    std::fs::create_dir(source.join("empty")).unwrap();
    let all: Vec<u8> = (0..=255).cycle().take(300_000).collect();
    for (path, mode) in [
        (PathBuf::from("plain"), 0o644),
        (PathBuf::from("tool"), 0o755),
        (PathBuf::from("secret"), 0o600),
        (PathBuf::from("fixed"), 0o400),
        (Path::new(odd).join(odd), 0o644),
        (Path::new(&long).join("file"), 0o644),
    ] {
        std::fs::write(source.join(&path), &all).unwrap();
        std::fs::set_permissions(source.join(path), PermissionsExt::from_mode(mode)).unwrap();
    }
    std::fs::write(source.join("nothing"), "").unwrap();
    symlink("plain", source.join("link")).unwrap();
    symlink("../plain", source.join("empty/up")).unwrap();
    symlink("nowhere", source.join("dangling")).unwrap();

    let up = upload(bench, &id, Path::new("deep/er"), &source).unwrap();
    let line = "cd deep/er/tree && test -x tool -a ! -x plain && cmp plain tool && \
                readlink link empty/up dangling && stat -c %a tool secret fixed";
    assert_eq!(
        says(bench, &id, line),
        "plain\n../plain\nnowhere\n755\n600\n400\n"
    );
    let back = host.path().join("back");
    let down = download(bench, &id, Path::new("/workspace/deep/er/tree"), &back).unwrap();
    assert_eq!((up, down), (10, 10));
    assert_eq!(look(&back.join("tree")), look(&source));
}

pub(crate) fn a_single_file_goes_in_and_out(bench: &dyn Bench) {
    let id = create(bench);
    let host = tempfile::tempdir().unwrap();
    let file = host.path().join("file");
    std::fs::write(&file, "content").unwrap();
    upload(bench, &id, Path::new("/tmp/place"), &file).unwrap();
    assert_eq!(says(bench, &id, "cat /tmp/place/file"), "content");
    let back = host.path().join("back");
    download(bench, &id, Path::new("/tmp/place/file"), &back).unwrap();
    assert_eq!(std::fs::read(back.join("file")).unwrap(), b"content");
    let error = download(bench, &id, Path::new("/tmp/nothing"), &back).unwrap_err();
    assert!(
        matches!(error, SandboxError::Transfer(TransferError::Missing(_))),
        "{error}"
    );
}

pub(crate) fn an_upload_replaces_files_and_keeps_what_it_does_not_name(bench: &dyn Bench) {
    let id = create(bench);
    says(
        bench,
        &id,
        "mkdir tree && echo old > tree/file && echo kept > tree/other",
    );
    let host = tempfile::tempdir().unwrap();
    let source = host.path().join("tree");
    std::fs::create_dir(&source).unwrap();
    std::fs::write(source.join("file"), "new\n").unwrap();
    upload(bench, &id, Path::new("."), &source).unwrap();
    assert_eq!(says(bench, &id, "cat tree/file tree/other"), "new\nkept\n");
}

pub(crate) fn a_transfer_beyond_its_bounds_is_refused(bench: &dyn Bench) {
    let id = create(bench);
    says(
        bench,
        &id,
        "mkdir tree && head -c 2000 /dev/zero > tree/a && echo > tree/b",
    );
    let host = tempfile::tempdir().unwrap();
    let source = host.path().join("tree");
    download(bench, &id, Path::new("tree"), host.path()).unwrap();
    for (bytes, entries) in [(1999, 100), (1 << 20, 2)] {
        let bounds = TransferBounds { bytes, entries };
        let mut archive = Vec::new();
        pack(&source, &mut archive, &mut |_| {}).unwrap();
        let up = bench
            .backend()
            .upload(&id, Path::new("new"), &mut archive.as_slice(), &bounds);
        let down = bench
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
    assert_eq!(says(bench, &id, "ls -A"), "tree\n");
}

pub(crate) fn half_an_archive_changes_nothing(bench: &dyn Bench) {
    let id = create(bench);
    let host = tempfile::tempdir().unwrap();
    std::fs::write(host.path().join("a"), vec![1; 5000]).unwrap();
    let mut archive = Vec::new();
    pack(&host.path().join("a"), &mut archive, &mut |_| {}).unwrap();
    for length in [0, 100, 512, 3000, 5632] {
        let archive = archive.as_slice();
        let error = bench
            .backend()
            .upload(&id, Path::new("."), &mut archive.take(length), &ROOMY)
            .unwrap_err();
        assert!(
            matches!(error, SandboxError::Transfer(TransferError::Malformed(_))),
            "{length}: {error}"
        );
    }
    assert_eq!(says(bench, &id, "ls -A"), "");
}

pub(crate) fn a_duplicate_is_a_clear_error_and_leaves_no_partial_state(bench: &dyn Bench) {
    let id = create(bench);
    says(bench, &id, "echo mine > file");
    let before = bench.traces();
    let mut again = config("one");
    again.environment = vec![("WHO".to_owned(), "the second".to_owned())];
    let error = bench.backend().create(&again).unwrap_err();
    assert_eq!(error.to_string(), "Sandbox 'one' already exists.");
    assert_eq!(bench.traces(), before);
    assert_eq!(bench.backend().status(&id), SandboxStatus::Active);
    assert_eq!(says(bench, &id, "cat file; echo $WHO"), "mine\n\n");
    // Nor for one that is paused, and whoever was there can still go.
    bench.backend().pause(&id).unwrap();
    let error = bench.backend().create(&again).unwrap_err();
    assert!(matches!(error, SandboxError::Exists(_)), "{error}");
    assert_eq!(bench.backend().status(&id), SandboxStatus::Paused);
    bench.backend().delete(&id, Force::No).unwrap();
}

pub(crate) fn an_invalid_name_is_refused_before_the_backend_is_touched(bench: &dyn Bench) {
    let before = bench.traces();
    for name in ["", "---", "…", &"x".repeat(64)] {
        let error = SandboxError::from(Slug::from_name(name).unwrap_err());
        let start = format!("Invalid sandbox name: '{name}'. ");
        assert!(error.to_string().starts_with(&start), "{error}");
    }
    // Nor does one come in by a record or a request: no config holds such a name.
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
    assert_eq!(bench.traces(), before);
}

pub(crate) fn a_backend_that_is_not_available_says_so_and_leaves_nothing(bench: &dyn Bench) {
    let before = bench.traces();
    let backend = bench.unavailable();
    let config = config("one");
    let error = backend.create(&config).unwrap_err();
    assert!(matches!(error, SandboxError::Unavailable { .. }), "{error}");
    assert!(error.to_string().contains("is not available: "), "{error}");
    assert_eq!(backend.status(&config.id), SandboxStatus::Missing);
    assert_eq!(bench.traces(), before);
}

pub(crate) fn listeners_are_the_same_for_whoever_asks_again(bench: &dyn Bench) {
    let id = create(bench);
    let ask = || -> Vec<_> {
        let all = bench.backend().listeners(&id).unwrap();
        all.iter().map(|one| (one.transport, one.address)).collect()
    };
    let first = ask();
    assert_eq!(ask(), first);
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

fn create(bench: &dyn Bench) -> SandboxId {
    let config = config("one");
    bench.backend().create(&config).unwrap();
    config.id
}

fn shell(bench: &dyn Bench, id: &SandboxId, line: &str) -> ExecutionResult {
    bench
        .backend()
        .exec(id, &SandboxCommand::shell(line))
        .unwrap()
}

fn says(bench: &dyn Bench, id: &SandboxId, line: &str) -> String {
    let result = shell(bench, id, line);
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

/// How many files went in.
fn upload(
    bench: &dyn Bench,
    id: &SandboxId,
    to: &Path,
    source: &Path,
) -> Result<u64, SandboxError> {
    let mut archive = Vec::new();
    pack(source, &mut archive, &mut |_| {})?;
    let moved = bench
        .backend()
        .upload(id, to, &mut archive.as_slice(), &ROOMY)?;
    assert_eq!(moved.left_out, [""; 0]);
    Ok(moved.files)
}

/// How many files came out.
fn download(
    bench: &dyn Bench,
    id: &SandboxId,
    from: &Path,
    target: &Path,
) -> Result<u64, SandboxError> {
    let mut archive = Vec::new();
    let moved = bench.backend().download(id, from, &mut archive, &ROOMY)?;
    let arrived = unpack(
        &mut archive.as_slice(),
        target,
        &ROOMY,
        &UnpackRules::FOR_HOST,
    )?;
    assert_eq!(moved, arrived);
    Ok(moved.files)
}

/// A tree as it can be compared: for each path its mode, and its content or link.
fn look(root: &Path) -> BTreeMap<Vec<u8>, (u32, Vec<u8>)> {
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

fn until(what: &str, condition: impl Fn() -> bool) {
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    while !condition() {
        assert!(std::time::Instant::now() < deadline, "never came: {what}");
        let _ = nix::poll::poll(&mut [], 5_u8);
    }
}
