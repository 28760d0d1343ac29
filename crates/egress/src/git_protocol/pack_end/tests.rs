use std::io::Write;

use flate2::Compression;
use flate2::write::ZlibEncoder;
use proptest::prelude::*;

use super::*;

fn zlib_compress(content: &[u8], level: u32) -> Vec<u8> {
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::new(level));
    encoder.write_all(content).unwrap();
    encoder.finish().unwrap()
}

/// The header of an object.
fn entry_header(kind: u8, mut size: u64) -> Vec<u8> {
    let mut byte = (kind << 4) | (size & 15) as u8;
    size >>= 4;
    let mut out = Vec::new();
    while size > 0 {
        out.push(byte | 0x80);
        byte = (size & 0x7f) as u8;
        size >>= 7;
    }
    out.push(byte);
    out
}

fn entry(kind: u8, base: &[u8], content: &[u8], level: u32) -> Vec<u8> {
    let packed = zlib_compress(content, level);
    [
        entry_header(kind, content.len() as u64),
        base.to_vec(),
        packed,
    ]
    .concat()
}

fn with_hash(format: ObjectFormat, mut pack: Vec<u8>) -> Vec<u8> {
    let algorithm = match format {
        ObjectFormat::Sha1 => &SHA1_FOR_LEGACY_USE_ONLY,
        ObjectFormat::Sha256 => &SHA256,
    };
    let sum = digest::digest(algorithm, &pack);
    pack.extend_from_slice(sum.as_ref());
    pack
}

fn complete_pack(format: ObjectFormat, entries: &[Vec<u8>]) -> Vec<u8> {
    pack(format, u32::try_from(entries.len()).unwrap(), entries)
}

fn pack(format: ObjectFormat, count: u32, entries: &[Vec<u8>]) -> Vec<u8> {
    let begin = [&b"PACK\0\0\0\x02"[..], &count.to_be_bytes()].concat();
    with_hash(format, [begin, entries.concat()].concat())
}

fn entries(format: ObjectFormat) -> Vec<Vec<u8>> {
    let name = vec![
        0x99;
        match format {
            ObjectFormat::Sha1 => 20,
            ObjectFormat::Sha256 => 32,
        }
    ];
    let noise: Vec<u8> = (0..200_000_u32)
        .map(|n| n.wrapping_mul(2_654_435_761).to_be_bytes()[1])
        .collect();
    vec![
        entry(1, b"", b"tree 1\n", 6),
        entry(3, b"", b"", 6),
        entry(3, b"", &noise, 0),
        // An object that fills the buffer for unpacked bytes exactly.
        entry(3, b"", &vec![b'x'; BUFFER_BYTES], 9),
        entry(3, b"", &vec![b'x'; 3 * BUFFER_BYTES], 9),
        entry(6, &[0x81, 0x05], b"difference", 6),
        entry(7, &name, b"another", 6),
        entry(4, b"", b"tag", 1),
    ]
}

#[test]
fn pack_end_is_found_exactly() {
    for format in [ObjectFormat::Sha1, ObjectFormat::Sha256] {
        let all = entries(format);
        let whole = complete_pack(format, &all);
        for piece in [1, 7, 4096, usize::MAX] {
            assert_eq!(fuzz_check(format, &whole, piece), Ok(true), "{piece}");
        }
        for end in [0, 11, 12, 13, 40, whole.len() / 2, whole.len() - 1] {
            assert_eq!(fuzz_check(format, &whole[..end], 97), Ok(false), "{end}");
        }
        let more = [whole.as_slice(), b"x"].concat();
        for piece in [1, usize::MAX] {
            assert_eq!(
                fuzz_check(format, &more, piece),
                Err(PackEndError::Trailing)
            );
        }
        assert_eq!(fuzz_check(format, &pack(format, 0, &[]), 5), Ok(true));
    }
}

#[test]
fn inconsistent_pack_is_refused() {
    let sha1 = ObjectFormat::Sha1;
    let one = entry(3, b"", b"content", 6);
    let many = std::slice::from_ref(&one);
    let forged = |declared: u64, content: &[u8]| {
        let entry = [entry_header(3, declared), zlib_compress(content, 6)].concat();
        pack(sha1, 1, &[entry])
    };
    let mut wrong = pack(sha1, 1, many);
    *wrong.last_mut().unwrap() ^= 1;
    let another = [b"PACK\0\0\0\x04\0\0\0\0".to_vec()].concat();
    for (bytes, error) in [
        // The count is too small: the second object is read as the hash.
        (
            pack(sha1, 1, &[one.clone(), one.clone()]),
            PackEndError::Hash,
        ),
        // The count is zero: the object is read as the hash.
        (pack(sha1, 0, many), PackEndError::Hash),
        (wrong, PackEndError::Hash),
        (another, PackEndError::Header),
        (b"GIF89a______".to_vec(), PackEndError::Header),
        (forged(8, b"content"), PackEndError::Stream),
        (forged(6, b"content"), PackEndError::Stream),
        (forged(0, b"content"), PackEndError::Stream),
        (forged(100, &vec![0; 10 << 20]), PackEndError::Stream),
        (forged((1 << 30) + 1, b""), PackEndError::TooLarge),
        (
            [&b"PACK\0\0\0\x02"[..], &[0xff; 4]].concat(),
            PackEndError::TooLarge,
        ),
        (pack(sha1, 1, &[entry_header(0, 1)]), PackEndError::Entry),
        (pack(sha1, 1, &[entry_header(5, 1)]), PackEndError::Entry),
        (pack(sha1, 1, &[vec![0xff; 40]]), PackEndError::Entry),
        (
            pack(sha1, 1, &[[entry_header(6, 1), vec![0xff; 40]].concat()]),
            PackEndError::Entry,
        ),
        (
            pack(sha1, 1, &[[entry_header(3, 5), vec![0; 40]].concat()]),
            PackEndError::Stream,
        ),
    ] {
        for piece in [1, usize::MAX] {
            assert_eq!(fuzz_check(sha1, &bytes, piece), Err(error), "{bytes:02x?}");
        }
    }
}

#[test]
fn endless_zlib_stream_is_read_in_constant_memory() {
    // Empty stored blocks, none of which is the last one.
    let begin = pack(ObjectFormat::Sha1, 1, &[entry_header(3, 5)]);
    let mut end = PackEndFinder::new(ObjectFormat::Sha1);
    end.feed(&begin[..begin.len() - 20]).unwrap();
    end.feed(&[0x78, 0x01]).unwrap();
    for _ in 0..100_000 {
        end.feed(&[0, 0, 0, 0xff, 0xff]).unwrap();
    }
    assert!(!end.is_done());
}

#[test]
fn total_unpacked_size_is_limited() {
    // The declared sizes count, before anything is unpacked.
    let large = entry(3, b"", &vec![0; 1 << 20], 9);
    let mut end = PackEndFinder::new(ObjectFormat::Sha1);
    end.feed(b"PACK\0\0\0\x02\0\x01\0\0").unwrap();
    end.unpacked = MAX_UNPACKED_BYTES - (1 << 20);
    end.feed(&large).unwrap();
    assert_eq!(end.feed(&large), Err(PackEndError::TooLarge));
}

proptest! {
    #[test]
    fn result_does_not_depend_on_chunk_boundaries(
        contents in prop::collection::vec((1..5_u8, prop::collection::vec(any::<u8>(), 0..300)), 0..6),
        piece in 1..64_usize,
        flip in any::<prop::sample::Index>(),
        by in 0..2_u8,
    ) {
        let all: Vec<_> = contents.iter().map(|(kind, content)| entry(*kind, b"", content, 6)).collect();
        let mut bytes = complete_pack(ObjectFormat::Sha1, &all);
        let at = flip.index(bytes.len());
        bytes[at] ^= by;
        let whole = fuzz_check(ObjectFormat::Sha1, &bytes, usize::MAX);
        prop_assert_eq!(fuzz_check(ObjectFormat::Sha1, &bytes, piece), whole);
        prop_assert!(by == 1 || whole == Ok(true));
    }

    #[test]
    fn arbitrary_objects_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let begun = [b"PACK\0\0\0\x02\0\0\0\x03".as_slice(), &bytes].concat();
        let whole = fuzz_check(ObjectFormat::Sha256, &begun, usize::MAX);
        prop_assert_eq!(fuzz_check(ObjectFormat::Sha256, &begun, 3), whole);
    }
}
