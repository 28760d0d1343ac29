//! Object ids and pack checksums.

use policy::push::ObjectFormat;
use policy::refs::ObjectId;
use sha1::Sha1;
use sha2::{Digest, Sha256};

/// An incremental SHA-1 or SHA-256. A SHA-1 collision gains nothing here: every object is read
/// whatever its id, and the server compares with the objects that it has.
#[derive(Clone)]
pub(super) enum Hasher {
    Sha1(Sha1),
    Sha256(Sha256),
}

impl Hasher {
    pub(super) fn new(format: ObjectFormat) -> Self {
        match format {
            ObjectFormat::Sha1 => Hasher::Sha1(Sha1::new()),
            ObjectFormat::Sha256 => Hasher::Sha256(Sha256::new()),
        }
    }

    pub(super) fn update(&mut self, bytes: &[u8]) {
        match self {
            Hasher::Sha1(hasher) => hasher.update(bytes),
            Hasher::Sha256(hasher) => hasher.update(bytes),
        }
    }

    pub(super) fn finish(self) -> ObjectId {
        match self {
            Hasher::Sha1(hasher) => ObjectId::Sha1(hasher.finalize().into()),
            Hasher::Sha256(hasher) => ObjectId::Sha256(hasher.finalize().into()),
        }
    }
}

/// The length of an id in bytes.
pub(super) const fn id_length(format: ObjectFormat) -> usize {
    match format {
        ObjectFormat::Sha1 => 20,
        ObjectFormat::Sha256 => 32,
    }
}

/// Reads an id in the binary form of trees and packs.
pub(super) fn read_id(bytes: &[u8]) -> Option<ObjectId> {
    match bytes.len() {
        20 => bytes.try_into().ok().map(ObjectId::Sha1),
        32 => bytes.try_into().ok().map(ObjectId::Sha256),
        _ => None,
    }
}
