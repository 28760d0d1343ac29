//! Parses the header of a bundle (gitformat-bundle(5)).

use std::io::BufRead;

use policy::push::ObjectFormat;
use policy::refs::{ObjectId, RefName};

use super::error::GitError;

const MAX_HEADER_LINES: usize = 100_000;
const MAX_HEADER_LINE_BYTES: u64 = 4096;

/// The header of a bundle.
#[derive(Debug)]
pub struct BundleHeader {
    /// The object format.
    pub format: ObjectFormat,
    /// The commits that the receiver must have.
    pub prerequisites: Vec<ObjectId>,
    /// The refs and their objects, without HEAD.
    pub refs: Vec<(RefName, ObjectId)>,
    /// The offset of the pack.
    pub pack: u64,
}

impl BundleHeader {
    /// Reads the header of a bundle of version 2 or 3.
    pub fn read(from: &mut dyn BufRead) -> Result<Self, GitError> {
        let mut bundle = Self {
            format: ObjectFormat::Sha1,
            prerequisites: Vec::new(),
            refs: Vec::new(),
            pack: 0,
        };
        for number in 0..MAX_HEADER_LINES {
            let mut line = Vec::new();
            let read =
                std::io::Read::take(&mut *from, MAX_HEADER_LINE_BYTES).read_until(b'\n', &mut line);
            read.map_err(|_| GitError::BadBundle("the bundle cannot be read"))?;
            bundle.pack += line.len() as u64;
            let Some(line) = line.strip_suffix(b"\n") else {
                return Err(GitError::BadBundle("the header of the bundle is truncated"));
            };
            match (number, line) {
                (0, b"# v2 git bundle" | b"# v3 git bundle") => {}
                (0, _) => {
                    return Err(GitError::BadBundle(
                        "the file is no bundle of version 2 or 3",
                    ));
                }
                (_, []) => return Ok(bundle),
                (_, b"@object-format=sha1") => {}
                (_, b"@object-format=sha256") => bundle.format = ObjectFormat::Sha256,
                (_, [b'@', ..]) => {
                    return Err(GitError::BadBundle(
                        "the bundle requires an unknown capability",
                    ));
                }
                (_, [b'-', line @ ..]) => bundle.prerequisites.push(split(line)?.0),
                (_, line) => {
                    let (id, name) = split(line)?;
                    if name != b"HEAD" {
                        let name = RefName::parse(name);
                        let name =
                            name.map_err(|_| GitError::BadBundle("a ref name is malformed"))?;
                        bundle.refs.push((name, id));
                    }
                }
            }
        }
        Err(GitError::BadBundle("the header of the bundle is too long"))
    }
}

/// Splits a line into an id and the text after the space.
fn split(line: &[u8]) -> Result<(ObjectId, &[u8]), GitError> {
    let space = line.iter().position(|byte| *byte == b' ');
    let (id, rest) = line.split_at(space.unwrap_or(line.len()));
    let id = ObjectId::parse(id).map_err(|_| GitError::BadBundle("a line has no object id"))?;
    Ok((id, rest.strip_prefix(b" ").unwrap_or(rest)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "0123456789abcdef0123456789abcdef01234567";

    fn read(text: &str) -> Result<BundleHeader, GitError> {
        BundleHeader::read(&mut text.as_bytes())
    }

    #[test]
    fn header_parses_refs_prerequisites_and_pack_offset() {
        let head = format!("# v2 git bundle\n-{ID} first\n-{ID}\n{ID} refs/heads/x\n{ID} HEAD\n\n");
        let bundle = read(&format!("{head}PACK…")).unwrap();
        assert_eq!(bundle.pack, head.len() as u64);
        assert_eq!((bundle.prerequisites.len(), bundle.refs.len()), (2, 1));
        let long = format!("{ID}{}", &ID[..24]);
        let text = format!("# v3 git bundle\n@object-format=sha256\n{long} refs/heads/x\n\n");
        assert_eq!(read(&text).unwrap().format, ObjectFormat::Sha256);
    }

    #[test]
    fn malformed_bundle_is_refused() {
        for text in [
            String::new(),
            "PACK\0\0\0\x02".to_owned(),
            "# v2 git bundle\n".to_owned(),
            "# v3 git bundle\n@filter=blob:none\n\n".to_owned(),
            "# v2 git bundle\nrubbish\n\n".to_owned(),
            format!("# v2 git bundle\n{ID} refs/../x\n\n"),
            format!("# v2 git bundle\n{}\n\n", "x".repeat(5000)),
        ] {
            assert!(read(&text).is_err(), "{text}");
        }
    }
}
