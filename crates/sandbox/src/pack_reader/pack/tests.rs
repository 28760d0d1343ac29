use std::io::{Seek, Write};

use flate2::Compression;
use flate2::write::ZlibEncoder;
use proptest::prelude::*;

use super::*;

/// The kind, content and id of each visited object.
#[derive(Default)]
struct RecordedObjects(Vec<(Kind, Vec<u8>, Option<ObjectId>)>);

impl Visitor for RecordedObjects {
    fn begin(&mut self, kind: Kind) {
        self.0.push((kind, Vec::new(), None));
    }

    fn bytes(&mut self, piece: &[u8]) {
        self.0.last_mut().unwrap().1.extend_from_slice(piece);
    }

    fn end(&mut self, id: ObjectId) -> Result<(), PackError> {
        self.0.last_mut().unwrap().2 = Some(id);
        Ok(())
    }
}

const BOUNDS: PackBounds = PackBounds {
    objects: 100,
    object: 1 << 20,
    whole: 1 << 16,
    held: 1 << 18,
    total: 1 << 22,
};

fn entry(head: &[u8], bytes: &[u8]) -> Vec<u8> {
    let mut to = ZlibEncoder::new(head.to_vec(), Compression::fast());
    to.write_all(bytes).unwrap();
    to.finish().unwrap()
}

/// A pack with a blob, a delta by offset, a delta by id, a tree and a tag.
fn pack(format: ObjectFormat) -> Vec<u8> {
    let blob = entry(&[0x3a], b"0123456789");
    let delta = [10, 4, 0x91, 2, 3, 1, b'x'];
    let by_offset = entry(&[0x67, u8::try_from(blob.len()).unwrap()], &delta);
    let mut hasher = object_hasher(format, Kind::Blob, 10);
    hasher.update(b"0123456789");
    let base = hasher.finish();
    let mut head = vec![0x77];
    head.extend(base.as_bytes());
    let by_id = entry(&head, &delta);
    let mut bytes = b"PACK\0\0\0\x02\0\0\0\x05".to_vec();
    for part in [
        blob,
        by_offset,
        by_id,
        entry(&[0x25], b"trees"),
        entry(&[0x44], b"tags"),
    ] {
        bytes.extend(part);
    }
    seal(&mut bytes, format);
    bytes
}

fn seal(bytes: &mut Vec<u8>, format: ObjectFormat) {
    let mut sum = Hasher::new(format);
    sum.update(bytes);
    bytes.extend(sum.finish().as_bytes());
}

fn read_bytes(bytes: &[u8], format: ObjectFormat) -> Result<RecordedObjects, PackError> {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(b"before").unwrap();
    let begin = file.stream_position().unwrap();
    file.write_all(bytes).unwrap();
    let mut objects = RecordedObjects::default();
    let mut no_bases = |_: &HashSet<ObjectId>| Ok(BaseObjects::new());
    let count = read(&file, begin, format, &BOUNDS, &mut no_bases, &mut objects)?;
    assert_eq!(count, objects.0.len() as u64);
    Ok(objects)
}

#[test]
fn every_object_is_visited_with_its_id() {
    for format in [ObjectFormat::Sha1, ObjectFormat::Sha256] {
        let objects = read_bytes(&pack(format), format).unwrap();
        let texts: Vec<_> = objects
            .0
            .iter()
            .map(|(_, bytes, _)| bytes.as_slice())
            .collect();
        assert_eq!(
            texts,
            [&b"0123456789"[..], b"trees", b"tags", b"234x", b"234x"]
        );
        assert_eq!(objects.0[3].2, objects.0[4].2);
    }
    // `printf 0123456789 | git hash-object --stdin`
    let objects = read_bytes(&pack(ObjectFormat::Sha1), ObjectFormat::Sha1).unwrap();
    let name = objects.0[0].2.unwrap().to_string();
    assert_eq!(name, "ad471007bd7f5983d273b9584e5629230150fd54");
}

#[test]
fn pack_of_another_object_format_is_refused() {
    assert!(read_bytes(&pack(ObjectFormat::Sha1), ObjectFormat::Sha256).is_err());
    assert!(read_bytes(&pack(ObjectFormat::Sha256), ObjectFormat::Sha1).is_err());
}

proptest! {
    /// Reading a damaged pack ends within its bounds. With a recomputed checksum, the damage gets
    /// past the checksum test.
    #[test]
    fn damaged_pack_never_panics(
        changes in proptest::collection::vec((8_usize..200, any::<u8>()), 1..6),
        cut in proptest::option::of(0_usize..200),
        is_sealed: bool,
    ) {
        let mut bytes = pack(ObjectFormat::Sha1);
        bytes.truncate(bytes.len() - 20);
        for (index, value) in changes {
            if let Some(byte) = bytes.get_mut(index) {
                *byte = value;
            }
        }
        if let Some(cut) = cut {
            bytes.truncate(cut);
        }
        if is_sealed {
            seal(&mut bytes, ObjectFormat::Sha1);
        }
        if let Ok(objects) = read_bytes(&bytes, ObjectFormat::Sha1) {
            prop_assert!(is_sealed);
            prop_assert!(objects.0.iter().all(|(_, _, id)| id.is_some()));
        }
    }
}
