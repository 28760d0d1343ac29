//! Packs that no git would make.

use std::io::Write as _;

use flate2::Compression;
use flate2::write::ZlibEncoder;
use sandbox::pack_reader::{PackBounds, PackReaderError, PackReaderLimits, PackReaderPool};
use sha1::{Digest, Sha1};

use crate::fixture::{Repo, file, pack_reader, read};

const BLOB: u8 = 3;
const OFFSET_DELTA: u8 = 6;

fn head(kind: u8, size: usize) -> Vec<u8> {
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

fn squeeze(bytes: &[u8]) -> Vec<u8> {
    let mut to = ZlibEncoder::new(Vec::new(), Compression::best());
    to.write_all(bytes).unwrap();
    to.finish().unwrap()
}

fn blob(bytes: &[u8]) -> Vec<u8> {
    [head(BLOB, bytes.len()), squeeze(bytes)].concat()
}

/// A delta whose base begins `back` bytes before it, for `back` below 128.
fn offset_delta(back: usize, delta: &[u8]) -> Vec<u8> {
    let mut offset = vec![(back & 0x7f) as u8];
    let mut rest = back >> 7;
    while rest > 0 {
        rest -= 1;
        offset.insert(0, 0x80 | (rest & 0x7f) as u8);
        rest >>= 7;
    }
    [head(OFFSET_DELTA, delta.len()), offset, squeeze(delta)].concat()
}

fn pack_counting(count: u32, entries: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = b"PACK\0\0\0\x02".to_vec();
    bytes.extend(count.to_be_bytes());
    bytes.extend(entries.concat());
    let sum = Sha1::digest(&bytes);
    bytes.extend(&sum);
    bytes
}

fn pack(entries: &[Vec<u8>]) -> Vec<u8> {
    pack_counting(u32::try_from(entries.len()).unwrap(), entries)
}

fn number(mut value: usize) -> Vec<u8> {
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
    let mut case = repo.case(&repo.zero());
    case.updates.clear();
    read(&case, file(bytes)).await.unwrap_err()
}

#[tokio::test]
async fn malformed_packs_are_refused() {
    let good = pack(&[blob(b"hello"), blob(b"world")]);
    let cut = |from: usize| good[..from].to_vec();
    let mut flipped = good.clone();
    flipped[20] ^= 0x40;
    let mut other_sum = good.clone();
    *other_sum.last_mut().unwrap() ^= 1;
    let mut of_type_five = pack(&[blob(b"hello")]);
    of_type_five[12] = (5 << 4) | 5;
    let trailing = [good.clone(), b"x".to_vec()].concat();
    let smaller = pack(&[[head(BLOB, 6), squeeze(b"hello")].concat()]);
    let larger = pack(&[[head(BLOB, 4), squeeze(b"hello")].concat()]);
    let endless = pack(&[vec![0xbf; 40]]);
    for (bytes, why) in [
        (Vec::new(), "nothing"),
        (b"PACK".to_vec(), "a beginning"),
        (
            b"PACK\0\0\0\x09\0\0\0\0".to_vec(),
            "a version of the future",
        ),
        (cut(13), "cut in an object"),
        (cut(good.len() - 5), "cut in its sum"),
        (flipped, "a flipped bit"),
        (other_sum, "another sum"),
        (of_type_five, "a reserved type"),
        (trailing, "something behind it"),
        (smaller, "an object smaller than it says"),
        (larger, "an object larger than it says"),
        (endless, "a size without end"),
        (
            pack_counting(3, &[blob(b"a"), blob(b"b")]),
            "fewer than it says",
        ),
        (
            pack_counting(1, &[blob(b"a"), blob(b"b")]),
            "more than it says",
        ),
        (pack(&[offset_delta(5, &[0, 0])]), "a base before the pack"),
        (
            pack(&[blob(b"a"), offset_delta(3, &[1, 1, 1, b'x'])]),
            "a base that is no object",
        ),
        (
            pack(&[blob(b"a"), offset_delta(0, &[1, 1, 1, b'x'])]),
            "its own base",
        ),
    ] {
        let error = refusal(&bytes).await;
        assert!(
            matches!(error, PackReaderError::Malformed(_)),
            "{why}: {error:?}"
        );
    }
    let tree = [head(2, 5), squeeze(b"12345")].concat();
    let commit = [head(1, 5), squeeze(b"12345")].concat();
    let tag = [head(4, 5), squeeze(b"12345")].concat();
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

async fn too_much(bytes: &[u8], bounds: PackBounds) {
    let repo = Repo::new();
    let mut case = repo.case(&repo.zero());
    case.updates.clear();
    let reader = bounded(bounds);
    let result = reader.read(&case, Some(file(bytes)), Vec::new()).await;
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
    too_much(&pack_counting(1001, &[]), bounds).await;
    // One large object of zeros.
    too_much(&pack(&[blob(&vec![0; (2 << 20) + 1])]), bounds).await;
    // Many objects that are small enough each.
    let zeros = blob(&vec![0; 2 << 20]);
    too_much(&pack(&vec![zeros; 9]), bounds).await;
    // A small delta that makes a large object.
    let base = vec![7; 0xffff];
    let mut delta = [number(base.len()), number(0xffff * 20)].concat();
    for _ in 0..20 {
        delta.extend([0xb0, 0xff, 0xff]);
    }
    let entry = blob(&base);
    let back = entry.len();
    too_much(&pack(&[entry, offset_delta(back, &delta)]), bounds).await;
    // A base that is too large to be held in memory.
    let entry = blob(&vec![0; 2 << 20]);
    let back = entry.len();
    let delta = [number(2 << 20), number(1), vec![1, b'x']].concat();
    too_much(&pack(&[entry, offset_delta(back, &delta)]), bounds).await;
    // Deltas that each make a small object of a large one: together over the limit.
    let base = vec![7; 1 << 20];
    let mut copy = [number(1 << 20), number(1 << 20)].concat();
    for place in 0..16_u32 {
        copy.extend([0x84, place.to_le_bytes()[0]]);
    }
    let mut entries = vec![blob(&base)];
    let mut back = entries[0].len();
    for _ in 0..20 {
        let entry = offset_delta(back, &copy);
        back += entry.len();
        entries.push(entry);
    }
    too_much(&pack(&entries), bounds).await;
}

/// A chain of a thousand deltas, and one base with a thousand deltas: neither needs much memory.
#[tokio::test]
async fn long_and_broad_delta_trees_are_read() {
    let repo = Repo::new();
    let mut case = repo.case(&repo.zero());
    case.updates.clear();
    let bounds = PackBounds {
        held: 64 << 10,
        ..PackBounds::default()
    };
    let base = vec![7; 20_000];
    let delta = |place: u32| {
        let mut delta = [number(20_000), number(20_000), vec![0xb0]].concat();
        delta.extend([
            (20_000_u32 - 4).to_le_bytes()[0],
            (20_000_u32 - 4).to_le_bytes()[1],
            4,
        ]);
        delta.extend(place.to_le_bytes());
        delta
    };
    let first = blob(&base);
    let mut chain = vec![first.clone()];
    let mut broad = vec![first];
    let (mut last, mut all) = (chain[0].len(), broad[0].len());
    for place in 0..1000 {
        let next = offset_delta(last, &delta(place));
        last = next.len();
        chain.push(next);
        let next = offset_delta(all, &delta(place));
        all += next.len();
        broad.push(next);
    }
    for entries in [chain, broad] {
        let reader = bounded(bounds);
        let result = reader.read(&case, Some(file(&pack(&entries))), Vec::new());
        assert_eq!(result.await.unwrap().objects, 1001);
    }
}

#[tokio::test]
async fn object_sent_twice_is_read_twice() {
    let repo = Repo::new();
    let mut case = repo.case(&repo.zero());
    case.updates.clear();
    let base = vec![b'a'; 100];
    let delta = [number(100), number(1), vec![1, b'x']].concat();
    let mut named = head(7, delta.len());
    let mut hasher = Sha1::new();
    hasher.update(b"blob 100\0");
    hasher.update(&base);
    named.extend(&hasher.finalize());
    named.extend(squeeze(&delta));
    let bytes = pack(&[named, blob(&base), blob(&base)]);
    assert_eq!(read(&case, file(&bytes)).await.unwrap().objects, 3);
}

#[tokio::test]
async fn ids_of_another_format_are_refused() {
    let repo = Repo::new();
    let tip = repo.commit("x");
    let mut case = repo.case(&tip);
    case.format = policy::push::ObjectFormat::Sha256;
    let error = read(&case, repo.pack(&["HEAD"])).await.unwrap_err();
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
    let spelt = |word: &'static str| (0..60).map(move |bits| format!("{word}~{bits}"));
    let inner = listing(&mut spelt("workfl"), &format!("100644 blob {blob}"));
    let outer = listing(&mut spelt("github"), &format!("040000 tree {inner}"));
    let commit = repo.git(&["commit-tree", "-m", "x", &outer]);
    let error = read(&repo.case(&commit), repo.pack(&[&commit]))
        .await
        .unwrap_err();
    assert!(matches!(error, PackReaderError::TooMuch(_)), "{error:?}");
}
