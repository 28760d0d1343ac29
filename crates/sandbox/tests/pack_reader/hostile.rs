//! Packs that no git would make.

use std::io::Write as _;

use flate2::Compression;
use flate2::write::ZlibEncoder;
use sandbox::pack_reader::{PackBounds, PackReaderError, PackReaderLimits, PackReaderPool};
use sha1::{Digest, Sha1};

use crate::fixture::{Repo, file, pack_reader, read};

const BLOB: u8 = 3;
const OFFSET_DELTA: u8 = 6;

fn entry_header(kind: u8, size: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut rest = size >> 4;
    let mut byte = (kind << 4) | (size & 15) as u8;
    while rest > 0 {
        bytes.push(byte | 0x80);
        byte = (rest & 0x7f) as u8;
        rest >>= 7;
    }
    bytes.push(byte);
    bytes
}

fn compress(bytes: &[u8]) -> Vec<u8> {
    let mut to = ZlibEncoder::new(Vec::new(), Compression::best());
    to.write_all(bytes).unwrap();
    to.finish().unwrap()
}

fn blob(bytes: &[u8]) -> Vec<u8> {
    [entry_header(BLOB, bytes.len()), compress(bytes)].concat()
}

/// A delta whose base begins `distance` bytes before the delta.
fn offset_delta(distance: usize, delta: &[u8]) -> Vec<u8> {
    let mut offset = vec![(distance & 0x7f) as u8];
    let mut rest = distance >> 7;
    while rest > 0 {
        rest -= 1;
        offset.insert(0, 0x80 | (rest & 0x7f) as u8);
        rest >>= 7;
    }
    [
        entry_header(OFFSET_DELTA, delta.len()),
        offset,
        compress(delta),
    ]
    .concat()
}

fn pack_with_count(count: u32, entries: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = b"PACK\0\0\0\x02".to_vec();
    bytes.extend(count.to_be_bytes());
    bytes.extend(entries.concat());
    let sum = Sha1::digest(&bytes);
    bytes.extend(&sum);
    bytes
}

fn pack(entries: &[Vec<u8>]) -> Vec<u8> {
    pack_with_count(u32::try_from(entries.len()).unwrap(), entries)
}

fn varint(mut value: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value > 0x7f {
        bytes.push((value & 0x7f) as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

async fn refusal(bytes: &[u8]) -> PackReaderError {
    let repo = Repo::new();
    let mut context = repo.context(&repo.zero());
    context.updates.clear();
    read(&context, file(bytes)).await.unwrap_err()
}

#[tokio::test]
async fn malformed_packs_are_refused() {
    let good = pack(&[blob(b"hello"), blob(b"world")]);
    let truncated = |from: usize| good[..from].to_vec();
    let mut flipped = good.clone();
    flipped[20] ^= 0x40;
    let mut wrong_checksum = good.clone();
    *wrong_checksum.last_mut().unwrap() ^= 1;
    let mut reserved_type = pack(&[blob(b"hello")]);
    reserved_type[12] = (5 << 4) | 5;
    let trailing = [good.clone(), b"x".to_vec()].concat();
    let smaller = pack(&[[entry_header(BLOB, 6), compress(b"hello")].concat()]);
    let larger = pack(&[[entry_header(BLOB, 4), compress(b"hello")].concat()]);
    let endless = pack(&[vec![0xbf; 40]]);
    for (bytes, why) in [
        (Vec::new(), "nothing"),
        (b"PACK".to_vec(), "a truncated header"),
        (b"PACK\0\0\0\x09\0\0\0\0".to_vec(), "an unknown version"),
        (truncated(13), "truncated in an object"),
        (truncated(good.len() - 5), "truncated in the checksum"),
        (flipped, "a flipped bit"),
        (wrong_checksum, "a wrong checksum"),
        (reserved_type, "a reserved type"),
        (trailing, "trailing data"),
        (smaller, "an object smaller than its size"),
        (larger, "an object larger than its size"),
        (endless, "a size without end"),
        (
            pack_with_count(3, &[blob(b"a"), blob(b"b")]),
            "fewer objects than the count",
        ),
        (
            pack_with_count(1, &[blob(b"a"), blob(b"b")]),
            "more objects than the count",
        ),
        (pack(&[offset_delta(5, &[0, 0])]), "a base before the pack"),
        (
            pack(&[blob(b"a"), offset_delta(3, &[1, 1, 1, b'x'])]),
            "a base that is no object",
        ),
        (
            pack(&[blob(b"a"), offset_delta(0, &[1, 1, 1, b'x'])]),
            "a delta based on itself",
        ),
    ] {
        let error = refusal(&bytes).await;
        assert!(
            matches!(error, PackReaderError::Malformed(_)),
            "{why}: {error:?}"
        );
    }
    let tree = [entry_header(2, 5), compress(b"12345")].concat();
    let commit = [entry_header(1, 5), compress(b"12345")].concat();
    let tag = [entry_header(4, 5), compress(b"12345")].concat();
    for entry in [tree, commit, tag] {
        let error = refusal(&pack(&[entry])).await;
        assert!(error.to_string().contains("malformed"), "{error}");
    }
}

fn bounded(pack: PackBounds) -> PackReaderPool {
    pack_reader().with_limits(PackReaderLimits {
        pack,
        ..PackReaderLimits::default()
    })
}

async fn assert_too_much(bytes: &[u8], bounds: PackBounds) {
    let repo = Repo::new();
    let mut context = repo.context(&repo.zero());
    context.updates.clear();
    let reader = bounded(bounds);
    let result = reader.read(&context, Some(file(bytes)), Vec::new()).await;
    let error = result.unwrap_err();
    assert!(matches!(error, PackReaderError::TooMuch(_)), "{error:?}");
}

#[tokio::test]
async fn decompression_bombs_are_refused() {
    let bounds = PackBounds {
        objects: 1000,
        object: 2 << 20,
        whole: 1 << 20,
        held: 4 << 20,
        total: 16 << 20,
    };
    // Many objects by the count in the header.
    assert_too_much(&pack_with_count(1001, &[]), bounds).await;
    // One large object of zeros.
    assert_too_much(&pack(&[blob(&vec![0; (2 << 20) + 1])]), bounds).await;
    // Many objects that are small enough each.
    let zeros = blob(&vec![0; 2 << 20]);
    assert_too_much(&pack(&vec![zeros; 9]), bounds).await;
    // A small delta that makes a large object.
    let base = vec![7; 0xffff];
    let mut delta = [varint(base.len()), varint(0xffff * 20)].concat();
    for _ in 0..20 {
        delta.extend([0xb0, 0xff, 0xff]);
    }
    let entry = blob(&base);
    let distance = entry.len();
    assert_too_much(&pack(&[entry, offset_delta(distance, &delta)]), bounds).await;
    // A base that is too large to be held in memory.
    let entry = blob(&vec![0; 2 << 20]);
    let distance = entry.len();
    let delta = [varint(2 << 20), varint(1), vec![1, b'x']].concat();
    assert_too_much(&pack(&[entry, offset_delta(distance, &delta)]), bounds).await;
    // Deltas with large results, which are together over the limit.
    let base = vec![7; 1 << 20];
    let mut copy = [varint(1 << 20), varint(1 << 20)].concat();
    for offset in 0..16_u32 {
        copy.extend([0x84, offset.to_le_bytes()[0]]);
    }
    let mut entries = vec![blob(&base)];
    let mut distance = entries[0].len();
    for _ in 0..20 {
        let entry = offset_delta(distance, &copy);
        distance += entry.len();
        entries.push(entry);
    }
    assert_too_much(&pack(&entries), bounds).await;
}

/// A chain of a thousand deltas, and one base with a thousand deltas: neither needs much memory.
#[tokio::test]
async fn long_and_broad_delta_trees_are_read() {
    let repo = Repo::new();
    let mut context = repo.context(&repo.zero());
    context.updates.clear();
    let bounds = PackBounds {
        held: 64 << 10,
        ..PackBounds::default()
    };
    let base = vec![7; 20_000];
    let delta = |offset: u32| {
        let mut delta = [varint(20_000), varint(20_000), vec![0xb0]].concat();
        delta.extend([
            (20_000_u32 - 4).to_le_bytes()[0],
            (20_000_u32 - 4).to_le_bytes()[1],
            4,
        ]);
        delta.extend(offset.to_le_bytes());
        delta
    };
    let first = blob(&base);
    let mut chain = vec![first.clone()];
    let mut broad = vec![first];
    let (mut last, mut all) = (chain[0].len(), broad[0].len());
    for offset in 0..1000 {
        let next = offset_delta(last, &delta(offset));
        last = next.len();
        chain.push(next);
        let next = offset_delta(all, &delta(offset));
        all += next.len();
        broad.push(next);
    }
    for entries in [chain, broad] {
        let reader = bounded(bounds);
        let result = reader.read(&context, Some(file(&pack(&entries))), Vec::new());
        assert_eq!(result.await.unwrap().objects, 1001);
    }
}

#[tokio::test]
async fn object_sent_twice_is_read_twice() {
    let repo = Repo::new();
    let mut context = repo.context(&repo.zero());
    context.updates.clear();
    let base = vec![b'a'; 100];
    let delta = [varint(100), varint(1), vec![1, b'x']].concat();
    let mut named = entry_header(7, delta.len());
    let mut hasher = Sha1::new();
    hasher.update(b"blob 100\0");
    hasher.update(&base);
    named.extend(&hasher.finalize());
    named.extend(compress(&delta));
    let bytes = pack(&[named, blob(&base), blob(&base)]);
    assert_eq!(read(&context, file(&bytes)).await.unwrap().objects, 3);
}

#[tokio::test]
async fn ids_of_another_format_are_refused() {
    let repo = Repo::new();
    let tip = repo.commit("x");
    let mut context = repo.context(&tip);
    context.format = policy::push::ObjectFormat::Sha256;
    let error = read(&context, repo.pack(&["HEAD"])).await.unwrap_err();
    assert!(matches!(error, PackReaderError::Malformed(_)), "{error:?}");
}

#[tokio::test]
async fn tree_with_too_many_spellings_is_refused() {
    let repo = Repo::new();
    let blob = repo.git_with(&["hash-object", "-w", "--stdin"], b"x");
    let listing = |names: &mut dyn Iterator<Item = String>, what: &str| {
        let lines: Vec<String> = names.map(|name| format!("{what}\t{name}")).collect();
        repo.git_with(&["mktree"], lines.join("\n").as_bytes())
    };
    let spellings = |word: &'static str| (0..60).map(move |bits| format!("{word}~{bits}"));
    let inner = listing(&mut spellings("workfl"), &format!("100644 blob {blob}"));
    let outer = listing(&mut spellings("github"), &format!("040000 tree {inner}"));
    let commit = repo.git(&["commit-tree", "-m", "x", &outer]);
    let error = read(&repo.context(&commit), repo.pack(&[&commit]))
        .await
        .unwrap_err();
    assert!(matches!(error, PackReaderError::TooMuch(_)), "{error:?}");
}
