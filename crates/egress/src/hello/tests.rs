//! Tests of the ClientHello parser: real hellos in all splits, and malformed ones.

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

/// The first flight of a rustls client with these options.
fn rustls_hello(name: &str, alpn: &[Vec<u8>], ech: bool) -> Vec<u8> {
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

/// The server name and ALPN list that rustls reads; `None` if it rejects the hello.
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

/// The same handshake message in records of these lengths, which are repeated as needed.
fn split_into_records(bytes: &[u8], lengths: &[usize]) -> Vec<u8> {
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
    fuzz_check(bytes);
    parse_in_steps(bytes, usize::MAX, 0)
}

/// Builds a hello with these extensions.
fn hello_with(extensions: &[(u16, &[u8])]) -> Vec<u8> {
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
    in_handshake_records(&body)
}

/// Encodes this ClientHello body in as many records as it needs.
fn in_handshake_records(body: &[u8]) -> Vec<u8> {
    let mut message = vec![0; RECORD_HEADER];
    message.push(CLIENT_HELLO);
    message.extend(&u32::try_from(body.len()).unwrap().to_be_bytes()[1..]);
    message.extend(body);
    split_into_records(&message, &[MAX_RECORD])
}

fn server_name_extension(name: &[u8]) -> Vec<u8> {
    let length = u16::try_from(name.len()).unwrap();
    let mut data = (length + 3).to_be_bytes().to_vec();
    data.push(0);
    data.extend(length.to_be_bytes());
    data.extend(name);
    data
}

fn assert_rejected(bytes: &[u8], expected: BadHello) {
    let start = bytes.get(..80).unwrap_or(bytes);
    assert_eq!(read(bytes), Err(expected.to_string()), "{start:?}");
}

proptest! {
    #[test]
    fn hello_is_parsed_the_same_in_every_split(
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
        let whole = rustls_hello(&name, &alpn, ech);
        let expected = Hello { server_name: Some(name.clone()), alpn: alpn.clone(), has_ech: ech };
        let mut split = split_into_records(&whole, &records);
        // rustls returns names in lower case.
        assert_eq!(as_rustls_reads(&split), Some((Some(name.to_lowercase()), alpn)));
        assert_eq!(read(&whole), Ok(Some(expected.clone())));
        // Bytes after the hello stay unread.
        split.extend(after);
        assert_eq!(parse_in_steps(&split, step, 0), Ok(Some(expected.clone())));
        assert_eq!(read(&split), Ok(Some(expected)));
    }

    #[test]
    fn damaged_hello_is_never_read_differently_from_rustls(
        damage in vec((any::<proptest::sample::Index>(), any::<u8>()), 1..6),
        records in vec(1usize..600, 1..3),
    ) {
        let mut bytes = rustls_hello("a.test", &[b"h2".to_vec(), b"http/1.1".to_vec()], false);
        for (index, byte) in damage {
            let at = index.index(bytes.len());
            bytes[at] = byte;
        }
        fuzz_check(&bytes);
        let bytes = split_into_records(&bytes, &records);
        if let (Ok(Some(hello)), Some((name, alpn))) = (read(&bytes), as_rustls_reads(&bytes)) {
            assert_eq!(hello.alpn, alpn);
            // rustls drops addresses and invalid names; the gate leaves this check to the policy.
            if name.is_some() {
                assert_eq!(hello.server_name.map(|name| name.to_lowercase()), name);
            }
        }
    }

    #[test]
    fn arbitrary_bytes_do_not_panic(
        start in prop_oneof![
            Just(vec![]),
            Just(vec![0x16, 3, 1]),
            Just(vec![0x16, 3, 1, 0, 40, 1, 0, 0, 36, 3, 3]),
        ],
        bytes in vec(any::<u8>(), 0..300),
    ) {
        fuzz_check(&[start, bytes].concat());
    }

    #[test]
    fn arbitrary_extensions_do_not_panic(
        extensions in vec(
            (prop_oneof![Just(0u16), Just(16), Just(0xfe0d), any::<u16>()], vec(any::<u8>(), 0..40)),
            0..5,
        ),
    ) {
        let extensions: Vec<_> = extensions.iter().map(|(kind, data)| (*kind, &data[..])).collect();
        fuzz_check(&hello_with(&extensions));
    }
}

#[test]
fn hello_in_one_byte_records_is_parsed() {
    let whole = rustls_hello("one-byte.test", &[b"h2".to_vec()], true);
    let hello = read(&split_into_records(&whole, &[1])).unwrap().unwrap();
    assert_eq!(hello.server_name.as_deref(), Some("one-byte.test"));
    assert!(hello.has_ech);
}

#[test]
fn hello_without_server_name_has_none() {
    let hello = read(&rustls_hello("192.0.2.1", &[], false))
        .unwrap()
        .unwrap();
    assert_eq!(hello, Hello::default());
    // The same for a hello without extensions.
    let mut body = vec![3, 1];
    body.extend([7; 32]);
    body.extend([0, 0, 2, 0x13, 1, 1, 0]);
    assert_eq!(
        read(&in_handshake_records(&body)),
        Ok(Some(Hello::default()))
    );
}

#[test]
fn server_name_is_not_normalised() {
    for name in ["A.Test.", "192.0.2.1", "x_y", &"a".repeat(255)] {
        let hello = read(&hello_with(&[(
            SERVER_NAME,
            &server_name_extension(name.as_bytes()),
        )]));
        assert_eq!(hello.unwrap().unwrap().server_name.as_deref(), Some(name));
    }
}

#[test]
fn non_tls_connection_is_plain_and_replayed() {
    for text in ["GET / HTTP/1.1\r\n", "\0", "\x15\x03\x01", "SSH-2.0-x\r\n"] {
        assert_eq!(read(text.as_bytes()), Ok(None), "{text:?}");
    }
}

#[test]
fn malformed_hello_is_refused() {
    let hello = hello_with(&[]);
    let with = |at: usize, byte: u8| {
        let mut bytes = hello.clone();
        bytes[at] = byte;
        bytes
    };
    // SSL 2: a length of two bytes with the high bit set, then a hello.
    assert_rejected(&[0x80, 0x2e, 1, 3, 1, 0, 0x15], BadHello::NotTls);
    assert_rejected(b"", BadHello::Cut);
    for cut in 1..hello.len() {
        assert_rejected(&hello[..cut], BadHello::Cut);
    }
    assert_rejected(&with(1, 2), BadHello::Record);
    assert_rejected(&[0x16, 3, 1, 0, 0, 0x16, 3, 1], BadHello::Record);
    assert_rejected(&[0x16, 3, 1, 0x40, 1], BadHello::Record);
    let mut second = split_into_records(&hello, &[10]);
    second[15] = 0x17;
    assert_rejected(&second, BadHello::Record);
    assert_rejected(&with(5, 2), BadHello::NotHello);
    assert_rejected(&with(5, 0), BadHello::NotHello);
    assert_rejected(&with(8, hello[8] - 1), BadHello::Trailing);
    assert_rejected(&with(9, 2), BadHello::Malformed);
    // The lengths of the session id, the cipher suites and the compression methods.
    assert_rejected(&with(43, 33), BadHello::Malformed);
    assert_rejected(&with(45, 0), BadHello::Malformed);
    assert_rejected(&with(45, 1), BadHello::Malformed);
    assert_rejected(&with(48, 0), BadHello::Malformed);
    // The extensions' length.
    assert_rejected(&with(51, 1), BadHello::Malformed);
}

#[test]
fn too_long_hello_is_refused() {
    let padding = vec![0; 60_000];
    let mut extensions = vec![(21, &padding[..])];
    assert!(read(&hello_with(&extensions)).unwrap().is_some());
    let more = vec![0; 5_500];
    extensions.push((22, &more));
    assert_rejected(&hello_with(&extensions), BadHello::TooLong);
    let mut announced = hello_with(&[]);
    announced[6] = 2;
    assert_rejected(&announced, BadHello::TooLong);
    // A short hello whose record headers make it too long.
    assert_rejected(
        &split_into_records(&hello_with(&[(21, &padding[..20_000])]), &[1]),
        BadHello::TooLong,
    );
}

#[test]
fn ambiguous_extensions_are_refused() {
    let name = server_name_extension(b"a.test");
    assert_rejected(
        &hello_with(&[(SERVER_NAME, &name), (SERVER_NAME, &name)]),
        BadHello::Extensions,
    );
    assert_rejected(&hello_with(&[(99, b""), (99, b"")]), BadHello::Extensions);
    let many: Vec<(u16, &[u8])> = (100..229).map(|kind| (kind, &b""[..])).collect();
    assert_rejected(&hello_with(&many), BadHello::Extensions);
    assert!(read(&hello_with(&many[1..])).is_ok());

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
        &server_name_extension(b""),
        &server_name_extension(b"a\0b"),
        &server_name_extension(b"a b"),
        &server_name_extension("gr\u{fc}n".as_bytes()),
        &server_name_extension(&[b'a'; 256]),
    ] {
        assert_rejected(&hello_with(&[(SERVER_NAME, data)]), BadHello::ServerName);
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
        assert_rejected(&hello_with(&[(PROTOCOLS, data)]), BadHello::Protocols);
    }
}

#[tokio::test]
async fn slow_hello_is_awaited_and_connection_stays_writable() {
    let whole = rustls_hello("slow.test", &[], false);
    let (mut client_side, server_side) = duplex(1);
    let (already, rest) = whole.split_at(3);
    let start = tokio::spawn(read_start(server_side, Bytes::copy_from_slice(already)));
    client_side.write_all(rest).await.unwrap();
    let ConnectionStart::Tls { hello, mut io } = start.await.unwrap().unwrap() else {
        panic!("expected TLS");
    };
    assert_eq!(hello.server_name.as_deref(), Some("slow.test"));
    io.write_all(b"!").await.unwrap();
    assert_eq!(client_side.read_u8().await.unwrap(), b'!');
    let mut replayed = vec![0; whole.len()];
    io.read_exact(&mut replayed).await.unwrap();
    assert_eq!(replayed, whole);
    let (_, recorded) = io.into_inner();
    assert!(recorded.is_empty());
}

#[tokio::test]
async fn handshake_succeeds_after_hello_was_read() {
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

    let (client_side, server_side) = duplex(64);
    let client_task = tokio::spawn(async move {
        let name = ServerName::try_from("whole.test").unwrap();
        let mut tls = TlsConnector::from(Arc::new(client))
            .connect(name, client_side)
            .await
            .unwrap();
        tls.read_u8().await.unwrap()
    });
    let ConnectionStart::Tls { io, .. } = read_start(server_side, Bytes::new()).await.unwrap()
    else {
        panic!("expected TLS");
    };
    let mut tls = TlsAcceptor::from(Arc::new(server))
        .accept(io)
        .await
        .unwrap();
    tls.write_all(b"!").await.unwrap();
    tls.flush().await.unwrap();
    assert_eq!(client_task.await.unwrap(), b'!');
}

#[tokio::test]
async fn watched_connection_replays_every_byte() {
    let (mut client, server) = duplex(MAX_HELLO * 2);
    let mut replay = ReplayStream::new(server, Bytes::from_static(b"hello"));
    client.write_all(b" there").await.unwrap();
    // The future is dropped before it resolves.
    let left = tokio::time::timeout(std::time::Duration::ZERO, replay.client_closed()).await;
    assert!(left.is_err(), "the client is still connected");
    client.write_all(b" and here").await.unwrap();
    drop(client);
    replay.client_closed().await;
    let mut bytes = Vec::new();
    replay.read_to_end(&mut bytes).await.unwrap();
    assert_eq!(bytes, b"hello there and here");
}

#[tokio::test(start_paused = true)]
async fn watched_connection_records_up_to_a_limit() {
    let (mut client, server) = duplex(MAX_HELLO * 2);
    let mut replay = ReplayStream::new(server, Bytes::new());
    client.write_all(&vec![b'x'; MAX_HELLO * 2]).await.unwrap();
    drop(client);
    let left =
        tokio::time::timeout(std::time::Duration::from_secs(60), replay.client_closed()).await;
    assert!(left.is_err(), "the end of the stream was not read");
    assert!(replay.recorded.len() < MAX_HELLO + FIRST_READ);
    let mut bytes = Vec::new();
    replay.read_to_end(&mut bytes).await.unwrap();
    assert_eq!(bytes.len(), MAX_HELLO * 2);
}
