//! Applies a delta to its base object (gitformat-pack(5), 'Deltified representation').

use super::error::PackError;

const DOES_NOT_FIT: PackError = PackError::Malformed("a delta does not fit its base");

/// Returns the object that `delta` makes of `base`, at most `max_bytes` bytes.
pub(super) fn apply(base: &[u8], delta: &[u8], max_bytes: u64) -> Result<Vec<u8>, PackError> {
    let mut delta = Operations(delta);
    if delta.read_number()? != base.len() as u64 {
        return Err(DOES_NOT_FIT);
    }
    let length = delta.read_number()?;
    if length > max_bytes {
        return Err(PackError::TooMuch {
            what: "the size of an object held in memory",
            bound: max_bytes,
        });
    }
    let length = usize::try_from(length).map_err(|_| DOES_NOT_FIT)?;
    let mut object = Vec::with_capacity(length);
    while let Some(piece) = delta.next(base)? {
        if piece.len() > length - object.len() {
            return Err(DOES_NOT_FIT);
        }
        object.extend_from_slice(piece);
    }
    if object.len() == length {
        Ok(object)
    } else {
        Err(DOES_NOT_FIT)
    }
}

/// The rest of a delta.
struct Operations<'a>(&'a [u8]);

impl<'a> Operations<'a> {
    fn byte(&mut self) -> Result<u8, PackError> {
        let (&first, rest) = self.0.split_first().ok_or(DOES_NOT_FIT)?;
        self.0 = rest;
        Ok(first)
    }

    /// Reads a number in groups of seven bits, the lowest first.
    fn read_number(&mut self) -> Result<u64, PackError> {
        let mut number = 0_u64;
        for shift in (0..63).step_by(7) {
            let byte = self.byte()?;
            number |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(number);
            }
        }
        Err(DOES_NOT_FIT)
    }

    /// Returns the next piece of the object; `None` at the end.
    fn next(&mut self, base: &'a [u8]) -> Result<Option<&'a [u8]>, PackError> {
        let Some((&opcode, rest)) = self.0.split_first() else {
            return Ok(None);
        };
        self.0 = rest;
        if opcode & 0x80 == 0 {
            // An insertion of literal bytes; zero is reserved.
            if opcode == 0 || usize::from(opcode) > self.0.len() {
                return Err(DOES_NOT_FIT);
            }
            let (piece, rest) = self.0.split_at(usize::from(opcode));
            self.0 = rest;
            return Ok(Some(piece));
        }
        let mut read_argument = |bits: std::ops::Range<u8>| {
            let mut number = 0_usize;
            for (index, bit) in bits.enumerate() {
                if opcode & (1 << bit) != 0 {
                    number |= usize::from(self.byte()?) << (8 * index);
                }
            }
            Ok::<_, PackError>(number)
        };
        let start = read_argument(0..4)?;
        let length = match read_argument(4..7)? {
            0 => 0x10000,
            length => length,
        };
        let end = start.checked_add(length).ok_or(DOES_NOT_FIT)?;
        base.get(start..end).map(Some).ok_or(DOES_NOT_FIT)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn delta_copies_and_inserts_pieces() {
        // Base of 10, result of 8: copy 3 from 2, insert "ab", copy 3 from 7.
        let delta = [10, 8, 0x91, 2, 3, 2, b'a', b'b', 0x91, 7, 3];
        assert_eq!(apply(b"0123456789", &delta, 100).unwrap(), b"234ab789");
        // Without its bytes a copy is of 64 KiB from the beginning.
        let base = vec![7; 0x10000];
        let delta = [0x80, 0x80, 4, 0x80, 0x80, 4, 0x80];
        assert_eq!(apply(&base, &delta, 1 << 20).unwrap(), base);
    }

    #[test]
    fn delta_that_does_not_fit_is_refused() {
        for (delta, why) in [
            (&[9, 1, 1, b'a'][..], "another base"),
            (&[10, 2, 1, b'a'], "too short"),
            (&[10, 1, 2, b'a', b'b'], "too long"),
            (&[10, 1, 0], "reserved"),
            (&[10, 3, 0x91, 8, 3], "beyond the base"),
            (&[10, 3, 3, b'a'], "truncated insertion"),
            (&[10, 3, 0x91, 8], "truncated copy"),
            (&[10], "truncated header"),
            (&[0xff; 12], "a number without end"),
        ] {
            assert!(apply(b"0123456789", delta, 100).is_err(), "{why}");
        }
        let bomb = [10, 0x80, 0x80, 0x80, 0x80, 0x10, 0x91, 0, 1];
        assert!(matches!(
            apply(b"0123456789", &bomb, 1 << 20),
            Err(PackError::TooMuch { .. })
        ));
    }

    proptest! {
        #[test]
        fn arbitrary_delta_never_panics(delta: Vec<u8>, base: Vec<u8>) {
            if let Ok(object) = apply(&base, &delta, 1 << 16) {
                prop_assert!(object.len() <= 1 << 16);
            }
        }
    }
}
