//! Test probe that runs inside a sandbox: it tries what an agent might try and prints the results.

#![allow(
    unsafe_code,
    reason = "system calls are made as an attacker would make them"
)]

use std::io::{Error, Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};

fn main() {
    // The path of this program, which is skipped, need not be UTF-8.
    let words = std::env::args_os().skip(1);
    let words: Vec<String> = words.filter_map(|word| word.into_string().ok()).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["forbidden"] => forbidden(),
        ["connect", address] => println!(
            "{}",
            connect_and_read(address).unwrap_or_else(|e| e.to_string())
        ),
        ["query", address] => println!("{}", query(address).unwrap_or_else(|e| e.to_string())),
        ["serve", address] => println!("{}", serve(address).unwrap_or_else(|e| e.to_string())),
        ["echo", address] => echo(address).unwrap_or_else(|e| println!("{e}")),
        ["listen-without-accept", address] => {
            listen_without_accept(address).unwrap_or_else(|e| println!("{e}"));
        }
        ["reach", path] => println!("{}", describe(UnixStream::connect(path).map(drop))),
        ["reach-own", path] => println!("{}", describe(reach_own(path))),
        ["reach-abstract", name] => println!("{}", describe(abstract_socket(name, false))),
        ["listen-abstract", name] => println!("{}", describe(abstract_socket(name, true))),
        ["accept", address] => println!("{}", describe(accept(address))),
        ["send", address] => println!("{}", describe(send(address))),
        ["fork", count] => println!("{}", fork_repeatedly(count.parse().unwrap_or(0))),
        ["allocate", megabytes] => println!("{}", allocate(megabytes.parse().unwrap_or(0))),
        ["fill-deleted-file", path] => println!("{}", describe(fill_deleted_file(path, true))),
        ["fill-deleted-file-undumpable", path] => {
            println!("{}", describe(fill_deleted_file(path, false)));
        }
        ["connect-and-spawn", address, rest @ ..] => {
            println!("{}", describe(connect_and_spawn(address, rest)));
        }
        ["connect-and-exec", address, rest @ ..] => {
            println!("{}", describe(connect_and_exec(address, rest)));
        }
        ["connect-in-thread", address] => println!("{}", describe(connect_in_thread(address))),
        ["connect-with-many-descriptors", address, count] => {
            println!(
                "{}",
                describe(connect_with_many_descriptors(
                    address,
                    count.parse().unwrap_or(0)
                ))
            );
        }
        ["wait"] => wait(),
        _ => println!("unknown command"),
    }
}

fn describe(result: std::io::Result<()>) -> String {
    errno(result.map_or_else(|error| error.raw_os_error().unwrap_or(libc::EIO), |()| 0))
}

/// Listens on a Unix socket and connects to it.
fn reach_own(path: &str) -> std::io::Result<()> {
    let _listener = UnixListener::bind(path)?;
    UnixStream::connect(path).map(drop)
}

/// Connects to an abstract socket or, with `keep`, listens on it until killed.
fn abstract_socket(name: &str, keep: bool) -> std::io::Result<()> {
    let address = SocketAddr::from_abstract_name(name)?;
    if !keep {
        return UnixStream::connect_addr(&address).map(drop);
    }
    let listener = UnixListener::bind_addr(&address)?;
    println!("listening");
    loop {
        listener.accept()?;
    }
}

/// Accepts one connection.
fn accept(address: &str) -> std::io::Result<()> {
    let listener = TcpListener::bind(address)?;
    println!("listening");
    listener.accept().map(drop)
}

/// Sends a datagram and expects no answer.
fn send(address: &str) -> std::io::Result<()> {
    let any = if address.starts_with('[') {
        "[::]:0"
    } else {
        "0.0.0.0:0"
    };
    UdpSocket::bind(any)?.send_to(b"out", address).map(drop)
}

/// Connects and reads until the peer closes.
fn connect_and_read(address: &str) -> std::io::Result<String> {
    let mut text = String::new();
    TcpStream::connect(address)?.read_to_string(&mut text)?;
    Ok(text)
}

/// Sends a query and waits for an answer from the queried address.
fn query(address: &str) -> std::io::Result<String> {
    let any = if address.starts_with('[') {
        "[::]:0"
    } else {
        "0.0.0.0:0"
    };
    let socket = UdpSocket::bind(any)?;
    socket.set_read_timeout(Some(std::time::Duration::from_secs(5)))?;
    // Connected: the kernel drops answers from any other address.
    socket.connect(address)?;
    socket.send(b"query")?;
    let mut answer = [0; 512];
    let length = socket.recv(&mut answer)?;
    Ok(String::from_utf8_lossy(answer.get(..length).unwrap_or_default()).into_owned())
}

/// Listens and connects to itself.
fn serve(address: &str) -> std::io::Result<String> {
    let listener = TcpListener::bind(address)?;
    let mut client = TcpStream::connect(address)?;
    listener.accept()?.0.write_all(b"own")?;
    let mut text = [0; 3];
    client.read_exact(&mut text)?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// Echoes one client's data.
fn echo(address: &str) -> std::io::Result<()> {
    let (mut stream, _) = TcpListener::bind(address)?.accept()?;
    let mut text = Vec::new();
    stream.read_to_end(&mut text)?;
    stream.write_all(&text)
}

/// Listens with the shortest backlog and accepts no connection.
fn listen_without_accept(address: &str) -> std::io::Result<()> {
    let listener = TcpListener::bind(address)?;
    // SAFETY: shortens the queue of a socket that outlives the call.
    unsafe { libc::listen(std::os::fd::AsRawFd::as_raw_fd(&listener), 0) };
    loop {
        std::thread::park();
    }
}

/// Forks until it fails; prints the number of forks.
fn fork_repeatedly(max_forks: u32) -> u32 {
    let mut children = 0;
    for _ in 0..max_forks {
        // SAFETY: the child only waits to be killed.
        match unsafe { libc::fork() } {
            -1 => break,
            0 => loop {
                // SAFETY: waits for a signal; no memory is involved.
                unsafe { libc::pause() };
            },
            _ => children += 1,
        }
    }
    children
}

/// Allocates and touches memory; prints the number of megabytes.
fn allocate(megabytes: usize) -> usize {
    let mut blocks = Vec::new();
    for _ in 0..megabytes {
        let mut block_bytes: Vec<u8> = Vec::new();
        if block_bytes.try_reserve_exact(1 << 20).is_err() {
            break;
        }
        block_bytes.resize(1 << 20, 7);
        blocks.push(block_bytes);
    }
    blocks.len()
}

/// Writes to a deleted file that only one thread has open, as a dumpable or undumpable process.
fn fill_deleted_file(path: &str, dumpable: bool) -> std::io::Result<()> {
    let dumpable = libc::c_int::from(dumpable);
    // SAFETY: takes no pointers.
    unsafe { libc::prctl(libc::PR_SET_DUMPABLE, dumpable, 0, 0, 0) };
    let path = path.to_owned();
    let thread = std::thread::spawn(move || {
        // SAFETY: takes no pointers; the thread gets its own descriptor table.
        unsafe { libc::unshare(libc::CLONE_FILES) };
        let mut file = std::fs::File::create(&path)?;
        std::fs::remove_file(&path)?;
        for _ in 0..4096 {
            file.write_all(&[1; 65536])?;
        }
        loop {
            std::thread::park();
        }
    });
    thread
        .join()
        .unwrap_or_else(|_| Err(Error::other("the thread panicked")))
}

fn wait() -> ! {
    loop {
        std::thread::park();
    }
}

/// Connects with a socket that is not close-on-exec, so that executed programs inherit it.
fn connect_inheritable(address: &str) -> std::io::Result<TcpStream> {
    let stream = TcpStream::connect(address)?;
    // SAFETY: changes a flag of a descriptor that outlives the call.
    unsafe { libc::fcntl(std::os::fd::AsRawFd::as_raw_fd(&stream), libc::F_SETFD, 0) };
    Ok(stream)
}

fn command(words: &[&str]) -> std::process::Command {
    let mut command = std::process::Command::new(words.first().copied().unwrap_or_default());
    command.args(words.get(1..).unwrap_or_default());
    command
}

/// Connects, and starts another program that holds the connection too.
fn connect_and_spawn(address: &str, other: &[&str]) -> std::io::Result<()> {
    let _stream = connect_inheritable(address)?;
    command(other).spawn()?.wait()?;
    wait()
}

/// Connects, and executes another program.
fn connect_and_exec(address: &str, other: &[&str]) -> std::io::Result<()> {
    let _stream = connect_inheritable(address)?;
    Err(std::os::unix::process::CommandExt::exec(&mut command(
        other,
    )))
}

/// Connects in a thread that has its own descriptor table.
fn connect_in_thread(address: &str) -> std::io::Result<()> {
    let address = address.to_owned();
    let thread = std::thread::spawn(move || {
        // SAFETY: takes no pointers; the thread gets its own descriptor table.
        unsafe { libc::unshare(libc::CLONE_FILES) };
        let _stream = TcpStream::connect(address)?;
        wait()
    });
    thread
        .join()
        .unwrap_or_else(|_| Err(Error::other("the thread panicked")))
}

/// Connects after forking this many processes with a thousand descriptors each.
fn connect_with_many_descriptors(address: &str, thousands: u32) -> std::io::Result<()> {
    let full: Vec<_> = (0..1000)
        .map(|_| std::fs::File::open("/dev/null"))
        .collect::<std::io::Result<_>>()?;
    fork_repeatedly(thousands);
    let _stream = TcpStream::connect(address)?;
    drop(full);
    wait()
}

/// Tries each call and prints `name: the kernel's answer`.
fn forbidden() {
    let call = |name: &str, number: i64, arguments: [i64; 5]| {
        let [a, b, c, d, e] = arguments;
        // SAFETY: pointers among the arguments are null or constants with a NUL.
        let result = unsafe { libc::syscall(number, a, b, c, d, e) };
        let errno_value = match result {
            -1 => Error::last_os_error().raw_os_error().unwrap_or(0),
            _ => 0,
        };
        println!("{name}: {}", errno(errno_value));
    };
    let tmp = c"/tmp".as_ptr() as i64;
    let kind = c"tmpfs".as_ptr() as i64;
    let user = i64::from(libc::CLONE_NEWUSER);
    call("unshare-user", libc::SYS_unshare, [user, 0, 0, 0, 0]);
    let net = i64::from(libc::CLONE_NEWNET);
    call("unshare-net", libc::SYS_unshare, [net, 0, 0, 0, 0]);
    // A flag behind upper bits that the kernel ignores.
    call(
        "unshare-high",
        libc::SYS_unshare,
        [user | 1 << 40, 0, 0, 0, 0],
    );
    call("clone-user", libc::SYS_clone, [user, 0, 0, 0, 0]);
    call("clone3", libc::SYS_clone3, [0, 0, 0, 0, 0]);
    call("mount", libc::SYS_mount, [kind, tmp, kind, 0, 0]);
    call("umount", libc::SYS_umount2, [tmp, 0, 0, 0, 0]);
    call("setns", libc::SYS_setns, [0, 0, 0, 0, 0]);
    call("chroot", libc::SYS_chroot, [tmp, 0, 0, 0, 0]);
    call("io-uring", libc::SYS_io_uring_setup, [1, 0, 0, 0, 0]);
    call("keyctl", libc::SYS_keyctl, [0, 0, 0, 0, 0]);
    call("add-key", libc::SYS_add_key, [0, 0, 0, 0, 0]);
    call("bpf", libc::SYS_bpf, [0, 0, 0, 0, 0]);
    call("perf", libc::SYS_perf_event_open, [0, 0, 0, 0, 0]);
    call("userfaultfd", libc::SYS_userfaultfd, [0, 0, 0, 0, 0]);
    call("by-handle", libc::SYS_open_by_handle_at, [0, 0, 0, 0, 0]);
    #[cfg(target_arch = "x86_64")]
    call(
        "x32-mount",
        0x4000_0000 | libc::SYS_mount,
        [kind, tmp, kind, 0, 0],
    );
    let (stream, raw) = (libc::SOCK_STREAM, libc::SOCK_RAW);
    for (name, family, kind, protocol) in [
        ("vsock", libc::AF_VSOCK, stream, 0),
        ("packet", libc::AF_PACKET, raw, 0),
        ("alg", libc::AF_ALG, libc::SOCK_SEQPACKET, 0),
        ("raw", libc::AF_INET, raw, libc::IPPROTO_ICMP),
        ("raw6", libc::AF_INET6, raw, libc::IPPROTO_ICMPV6),
        ("bluetooth", libc::AF_BLUETOOTH, raw, 1),
        ("xdp", libc::AF_XDP, raw, 0),
        ("netlink-audit", libc::AF_NETLINK, raw, libc::NETLINK_AUDIT),
        ("netlink-route", libc::AF_NETLINK, raw, libc::NETLINK_ROUTE),
        ("inet", libc::AF_INET, stream, 0),
    ] {
        let arguments = [family.into(), kind.into(), protocol.into(), 0, 0];
        call(name, libc::SYS_socket, arguments);
    }
    let byte = b"x".as_ptr() as i64;
    let sti = libc::TIOCSTI.cast_signed();
    call("tiocsti", libc::SYS_ioctl, [0, sti, byte, 0, 0]);
    call(
        "tiocsti-high",
        libc::SYS_ioctl,
        [0, sti | 1 << 40, byte, 0, 0],
    );
    call("tioclinux", libc::SYS_ioctl, [0, 0x541c, byte, 0, 0]);
    call("ptrace-init", libc::SYS_ptrace, [16, 1, 0, 0, 0]);
    let read = libc::SYS_process_vm_readv;
    let mut word = [0_u8; 8];
    let part = libc::iovec {
        iov_base: word.as_mut_ptr().cast(),
        iov_len: word.len(),
    };
    let part = (&raw const part) as i64;
    call("process-vm-init", read, [1, part, 1, part, 1]);
    // SAFETY: takes no pointers; returns a new descriptor or -1.
    let init = unsafe { libc::syscall(libc::SYS_pidfd_open, 1, 0) };
    call(
        "pidfd-getfd-init",
        libc::SYS_pidfd_getfd,
        [init, 3, 0, 0, 0],
    );
    let disk = c"/tmp/disk".as_ptr() as i64;
    let block = i64::from(libc::S_IFBLK | 0o600);
    let here = i64::from(libc::AT_FDCWD);
    call(
        "mknod-block",
        libc::SYS_mknodat,
        [here, disk, block, 8 << 8, 0],
    );
    call("pivot-root", libc::SYS_pivot_root, [tmp, tmp, 0, 0, 0]);
    call("open-tree", libc::SYS_open_tree, [here, tmp, 1, 0, 0]);
    call("fsopen", libc::SYS_fsopen, [kind, 0, 0, 0, 0]);
    call("syslog", libc::SYS_syslog, [2, 0, 0, 0, 0]);
    call("reboot", libc::SYS_reboot, [0, 0, 0, 0, 0]);
    call("settime", libc::SYS_clock_settime, [0, part, 0, 0, 0]);
    call("sethostname", libc::SYS_sethostname, [tmp, 4, 0, 0, 0]);
    call("swapon", libc::SYS_swapon, [tmp, 0, 0, 0, 0]);
    call("quotactl", libc::SYS_quotactl, [0, tmp, 0, 0, 0]);
    call("fanotify", libc::SYS_fanotify_init, [0, 0, 0, 0, 0]);
    call("prlimit-init", libc::SYS_prlimit64, [1, 0, 0, 0, 0]);
    let cpu = i64::from(libc::RLIMIT_CPU);
    let most = [libc::RLIM_INFINITY; 2];
    let most = (&raw const most) as i64;
    // SAFETY: takes no pointers.
    let parent = i64::from(unsafe { libc::getppid() });
    let limit = libc::SYS_prlimit64;
    call("prlimit-other", limit, [parent, cpu, most, 0, 0]);
    call(
        "prlimit-other-high",
        limit,
        [parent | 1 << 40, cpu, most, 0, 0],
    );
    call("prlimit-own", limit, [0, cpu, most, 0, 0]);
    let mut now = std::mem::MaybeUninit::<libc::timex>::zeroed();
    let now = now.as_mut_ptr() as i64;
    call("adjtime", libc::SYS_clock_adjtime, [0, now, 0, 0, 0]);
    let parameters = libc::sched_param { sched_priority: 0 };
    let parameters = &raw const parameters as i64;
    let batch = i64::from(libc::SCHED_BATCH);
    call(
        "sched-setscheduler",
        libc::SYS_sched_setscheduler,
        [0, batch, parameters, 0, 0],
    );
    call(
        "sched-setparam",
        libc::SYS_sched_setparam,
        [0, parameters, 0, 0, 0],
    );
    // SAFETY: all-zero is a valid `sched_attr`.
    let attributes: libc::sched_attr = unsafe { std::mem::zeroed() };
    let attributes = &raw const attributes as i64;
    call(
        "sched-setattr",
        libc::SYS_sched_setattr,
        [0, attributes, 0, 0, 0],
    );
    call("kill-init", libc::SYS_kill, [1, 0, 0, 0, 0]);
    for path in [
        "/proc/sys/kernel/core_pattern",
        "/proc/sys/kernel/hostname",
        "/proc/sys/net/ipv4/ip_forward",
        "/proc/sysrq-trigger",
        "/proc/1/mem",
        "/proc/1/environ",
        "/proc/1/oom_score_adj",
        "/proc/self/uid_map",
        "/proc/self/setgroups",
        "/dev/mem",
        "/dev/kmsg",
    ] {
        let opened = std::fs::OpenOptions::new().write(true).open(path);
        let errno_value = match opened {
            Ok(mut file) => file.write(b"x").err(),
            Err(error) => Some(error),
        };
        let errno_value = errno_value.map_or(0, |error| error.raw_os_error().unwrap_or(0));
        println!("{path}: {}", errno(errno_value));
    }
}

fn errno(number: i32) -> String {
    match number {
        0 => "done".to_owned(),
        number => format!("{:?}", nix::errno::Errno::from_raw(number)),
    }
}
