//! The guard alone: what it lets through, what it refuses, however it arrives.

mod fork;
mod hyper;
mod pipelines;

use super::*;

/// What comes out of a connection, and its fault, in steps of so many bytes.
fn run(bytes: &[u8], step: usize) -> Exercise {
    Exercise::run(bytes, step)
}

/// In pieces of every length, so that it is cut at every byte.
fn for_all_splits(bytes: &[u8], check: impl Fn(Exercise)) {
    for step in 1..=bytes.len().min(200) {
        check(run(bytes, step));
    }
    check(run(bytes, usize::MAX));
}

fn is_passed(message: &str) {
    for_all_splits(message.as_bytes(), |seen| {
        assert_eq!(seen.fault, None, "{message:?}");
        assert_eq!(String::from_utf8_lossy(&seen.out), message);
    });
    exercise(message.as_bytes());
}

/// `good` is passed, and the message that `bad` begins or goes on with is refused.
fn is_refused(good: &str, bad: &str, what: FaultKind) {
    let bytes = format!("{good}{bad}");
    for_all_splits(bytes.as_bytes(), |seen| {
        let (_, fault) = seen.fault.unwrap_or_else(|| panic!("passed: {bytes:?}"));
        assert_eq!(fault.what, what, "{bytes:?}");
        let out = seen.out.strip_suffix(STAND_IN).unwrap_or(&seen.out);
        assert_eq!(String::from_utf8_lossy(out), good, "{bytes:?}");
    });
    exercise(bytes.as_bytes());
}

fn head_is_refused(head: &str, what: FaultKind) {
    is_refused("", head, what);
    // And as the second of a pipeline: the first is served.
    let first = "POST /first HTTP/1.1\r\nHost: a.test\r\nContent-Length: 3\r\n\r\nabc";
    is_refused(first, head, what);
    let seen = run(format!("{first}{head}").as_bytes(), usize::MAX);
    assert_eq!(seen.fault.map(|(ordinal, _)| ordinal), Some(1));
    assert!(seen.out.ends_with(STAND_IN));
}

/// A GET with these lines after its Host.
fn with(lines: &str) -> String {
    format!("GET / HTTP/1.1\r\nHost: a.test\r\n{lines}\r\n\r\n")
}

const CHUNKED: &str = "POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n";

#[test]
fn what_clients_send_passes_unchanged() {
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
        is_passed(message);
        let first = "GET /first HTTP/1.1\r\nHost: a.test\r\n\r\n";
        is_passed(&format!("{first}{message}"));
        is_passed(&format!("{message}{first}"));
    }
    for body in [
        "0\r\n\r\n",
        "000\r\n\r\n",
        "3\r\nabc\r\n0\r\n\r\n",
        "a\r\n0\r\n\r\nGET /\r\n00A\r\n0123456789\r\n0\r\n\r\n",
        "1\r\na\r\n0\r\nX-Checksum: 1\r\nX-Other:\r\n\r\n",
    ] {
        is_passed(&format!("{CHUNKED}{body}"));
        is_passed(&format!("{CHUNKED}{body}{CHUNKED}{body}"));
    }
    is_passed(&format!(
        "{}0\r\n\r\n",
        CHUNKED.replace(": chunked", ":  CHUNKED ")
    ));
}

#[test]
fn a_bad_request_line_is_refused() {
    let rest = "\r\nHost: a.test\r\n\r\n";
    for (line, what) in [
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
        head_is_refused(&format!("{line}{rest}"), what);
    }
}

#[test]
fn a_bad_header_line_is_refused() {
    for (lines, what) in [
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
        head_is_refused(&with(lines), what);
    }
    head_is_refused("GET / HTTP/1.1\r\n Host: a.test\r\n\r\n", FaultKind::Fold);
}

#[test]
fn a_request_names_exactly_one_host() {
    for (head, what) in [
        (with("Host: a.test"), FaultKind::TwoHosts),
        (with("hOST: b.test"), FaultKind::TwoHosts),
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
        head_is_refused(&head, what);
    }
}

#[test]
fn a_length_that_can_be_read_in_two_ways_is_refused() {
    for (lines, what) in [
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
        head_is_refused(&with(lines), what);
    }
    head_is_refused(
        "POST / HTTP/1.0\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n",
        FaultKind::OldCoding,
    );
    for line in ["Content-Length: 1", "Transfer-Encoding: chunked"] {
        head_is_refused(
            &format!("CONNECT a.test:443 HTTP/1.1\r\nHost: a.test\r\n{line}\r\n\r\n"),
            FaultKind::ConnectBody,
        );
    }
}

#[test]
fn a_bad_chunk_ends_the_body_in_an_error() {
    for (good, bad, what) in [
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
        is_refused(&format!("{CHUNKED}{good}"), bad, what);
        // The fault is the second request's.
        let seen = run(
            format!("{}{CHUNKED}{good}{bad}", with("X: y")).as_bytes(),
            7,
        );
        assert_eq!(seen.fault.map(|(ordinal, _)| ordinal), Some(1));
    }
}

#[test]
fn a_body_fault_is_an_error_that_names_it_and_stays() {
    let bytes = format!("{CHUNKED}3\r\nabc!");
    let pieces = Pieces {
        rest: bytes.as_bytes(),
        step: usize::MAX,
    };
    let (mut guarded, faults) = Guarded::new(pieces, Limits::default());
    let mut cx = Context::from_waker(Waker::noop());
    let mut space = [0; 1024];
    let mut buf = ReadBuf::new(&mut space);
    assert!(
        Pin::new(&mut guarded)
            .poll_read(&mut cx, &mut buf)
            .is_ready()
    );
    assert_eq!(buf.filled(), bytes.trim_end_matches('!').as_bytes());
    for _ in 0..2 {
        let Poll::Ready(Err(error)) = Pin::new(&mut guarded).poll_read(&mut cx, &mut buf) else {
            panic!("no error");
        };
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        let fault = error.get_ref().unwrap().downcast_ref::<Fault>().unwrap();
        assert_eq!(fault.what, FaultKind::ChunkEnd);
        assert!(fault.to_string().contains("CRLF"), "{fault}");
    }
    assert_eq!(faults.take(1), None);
    assert_eq!(faults.take(0).unwrap().what, FaultKind::ChunkEnd);
    assert_eq!(faults.take(0), None, "it is told once");
}

#[test]
fn what_is_longer_than_the_limits_is_refused_and_what_just_fits_is_not() {
    let limits = Limits::default();
    let fits = |name: &str, length: usize| {
        let value = "a".repeat(length - with(&format!("{name}: ")).len());
        with(&format!("{name}: {value}"))
    };
    let head = fits("X", limits.head);
    assert_eq!(head.len(), limits.head);
    for (head, what) in [
        (head.clone(), None),
        (head.replace("X:", "XX:"), Some(FaultKind::HeadTooLong)),
        ("a".repeat(limits.head), Some(FaultKind::HeadTooLong)),
        (with(&["X: y"; 99].join("\r\n")), None),
        (
            with(&["X: y"; 100].join("\r\n")),
            Some(FaultKind::TooManyHeaders),
        ),
        (
            with("").replace("GET /", &format!("GET /{}", "a".repeat(limits.target - 1))),
            None,
        ),
        (
            with("").replace("GET /", &format!("GET /{}", "a".repeat(limits.target))),
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
                seen.fault.map(|(_, fault)| fault.what),
                what,
                "{start} {length}"
            );
            assert_eq!(what.is_none(), seen.out == head.as_bytes());
        }
    }
}

#[test]
fn a_connection_that_ends_in_a_head_is_answered_and_in_a_body_just_ends() {
    let head = with("X: y");
    for cut in 1..head.len() {
        is_refused("", &head[..cut], FaultKind::Cut);
        is_refused(&head, &head[..cut], FaultKind::Cut);
    }
    for cut in ["", "3", "3\r\n", "3\r\nab", "3\r\nabc\r\n0\r\n"] {
        is_passed(&format!("{CHUNKED}{cut}"));
    }
    // Trailers that were not whole are not handed on.
    let seen = run(format!("{CHUNKED}0\r\nX: y\r\n").as_bytes(), usize::MAX);
    assert_eq!(seen.out, format!("{CHUNKED}0\r\n").as_bytes());
    assert_eq!(seen.fault, None);
}

#[test]
fn a_buffer_that_grew_is_given_back() {
    let head = with(&format!("X: {}", "a".repeat(32 * 1024)));
    let pieces = Pieces {
        rest: head.as_bytes(),
        step: 1000,
    };
    let (mut guarded, _faults) = Guarded::new(pieces, Limits::default());
    let mut cx = Context::from_waker(Waker::noop());
    let mut space = [0; 1024];
    let mut out = 0;
    while out < head.len() {
        let mut buf = ReadBuf::new(&mut space);
        assert!(
            Pin::new(&mut guarded)
                .poll_read(&mut cx, &mut buf)
                .is_ready()
        );
        out += buf.filled().len();
    }
    assert!(guarded.held.capacity() <= KEPT);
}

// Issue 14, number 12.
#[tokio::test]
async fn guard_knows_whether_a_head_has_begun_and_not_ended() {
    let whole = with("X: y");
    for (bytes, closed, is_inside) in [
        (String::new(), false, false),
        ("SSH-2.0-OpenSSH_9.9".to_owned(), false, true),
        ("GET / HTTP/1.1\r\nHost: a.test\r\n".to_owned(), false, true),
        (whole.clone(), false, false),
        (format!("{whole}GET"), false, true),
        (format!("{CHUNKED}3\r\nab"), false, false),
        (format!("{CHUNKED}0\r\nX: y\r\n"), false, false),
        // These reach the service, or are answered already.
        ("GET".to_owned(), true, false),
        ("GET / HTTP/1.1\nHost: a.test\r\n".to_owned(), false, false),
    ] {
        let (mut client, server) = tokio::io::duplex(4096);
        let (mut guarded, faults) = Guarded::new(server, Limits::default());
        let mut cx = Context::from_waker(Waker::noop());
        // In two pieces, as heads that take their time come.
        let (first, second) = bytes.as_bytes().split_at(bytes.len() / 2);
        for piece in [first, second] {
            tokio::io::AsyncWriteExt::write_all(&mut client, piece)
                .await
                .unwrap();
            read_all(&mut guarded, &mut cx);
        }
        if closed {
            drop(client);
            read_all(&mut guarded, &mut cx);
        }
        assert_eq!(faults.is_inside_head(), is_inside, "{bytes:?}");
    }
}

/// Reads what there is.
fn read_all(guarded: &mut Guarded<tokio::io::DuplexStream>, cx: &mut Context<'_>) {
    let mut space = [0; 1024];
    loop {
        let mut buf = ReadBuf::new(&mut space);
        match Pin::new(&mut *guarded).poll_read(cx, &mut buf) {
            Poll::Ready(Ok(())) if !buf.filled().is_empty() => {}
            Poll::Ready(_) | Poll::Pending => return,
        }
    }
}
