//! Property tests: random pipelines, and random damage to them.

use proptest::collection::vec;
use proptest::prelude::{BoxedStrategy, Just, Strategy, any, prop_oneof, proptest};

use super::{GuardOutput, fuzz_check};

fn body() -> impl Strategy<Value = Vec<u8>> {
    vec(
        prop_oneof![any::<u8>(), Just(b'\r'), Just(b'\n'), Just(b'0')],
        0..64,
    )
}

fn message() -> BoxedStrategy<Vec<u8>> {
    let line = prop_oneof![
        "(GET|POST|PATCH|X-Y) /[a-z%|?=&]{0,20} HTTP/1\\.1",
        "(GET|PUT) http://[a-z]{1,9}\\.test(:80)?/[a-z]{0,9} HTTP/1\\.1",
        Just("OPTIONS * HTTP/1.1".to_owned()),
    ];
    let fields = vec("X-[A-Za-z0-9-]{0,12}:[ \t]{0,2}[ -~\t]{0,20}", 0..6);
    let content = prop_oneof![
        Just((String::new(), Vec::new())),
        body().prop_map(|body| (format!("Content-Length: {}\r\n", body.len()), body)),
        (vec(body(), 0..4), vec("X-[a-z]{1,9}: [a-z]{0,9}", 0..3)).prop_map(
            |(chunks, trailers)| {
                let mut body = Vec::new();
                for chunk in chunks.iter().filter(|chunk| !chunk.is_empty()) {
                    body.extend(format!("{:X}\r\n", chunk.len()).bytes());
                    body.extend(chunk);
                    body.extend(b"\r\n");
                }
                body.extend(b"0\r\n");
                for trailer in trailers {
                    body.extend(format!("{trailer}\r\n").bytes());
                }
                body.extend(b"\r\n");
                ("transfer-encoding: Chunked\r\n".to_owned(), body)
            }
        ),
    ];
    (line, fields, content)
        .prop_map(|(line, fields, (framing, body))| {
            let fields: String = fields.iter().map(|field| format!("{field}\r\n")).collect();
            let mut message =
                format!("{line}\r\n{framing}{fields}Host: a.test\r\n\r\n").into_bytes();
            message.extend(body);
            message
        })
        .boxed()
}

proptest! {
    #[test]
    fn random_pipelines_pass_unchanged_and_are_counted(
        messages in vec(message(), 0..6),
        step in 1usize..100,
    ) {
        let bytes = messages.concat();
        let seen = GuardOutput::run(&bytes, step);
        assert_eq!(seen.fault, None);
        assert_eq!(seen.out, bytes);
        // A fault after the messages has the next number.
        let mut bytes = bytes;
        bytes.extend(b"\x16");
        let seen = GuardOutput::run(&bytes, step);
        assert_eq!(seen.fault.map(|(ordinal, _)| ordinal), Some(messages.len() as u64));
        fuzz_check(&bytes);
    }

    #[test]
    fn damaged_pipelines_give_the_same_result_in_every_split(
        messages in vec(message(), 1..4),
        damage in vec((any::<proptest::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut bytes = messages.concat();
        for (index, byte) in damage {
            let at = index.index(bytes.len());
            bytes[at] = byte;
        }
        fuzz_check(&bytes);
    }

    #[test]
    fn arbitrary_bytes_give_the_same_result_in_every_split(bytes in vec(any::<u8>(), 0..200)) {
        fuzz_check(&bytes);
    }
}
