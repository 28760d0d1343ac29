//! Tests of the framing guard alone: accepted and refused messages, in every split.

mod fork;
mod hyper;
mod pipelines;

use super::*;

/// The output and the fault of a connection that delivers `step` bytes at a time.
fn run(bytes: &[u8], step: usize) -> GuardOutput {
    GuardOutput::run(bytes, step)
}

/// Runs the check for pieces of every length, so that the input is split at every byte.
fn for_all_splits(bytes: &[u8], check: impl Fn(GuardOutput)) {
    for step in 1..=bytes.len().min(200) {
        check(run(bytes, step));
    }
    check(run(bytes, usize::MAX));
}

fn assert_passed(message: &str) {
    for_all_splits(message.as_bytes(), |seen| {
        assert_eq!(seen.fault, None, "{message:?}");
        assert_eq!(String::from_utf8_lossy(&seen.out), message);
    });
    fuzz_check(message.as_bytes());
}

/// Asserts that `good` is passed, and that the message that starts or continues with `bad` is
/// refused.
fn assert_refused(good: &str, bad: &str, kind: FaultKind) {
    let bytes = format!("{good}{bad}");
    for_all_splits(bytes.as_bytes(), |seen| {
        let (_, fault) = seen.fault.unwrap_or_else(|| panic!("passed: {bytes:?}"));
        assert_eq!(fault.kind, kind, "{bytes:?}");
        let out = seen.out.strip_suffix(STAND_IN).unwrap_or(&seen.out);
        assert_eq!(String::from_utf8_lossy(out), good, "{bytes:?}");
    });
    fuzz_check(bytes.as_bytes());
}

fn assert_head_refused(head: &str, kind: FaultKind) {
    assert_refused("", head, kind);
    // The same as the second message of a pipeline, whose first is served.
    let first = "POST /first HTTP/1.1\r\nHost: a.test\r\nContent-Length: 3\r\n\r\nabc";
    assert_refused(first, head, kind);
    let seen = run(format!("{first}{head}").as_bytes(), usize::MAX);
    assert_eq!(seen.fault.map(|(ordinal, _)| ordinal), Some(1));
    assert!(seen.out.ends_with(STAND_IN));
}

/// A GET request with these header lines after its Host header.
fn get_with_headers(lines: &str) -> String {
    format!("GET / HTTP/1.1\r\nHost: a.test\r\n{lines}\r\n\r\n")
}

const CHUNKED: &str = "POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n";

#[test]
fn valid_messages_pass_unchanged() {
    for message in [
        "GET / HTTP/1.1\r\nHost: a.test\r\n\r\n",
        "GET /?q=a|b{c}&%20 HTTP/1.1\r\nhost:a.test\r\nX-Empty:\r\nX-Tab: a\tb\r\n\r\n",
        "GET /gr\u{fc}n HTTP/1.1\r\nHost: a.test\r\nX-Text: gr\u{fc}n\r\n\r\n",
        "OPTIONS * HTTP/1.1\r\nHost: a.test\r\n\r\n",
        "GET http://a.test/x HTTP/1.1\r\nHost: a.test\r\n\r\n",
        "GET http://a.test/x HTTP/1.0\r\n\r\n",
        "GET / HTTP/1.0\r\nHost: a.test\r\n\r\n",
        "POST / HTTP/1.0\r\nHost: a.test\r\nContent-Length: 2\r\n\r\n\n\n",
        "PROPFIND / HTTP/1.1\r\nHost: a.test\r\nContent-Length:  5 \r\n\r\nGET /",
        "POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 0\r\n\r\n",
        "CONNECT a.test:443 HTTP/1.1\r\nHost: a.test:443\r\n\r\n",
        "CONNECT [2001:db8::1]:443 HTTP/1.1\r\nHost: [2001:db8::1]:443\r\n\r\n",
        // Python's urllib.
        "CONNECT a.test:443 HTTP/1.0\r\n\r\n",
        "CONNECT a.test:443 HTTP/1.1\r\nHost: a.test\r\nContent-Length: 0\r\n\r\n",
        "",
    ] {
        assert_passed(message);
        let first = "GET /first HTTP/1.1\r\nHost: a.test\r\n\r\n";
        assert_passed(&format!("{first}{message}"));
        assert_passed(&format!("{message}{first}"));
    }
    for body in [
        "0\r\n\r\n",
        "000\r\n\r\n",
        "3\r\nabc\r\n0\r\n\r\n",
        "a\r\n0\r\n\r\nGET /\r\n00A\r\n0123456789\r\n0\r\n\r\n",
        "1\r\na\r\n0\r\nX-Checksum: 1\r\nX-Other:\r\n\r\n",
    ] {
        assert_passed(&format!("{CHUNKED}{body}"));
        assert_passed(&format!("{CHUNKED}{body}{CHUNKED}{body}"));
    }
    assert_passed(&format!(
        "{}0\r\n\r\n",
        CHUNKED.replace(": chunked", ":  CHUNKED ")
    ));
}

#[test]
fn invalid_request_line_is_refused() {
    let rest = "\r\nHost: a.test\r\n\r\n";
    for (line, kind) in [
        ("GET /", FaultKind::RequestLine),
        ("GET", FaultKind::RequestLine),
        ("GET  / HTTP/1.1", FaultKind::RequestLine),
        ("GET /  HTTP/1.1", FaultKind::RequestLine),
        ("GET /a b HTTP/1.1", FaultKind::RequestLine),
        ("GET / HTTP/1.1 ", FaultKind::Version),
        ("\r\nGET / HTTP/1.1", FaultKind::RequestLine),
        ("\nGET / HTTP/1.1", FaultKind::RequestLine),
        (" GET / HTTP/1.1", FaultKind::Method),
        ("\u{16}\u{3}\u{1}", FaultKind::Method),
        ("G(T / HTTP/1.1", FaultKind::Method),
        ("G\tT / HTTP/1.1", FaultKind::Method),
        ("GET a.test HTTP/1.1", FaultKind::Target),
        ("GET a.test:80 HTTP/1.1", FaultKind::Target),
        ("GET * HTTP/1.1", FaultKind::Target),
        ("GET ?a HTTP/1.1", FaultKind::Target),
        ("GET /a#b HTTP/1.1", FaultKind::Target),
        ("GET http://a.test/#b HTTP/1.1", FaultKind::Target),
        ("GET /a\tb HTTP/1.1", FaultKind::Target),
        ("GET /a\u{b}b HTTP/1.1", FaultKind::Target),
        ("GET /a\0b HTTP/1.1", FaultKind::Target),
        ("GET /a\u{7f}b HTTP/1.1", FaultKind::Target),
        ("GET /a<b HTTP/1.1", FaultKind::Target),
        ("GET http:// HTTP/1.1", FaultKind::Target),
        ("GET http:///a HTTP/1.1", FaultKind::Target),
        ("CONNECT / HTTP/1.1", FaultKind::Target),
        ("CONNECT * HTTP/1.1", FaultKind::Target),
        ("CONNECT http://a.test/ HTTP/1.1", FaultKind::Target),
        ("CONNECT a.test:443/x HTTP/1.1", FaultKind::Target),
        ("connect a.test:443 HTTP/1.1", FaultKind::Target),
        ("GET / HTTP/1.2", FaultKind::Version),
        ("GET / HTTP/0.9", FaultKind::Version),
        ("GET / HTTP/2.0", FaultKind::Version),
        ("PRI * HTTP/2.0", FaultKind::Version),
        ("GET / http/1.1", FaultKind::Version),
        ("GET / HTTP/1.10", FaultKind::Version),
        ("GET / HTTP/1.1\rX: y", FaultKind::BareCarriageReturn),
        ("GET / HTTP/1.1\r", FaultKind::BareCarriageReturn),
        ("GET / HTTP/1.1\nX: y", FaultKind::BareLineFeed),
    ] {
        assert_head_refused(&format!("{line}{rest}"), kind);
    }
}

#[test]
fn invalid_header_line_is_refused() {
    for (lines, kind) in [
        ("X: y\n", FaultKind::BareLineFeed),
        ("X: y\nZ: w", FaultKind::BareLineFeed),
        ("X: y\rZ: w", FaultKind::BareCarriageReturn),
        ("X: y\r", FaultKind::BareCarriageReturn),
        ("X: y\r\n z", FaultKind::Fold),
        ("X: y\r\n\tz", FaultKind::Fold),
        ("X : y", FaultKind::SpaceBeforeColon),
        ("X\t: y", FaultKind::SpaceBeforeColon),
        ("Transfer-Encoding : chunked", FaultKind::SpaceBeforeColon),
        ("Content-Length : 5", FaultKind::SpaceBeforeColon),
        (": y", FaultKind::Name),
        ("X Y: z", FaultKind::Name),
        ("X", FaultKind::Name),
        ("X\0: y", FaultKind::Name),
        ("X\rY: z", FaultKind::Name),
        ("X\u{e4}: y", FaultKind::Name),
        ("X(: y", FaultKind::Name),
        ("X: y\0", FaultKind::Value),
        ("X: \u{1}y", FaultKind::Value),
        ("X: \u{7f}y", FaultKind::Value),
        ("Transfer-Encoding: \u{b}chunked", FaultKind::Value),
    ] {
        assert_head_refused(&get_with_headers(lines), kind);
    }
    assert_head_refused("GET / HTTP/1.1\r\n Host: a.test\r\n\r\n", FaultKind::Fold);
}

#[test]
fn request_without_exactly_one_host_is_refused() {
    for (head, kind) in [
        (get_with_headers("Host: a.test"), FaultKind::TwoHosts),
        (get_with_headers("hOST: b.test"), FaultKind::TwoHosts),
        ("GET / HTTP/1.1\r\n\r\n".into(), FaultKind::NoHost),
        ("GET / HTTP/1.0\r\n\r\n".into(), FaultKind::NoHost),
        ("OPTIONS * HTTP/1.0\r\n\r\n".into(), FaultKind::NoHost),
        (
            "GET http://a.test/ HTTP/1.1\r\n\r\n".into(),
            FaultKind::NoHost,
        ),
        (
            "CONNECT a.test:443 HTTP/1.1\r\n\r\n".into(),
            FaultKind::NoHost,
        ),
        (
            "CONNECT a.test:443 HTTP/1.0\r\nHost: a\r\nHost: a\r\n\r\n".into(),
            FaultKind::TwoHosts,
        ),
    ] {
        assert_head_refused(&head, kind);
    }
}

#[test]
fn ambiguous_body_length_is_refused() {
    for (lines, kind) in [
        (
            "Content-Length: 5\r\nContent-Length: 5",
            FaultKind::TwoLengths,
        ),
        (
            "Content-Length: 5\r\ncontent-length: 6",
            FaultKind::TwoLengths,
        ),
        ("Content-Length: 5, 5", FaultKind::Length),
        ("Content-Length: +5", FaultKind::Length),
        ("Content-Length: -5", FaultKind::Length),
        ("Content-Length: 0x5", FaultKind::Length),
        ("Content-Length: 5 5", FaultKind::Length),
        ("Content-Length: 5.0", FaultKind::Length),
        ("Content-Length: \t5", FaultKind::Length),
        ("Content-Length: \"5\"", FaultKind::Length),
        ("Content-Length: \u{665}", FaultKind::Length),
        ("Content-Length:", FaultKind::Length),
        ("Content-Length: 18446744073709551616", FaultKind::Length),
        ("Content-Length: 00000000000000000005", FaultKind::Length),
        (
            "Content-Length: 5\r\nTransfer-Encoding: chunked",
            FaultKind::LengthAndCoding,
        ),
        (
            "Transfer-Encoding: chunked\r\nContent-Length: 5",
            FaultKind::LengthAndCoding,
        ),
        (
            "Transfer-Encoding: chunked\r\nContent-Length: 0",
            FaultKind::LengthAndCoding,
        ),
        (
            "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
            FaultKind::TwoCodings,
        ),
        ("Transfer-Encoding: gzip, chunked", FaultKind::Coding),
        ("Transfer-Encoding: chunked, chunked", FaultKind::Coding),
        ("Transfer-Encoding: chunked, identity", FaultKind::Coding),
        ("Transfer-Encoding: identity", FaultKind::Coding),
        ("Transfer-Encoding: chunked;q=1", FaultKind::Coding),
        ("Transfer-Encoding: xchunked", FaultKind::Coding),
        ("Transfer-Encoding: \"chunked\"", FaultKind::Coding),
        ("Transfer-Encoding: ,chunked", FaultKind::Coding),
        ("Transfer-Encoding:\tchunked", FaultKind::Coding),
        ("Transfer-Encoding:", FaultKind::Coding),
    ] {
        assert_head_refused(&get_with_headers(lines), kind);
    }
    assert_head_refused(
        "POST / HTTP/1.0\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n",
        FaultKind::OldCoding,
    );
    for line in ["Content-Length: 1", "Transfer-Encoding: chunked"] {
        assert_head_refused(
            &format!("CONNECT a.test:443 HTTP/1.1\r\nHost: a.test\r\n{line}\r\n\r\n"),
            FaultKind::ConnectBody,
        );
    }
}

#[test]
fn invalid_chunk_ends_the_body_in_an_error() {
    for (good, bad, kind) in [
        ("", "\r\n", FaultKind::ChunkSize),
        ("", ";a=b\r\n", FaultKind::ChunkSize),
        ("", "+3\r\nabc\r\n", FaultKind::ChunkSize),
        ("", " 3\r\nabc\r\n", FaultKind::ChunkSize),
        ("0", "x3\r\nabc\r\n", FaultKind::ChunkSize),
        ("3", " \r\nabc\r\n", FaultKind::ChunkExtension),
        ("3", ";a=b\r\nabc\r\n", FaultKind::ChunkExtension),
        ("3", ";a\nabc\r\n", FaultKind::ChunkExtension),
        ("3", "\nabc\r\n", FaultKind::BareLineFeed),
        ("3\r", "abc\r\n", FaultKind::BareCarriageReturn),
        ("000000000000000", "0\r\n\r\n", FaultKind::ChunkTooLong),
        ("fffffffffffffff", "f1\r\n", FaultKind::ChunkTooLong),
        ("3\r\nabc", "d\r\n", FaultKind::ChunkEnd),
        ("3\r\nabc", "\n0\r\n\r\n", FaultKind::ChunkEnd),
        ("3\r\nabc\r", "0\r\n\r\n", FaultKind::ChunkEnd),
        ("0\r\n", "GET / HTTP/1.1\r\n\r\n", FaultKind::Name),
        ("0\r\n", "\n", FaultKind::BareLineFeed),
        ("0\r\n", "X: y\n\r\n", FaultKind::BareLineFeed),
        ("0\r\n", "X: y\r\n z\r\n\r\n", FaultKind::Fold),
        ("0\r\n", "X : y\r\n\r\n", FaultKind::SpaceBeforeColon),
        ("0\r\n", "X: \0\r\n\r\n", FaultKind::Value),
        ("0\r\n", "Content-Length: 5\r\n\r\n", FaultKind::Trailer),
        ("0\r\n", "X: y\r\nhost: b.test\r\n\r\n", FaultKind::Trailer),
        ("0\r\n", "AUTHORIZATION: x\r\n\r\n", FaultKind::Trailer),
        (
            "0\r\n",
            "Transfer-Encoding: chunked\r\n\r\n",
            FaultKind::Trailer,
        ),
        ("0\r\n", "X-Forwarded-Host: b\r\n\r\n", FaultKind::Trailer),
    ] {
        assert_refused(&format!("{CHUNKED}{good}"), bad, kind);
        // The fault belongs to the second request.
        let seen = run(
            format!("{}{CHUNKED}{good}{bad}", get_with_headers("X: y")).as_bytes(),
            7,
        );
        assert_eq!(seen.fault.map(|(ordinal, _)| ordinal), Some(1));
    }
}

#[test]
fn body_fault_is_returned_by_every_later_read() {
    let bytes = format!("{CHUNKED}3\r\nabc!");
    let pieces = ChunkedReader {
        rest: bytes.as_bytes(),
        step: usize::MAX,
    };
    let (mut guard, guard_handle) = FramingGuard::new(pieces, HeadLimits::default());
    let mut cx = Context::from_waker(Waker::noop());
    let mut space = [0; 1024];
    let mut buf = ReadBuf::new(&mut space);
    assert!(Pin::new(&mut guard).poll_read(&mut cx, &mut buf).is_ready());
    assert_eq!(buf.filled(), bytes.trim_end_matches('!').as_bytes());
    for _ in 0..2 {
        let Poll::Ready(Err(error)) = Pin::new(&mut guard).poll_read(&mut cx, &mut buf) else {
            panic!("no error");
        };
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        let fault = error.get_ref().unwrap().downcast_ref::<Fault>().unwrap();
        assert_eq!(fault.kind, FaultKind::ChunkEnd);
        assert!(fault.to_string().contains("CRLF"), "{fault}");
    }
    assert_eq!(guard_handle.take_fault(1), None);
    assert_eq!(
        guard_handle.take_fault(0).unwrap().kind,
        FaultKind::ChunkEnd
    );
    assert_eq!(guard_handle.take_fault(0), None, "a fault is returned once");
}

#[test]
fn messages_above_size_limits_are_refused() {
    let limits = HeadLimits::default();
    let fits = |name: &str, length: usize| {
        let value = "a".repeat(length - get_with_headers(&format!("{name}: ")).len());
        get_with_headers(&format!("{name}: {value}"))
    };
    let head = fits("X", limits.head);
    assert_eq!(head.len(), limits.head);
    for (head, kind) in [
        (head.clone(), None),
        (head.replace("X:", "XX:"), Some(FaultKind::HeadTooLong)),
        ("a".repeat(limits.head), Some(FaultKind::HeadTooLong)),
        (get_with_headers(&["X: y"; 99].join("\r\n")), None),
        (
            get_with_headers(&["X: y"; 100].join("\r\n")),
            Some(FaultKind::TooManyHeaders),
        ),
        (
            get_with_headers("")
                .replace("GET /", &format!("GET /{}", "a".repeat(limits.target - 1))),
            None,
        ),
        (
            get_with_headers("").replace("GET /", &format!("GET /{}", "a".repeat(limits.target))),
            Some(FaultKind::TargetTooLong),
        ),
        (
            format!("{CHUNKED}0\r\nX: {}\r\n\r\n", "a".repeat(8 * 1024 - 7)),
            None,
        ),
        (
            format!("{CHUNKED}0\r\nX: {}\r\n\r\n", "a".repeat(8 * 1024 - 6)),
            Some(FaultKind::TrailersTooLong),
        ),
        (
            format!("{CHUNKED}0\r\n{}\r\n", "X: y\r\n".repeat(101)),
            Some(FaultKind::TooManyHeaders),
        ),
    ] {
        let head = head.replace("\r\n\r\n\r\n", "\r\n\r\n");
        for step in [1, 1000, usize::MAX] {
            let seen = run(head.as_bytes(), step);
            let (start, length) = (&head[..20], head.len());
            assert_eq!(
                seen.fault.map(|(_, fault)| fault.kind),
                kind,
                "{start} {length}"
            );
            assert_eq!(kind.is_none(), seen.out == head.as_bytes());
        }
    }
}

#[test]
fn connection_end_inside_a_head_is_a_fault() {
    let head = get_with_headers("X: y");
    for cut in 1..head.len() {
        assert_refused("", &head[..cut], FaultKind::Cut);
        assert_refused(&head, &head[..cut], FaultKind::Cut);
    }
    for cut in ["", "3", "3\r\n", "3\r\nab", "3\r\nabc\r\n0\r\n"] {
        assert_passed(&format!("{CHUNKED}{cut}"));
    }
    // Incomplete trailers are not passed on.
    let seen = run(format!("{CHUNKED}0\r\nX: y\r\n").as_bytes(), usize::MAX);
    assert_eq!(seen.out, format!("{CHUNKED}0\r\n").as_bytes());
    assert_eq!(seen.fault, None);
}

#[test]
fn large_buffer_is_released_when_empty() {
    let head = get_with_headers(&format!("X: {}", "a".repeat(32 * 1024)));
    let pieces = ChunkedReader {
        rest: head.as_bytes(),
        step: 1000,
    };
    let (mut guard, _faults) = FramingGuard::new(pieces, HeadLimits::default());
    let mut cx = Context::from_waker(Waker::noop());
    let mut space = [0; 1024];
    let mut out = 0;
    while out < head.len() {
        let mut buf = ReadBuf::new(&mut space);
        assert!(Pin::new(&mut guard).poll_read(&mut cx, &mut buf).is_ready());
        out += buf.filled().len();
    }
    assert!(guard.held.capacity() <= MAX_IDLE_BUFFER);
}

// Issue 14, number 12.
#[tokio::test]
async fn is_inside_head_is_true_for_incomplete_heads_only() {
    let whole = get_with_headers("X: y");
    for (bytes, closed, is_inside) in [
        (String::new(), false, false),
        ("SSH-2.0-OpenSSH_9.9".to_owned(), false, true),
        ("GET / HTTP/1.1\r\nHost: a.test\r\n".to_owned(), false, true),
        (whole.clone(), false, false),
        (format!("{whole}GET"), false, true),
        (format!("{CHUNKED}3\r\nab"), false, false),
        (format!("{CHUNKED}0\r\nX: y\r\n"), false, false),
        // These requests reach the service, or are answered already.
        ("GET".to_owned(), true, false),
        ("GET / HTTP/1.1\nHost: a.test\r\n".to_owned(), false, false),
    ] {
        let (mut client, server) = tokio::io::duplex(4096);
        let (mut guard, guard_handle) = FramingGuard::new(server, HeadLimits::default());
        let mut cx = Context::from_waker(Waker::noop());
        // In two pieces, as slow heads arrive.
        let (first, second) = bytes.as_bytes().split_at(bytes.len() / 2);
        for piece in [first, second] {
            tokio::io::AsyncWriteExt::write_all(&mut client, piece)
                .await
                .unwrap();
            read_all(&mut guard, &mut cx);
        }
        if closed {
            drop(client);
            read_all(&mut guard, &mut cx);
        }
        assert_eq!(guard_handle.is_inside_head(), is_inside, "{bytes:?}");
    }
}

/// Reads all available bytes.
fn read_all(guard: &mut FramingGuard<tokio::io::DuplexStream>, cx: &mut Context<'_>) {
    let mut space = [0; 1024];
    loop {
        let mut buf = ReadBuf::new(&mut space);
        match Pin::new(&mut *guard).poll_read(cx, &mut buf) {
            Poll::Ready(Ok(())) if !buf.filled().is_empty() => {}
            Poll::Ready(_) | Poll::Pending => return,
        }
    }
}
