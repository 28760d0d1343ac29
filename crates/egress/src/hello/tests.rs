//! Real hellos, split in every way, and hostile ones.

use std::sync::Arc;

use proptest::collection::vec;
use proptest::prelude::{Just, any, prop_oneof, proptest};
use rustls::client::{EchGreaseConfig, EchMode};
use rustls::crypto::aws_lc_rs;
use rustls::crypto::hpke::Hpke;
use rustls::server::Acceptor;
use rustls::{ClientConfig, ClientConnection, RootCertStore};
use rustls_pki_types::ServerName;
use tokio::io::{AsyncWriteExt, duplex};

use super::*;

/// The first flight of a client that wants this.
fn client(name: &str, alpn: &[Vec<u8>], ech: bool) -> Vec<u8> {
    let builder = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()));
    let builder = if ech {
        let suite: &dyn Hpke = aws_lc_rs::hpke::DH_KEM_P256_HKDF_SHA256_AES_128;
        let (key, _) = suite.generate_key_pair().unwrap();
        let mode = EchMode::Grease(EchGreaseConfig::new(
            aws_lc_rs::hpke::DH_KEM_P256_HKDF_SHA256_AES_128,
            key,
        ));
        builder.with_ech(mode).unwrap()
    } else {
        builder.with_safe_default_protocol_versions().unwrap()
    };
    let mut config = builder
        .with_root_certificates(RootCertStore::empty())
        .with_no_client_auth();
    config.alpn_protocols = alpn.to_vec();
    let name = ServerName::try_from(name.to_owned()).unwrap();
    let mut connection = ClientConnection::new(Arc::new(config), name).unwrap();
    let mut bytes = Vec::new();
    connection.write_tls(&mut bytes).unwrap();
    bytes
}

/// What rustls reads in the same bytes. `None` where it takes them for no hello.
fn as_rustls_reads(mut bytes: &[u8]) -> Option<(Option<String>, Vec<Vec<u8>>)> {
    let mut acceptor = Acceptor::default();
    while acceptor.read_tls(&mut bytes).unwrap() > 0 {
        if let Some(accepted) = acceptor.accept().ok()? {
            let hello = accepted.client_hello();
            let alpn = hello.alpn().into_iter().flatten().map(<[u8]>::to_vec);
            return Some((hello.server_name().map(str::to_owned), alpn.collect()));
        }
    }
    None
}

/// The same handshake message in records of these lengths, again and again.
fn in_records(bytes: &[u8], lengths: &[usize]) -> Vec<u8> {
    let mut message = &bytes[RECORD_HEADER..];
    let mut out = Vec::new();
    for length in lengths.iter().cycle() {
        let (record, rest) = message.split_at((*length).min(message.len()));
        out.extend([HANDSHAKE, 3, 1]);
        out.extend(u16::try_from(record.len()).unwrap().to_be_bytes());
        out.extend(record);
        message = rest;
        if message.is_empty() {
            break;
        }
    }
    out
}

fn read(bytes: &[u8]) -> Result<Option<Hello>, String> {
    exercise(bytes);
    outcome(bytes, usize::MAX, 0)
}

/// A hello with these extensions.
fn made(extensions: &[(u16, &[u8])]) -> Vec<u8> {
    let mut list = Vec::new();
    for (kind, data) in extensions {
        list.extend(kind.to_be_bytes());
        list.extend(u16::try_from(data.len()).unwrap().to_be_bytes());
        list.extend(*data);
    }
    let mut body = vec![3, 3];
    body.extend([7; 32]);
    body.extend([0, 0, 2, 0x13, 1, 1, 0]);
    body.extend(u16::try_from(list.len()).unwrap().to_be_bytes());
    body.extend(list);
    framed(&body)
}

/// This ClientHello, in as many records as it needs.
fn framed(body: &[u8]) -> Vec<u8> {
    let mut message = vec![0; RECORD_HEADER];
    message.push(CLIENT_HELLO);
    message.extend(&u32::try_from(body.len()).unwrap().to_be_bytes()[1..]);
    message.extend(body);
    in_records(&message, &[LONGEST_RECORD])
}

fn named(name: &[u8]) -> Vec<u8> {
    let length = u16::try_from(name.len()).unwrap();
    let mut data = (length + 3).to_be_bytes().to_vec();
    data.push(0);
    data.extend(length.to_be_bytes());
    data.extend(name);
    data
}

fn is_bad(bytes: &[u8], expected: BadHello) {
    let start = bytes.get(..80).unwrap_or(bytes);
    assert_eq!(read(bytes), Err(expected.to_string()), "{start:?}");
}

proptest! {
    #[test]
    fn a_hello_reads_the_same_however_it_is_split(
        name in "[a-zA-Z]{1,20}(\\.[a-z0-9]{1,20}){0,4}\\.test",
        alpn in prop_oneof![
            Just(vec![]),
            Just(vec![b"h2".to_vec(), b"http/1.1".to_vec()]),
            vec(vec(any::<u8>(), 1..20), 1..6),
        ],
        ech in any::<bool>(),
        records in vec(1usize..600, 1..5),
        step in 1usize..700,
        after in vec(any::<u8>(), 0..40),
    ) {
        let whole = client(&name, &alpn, ech);
        let expected = Hello { server_name: Some(name.clone()), alpn: alpn.clone(), has_ech: ech };
        let mut split = in_records(&whole, &records);
        // It gives names in lower case.
        assert_eq!(as_rustls_reads(&split), Some((Some(name.to_lowercase()), alpn)));
        assert_eq!(read(&whole), Ok(Some(expected.clone())));
        // What the client sends after it is left in place.
        split.extend(after);
        assert_eq!(outcome(&split, step, 0), Ok(Some(expected.clone())));
        assert_eq!(read(&split), Ok(Some(expected)));
    }

    #[test]
    fn damage_is_never_read_otherwise_than_rustls_reads_it(
        damage in vec((any::<proptest::sample::Index>(), any::<u8>()), 1..6),
        records in vec(1usize..600, 1..3),
    ) {
        let mut bytes = client("a.test", &[b"h2".to_vec(), b"http/1.1".to_vec()], false);
        for (index, byte) in damage {
            let at = index.index(bytes.len());
            bytes[at] = byte;
        }
        exercise(&bytes);
        let bytes = in_records(&bytes, &records);
        if let (Ok(Some(hello)), Some((name, alpn))) = (read(&bytes), as_rustls_reads(&bytes)) {
            assert_eq!(hello.alpn, alpn);
            // It takes no address and no invalid name for a name; we leave that to policy.
            if name.is_some() {
                assert_eq!(hello.server_name.map(|name| name.to_lowercase()), name);
            }
        }
    }

    #[test]
    fn arbitrary_bytes_are_survived(
        start in prop_oneof![
            Just(vec![]),
            Just(vec![0x16, 3, 1]),
            Just(vec![0x16, 3, 1, 0, 40, 1, 0, 0, 36, 3, 3]),
        ],
        bytes in vec(any::<u8>(), 0..300),
    ) {
        exercise(&[start, bytes].concat());
    }

    #[test]
    fn arbitrary_extensions_are_survived(
        extensions in vec(
            (prop_oneof![Just(0u16), Just(16), Just(0xfe0d), any::<u16>()], vec(any::<u8>(), 0..40)),
            0..5,
        ),
    ) {
        let extensions: Vec<_> = extensions.iter().map(|(kind, data)| (*kind, &data[..])).collect();
        exercise(&made(&extensions));
    }
}

#[test]
fn a_hello_in_one_byte_records_is_read() {
    let whole = client("one-byte.test", &[b"h2".to_vec()], true);
    let hello = read(&in_records(&whole, &[1])).unwrap().unwrap();
    assert_eq!(hello.server_name.as_deref(), Some("one-byte.test"));
    assert!(hello.has_ech);
}

#[test]
fn a_hello_without_a_name_has_none() {
    let hello = read(&client("192.0.2.1", &[], false)).unwrap().unwrap();
    assert_eq!(hello, Hello::default());
    // And one without any extension at all.
    let mut body = vec![3, 1];
    body.extend([7; 32]);
    body.extend([0, 0, 2, 0x13, 1, 1, 0]);
    assert_eq!(read(&framed(&body)), Ok(Some(Hello::default())));
}

#[test]
fn a_name_is_given_as_it_was_said() {
    for name in ["A.Test.", "192.0.2.1", "x_y", &"a".repeat(255)] {
        let hello = read(&made(&[(SERVER_NAME, &named(name.as_bytes()))]));
        assert_eq!(hello.unwrap().unwrap().server_name.as_deref(), Some(name));
    }
}

#[test]
fn what_does_not_begin_like_tls_is_plain_and_replayed() {
    for text in ["GET / HTTP/1.1\r\n", "\0", "\x15\x03\x01", "SSH-2.0-x\r\n"] {
        assert_eq!(read(text.as_bytes()), Ok(None), "{text:?}");
    }
}

#[test]
fn what_is_no_hello_is_refused() {
    let hello = made(&[]);
    let with = |at: usize, byte: u8| {
        let mut bytes = hello.clone();
        bytes[at] = byte;
        bytes
    };
    // SSL 2: two bytes of length with the high bit set, then a hello.
    is_bad(&[0x80, 0x2e, 1, 3, 1, 0, 0x15], BadHello::NotTls);
    is_bad(b"", BadHello::Cut);
    for cut in 1..hello.len() {
        is_bad(&hello[..cut], BadHello::Cut);
    }
    is_bad(&with(1, 2), BadHello::Record);
    is_bad(&[0x16, 3, 1, 0, 0, 0x16, 3, 1], BadHello::Record);
    is_bad(&[0x16, 3, 1, 0x40, 1], BadHello::Record);
    let mut second = in_records(&hello, &[10]);
    second[15] = 0x17;
    is_bad(&second, BadHello::Record);
    is_bad(&with(5, 2), BadHello::NotHello);
    is_bad(&with(5, 0), BadHello::NotHello);
    is_bad(&with(8, hello[8] - 1), BadHello::Trailing);
    is_bad(&with(9, 2), BadHello::Malformed);
    // The session's length, the suites' and the compression methods'.
    is_bad(&with(43, 33), BadHello::Malformed);
    is_bad(&with(45, 0), BadHello::Malformed);
    is_bad(&with(45, 1), BadHello::Malformed);
    is_bad(&with(48, 0), BadHello::Malformed);
    // The extensions' length.
    is_bad(&with(51, 1), BadHello::Malformed);
}

#[test]
fn a_hello_that_is_too_long_is_refused() {
    let padding = vec![0; 60_000];
    let mut extensions = vec![(21, &padding[..])];
    assert!(read(&made(&extensions)).unwrap().is_some());
    let more = vec![0; 5_500];
    extensions.push((22, &more));
    is_bad(&made(&extensions), BadHello::TooLong);
    let mut announced = made(&[]);
    announced[6] = 2;
    is_bad(&announced, BadHello::TooLong);
    // Short, but in so many records that it is not.
    is_bad(
        &in_records(&made(&[(21, &padding[..20_000])]), &[1]),
        BadHello::TooLong,
    );
}

#[test]
fn extensions_that_can_be_read_in_two_ways_are_refused() {
    let name = named(b"a.test");
    is_bad(
        &made(&[(SERVER_NAME, &name), (SERVER_NAME, &name)]),
        BadHello::Extensions,
    );
    is_bad(&made(&[(99, b""), (99, b"")]), BadHello::Extensions);
    let many: Vec<(u16, &[u8])> = (100..229).map(|kind| (kind, &b""[..])).collect();
    is_bad(&made(&many), BadHello::Extensions);
    assert!(read(&made(&many[1..])).is_ok());

    let mut two = [&name[..], &name[2..]].concat();
    two[1] = u8::try_from(two.len() - 2).unwrap();
    let mut other_kind = name.clone();
    other_kind[2] = 1;
    for data in [
        &b""[..],
        b"\0\0",
        &two,
        &other_kind,
        &[&name[..], b"x"].concat(),
        &name[..name.len() - 1],
        &named(b""),
        &named(b"a\0b"),
        &named(b"a b"),
        &named("gr\u{fc}n".as_bytes()),
        &named(&[b'a'; 256]),
    ] {
        is_bad(&made(&[(SERVER_NAME, data)]), BadHello::ServerName);
    }
    for data in [
        &b""[..],
        b"\0\0",
        b"\0\x01\0",
        b"\0\x03\x02h2x",
        b"\0\x04\x02h2",
        b"\0\x03\x03h2",
        &[&[0, 66][..], &b"\x01x".repeat(33)].concat(),
    ] {
        is_bad(&made(&[(PROTOCOLS, data)]), BadHello::Protocols);
    }
}

#[tokio::test]
async fn a_slow_client_is_waited_for_and_can_be_answered() {
    let whole = client("slow.test", &[], false);
    let (mut far, near) = duplex(1);
    let (already, rest) = whole.split_at(3);
    let connection_info = tokio::spawn(open(near, Bytes::copy_from_slice(already)));
    far.write_all(rest).await.unwrap();
    let ConnectionInfo::Tls { hello, mut io } = connection_info.await.unwrap().unwrap() else {
        panic!("it is TLS");
    };
    assert_eq!(hello.server_name.as_deref(), Some("slow.test"));
    io.write_all(b"!").await.unwrap();
    assert_eq!(far.read_u8().await.unwrap(), b'!');
    let mut replayed = vec![0; whole.len()];
    io.read_exact(&mut replayed).await.unwrap();
    assert_eq!(replayed, whole);
    let (_, recorded) = io.into_inner();
    assert!(recorded.is_empty());
}

#[tokio::test]
async fn a_whole_handshake_works_after_the_hello_was_read() {
    use tokio_rustls::{TlsAcceptor, TlsConnector};

    let key = rcgen::generate_simple_self_signed(["whole.test".to_owned()]).unwrap();
    let certificate = key.cert.der().clone();
    let provider = Arc::new(aws_lc_rs::default_provider());
    let server = rustls::ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(
            vec![certificate.clone()],
            key.signing_key.serialize_der().try_into().unwrap(),
        )
        .unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(certificate).unwrap();
    let client = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();

    let (far, near) = duplex(64);
    let asking = tokio::spawn(async move {
        let name = ServerName::try_from("whole.test").unwrap();
        let mut tls = TlsConnector::from(Arc::new(client))
            .connect(name, far)
            .await
            .unwrap();
        tls.read_u8().await.unwrap()
    });
    let ConnectionInfo::Tls { io, .. } = open(near, Bytes::new()).await.unwrap() else {
        panic!("it is TLS");
    };
    let mut tls = TlsAcceptor::from(Arc::new(server))
        .accept(io)
        .await
        .unwrap();
    tls.write_all(b"!").await.unwrap();
    tls.flush().await.unwrap();
    assert_eq!(asking.await.unwrap(), b'!');
}

#[tokio::test]
async fn watched_connection_gives_back_every_byte() {
    let (mut client, server) = duplex(LONGEST * 2);
    let mut replay = Replay::new(server, Bytes::from_static(b"hello"));
    client.write_all(b" there").await.unwrap();
    // The wait is ended by something else.
    let left = tokio::time::timeout(std::time::Duration::ZERO, replay.left()).await;
    assert!(left.is_err(), "the client is still there");
    client.write_all(b" and here").await.unwrap();
    drop(client);
    replay.left().await;
    let mut bytes = Vec::new();
    replay.read_to_end(&mut bytes).await.unwrap();
    assert_eq!(bytes, b"hello there and here");
}

#[tokio::test(start_paused = true)]
async fn watched_connection_records_a_bounded_part() {
    let (mut client, server) = duplex(LONGEST * 2);
    let mut replay = Replay::new(server, Bytes::new());
    client.write_all(&vec![b'x'; LONGEST * 2]).await.unwrap();
    drop(client);
    let left = tokio::time::timeout(std::time::Duration::from_secs(60), replay.left()).await;
    assert!(left.is_err(), "its end was not read");
    assert!(replay.recorded.len() < LONGEST + FIRST_READ);
    let mut bytes = Vec::new();
    replay.read_to_end(&mut bytes).await.unwrap();
    assert_eq!(bytes.len(), LONGEST * 2);
}
