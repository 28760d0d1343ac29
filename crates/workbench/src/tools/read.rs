//! read: returns lines of a file, or an image.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use memchr::memchr;

use super::Cancelled;
use crate::error::ToolError;
use crate::request::{ReadFileRequest, ReadResult};
use crate::root::WorkspaceRoot;
use crate::truncation::{Bounds, MAX_BYTES, TextHead, as_u64};

/// Maximum size of an image in bytes; it is in memory together with its base64 form.
const MAX_IMAGE: u64 = 16 << 20;

/// Size of the read buffer.
const CHUNK_SIZE: usize = 64 * 1024;

pub(super) fn read(
    root: &WorkspaceRoot,
    request: &ReadFileRequest,
    cancelled: &Cancelled,
) -> Result<ReadResult, ToolError> {
    let (mut file, data) = root.read(&request.path)?;
    if let Some(mime_type) = image_type(&request.path) {
        let size = u64::try_from(data.st_size).unwrap_or(0);
        return image(&mut file, &request.path, size, mime_type);
    }
    let offset = match request.offset {
        None => 1,
        Some(offset) => u64::try_from(offset)
            .ok()
            .filter(|offset| *offset >= 1)
            .ok_or(ToolError::InvalidOffset)?,
    };
    let first = offset - 1;
    let end = request
        .limit
        .map_or(u64::MAX, |limit| first.saturating_add(limit));
    let mut window = Window::new(first, end);
    let mut chunk = vec![0; CHUNK_SIZE];
    while !cancelled.is_cancelled() {
        let length = file
            .read(&mut chunk)
            .map_err(|error| ToolError::from_io(&request.path, &error))?;
        if length == 0 {
            break;
        }
        window.push(chunk.get(..length).unwrap_or_default());
    }
    let total_lines = window.line + 1;
    if first >= total_lines {
        return Err(ToolError::OffsetBeyondEnd {
            offset,
            total: total_lines,
        });
    }
    let has_rest = end < total_lines;
    let head = TextHead {
        kept: window.kept,
        total_lines: end.min(total_lines) - first,
        total_bytes: window.bytes,
    };
    let cut = head.head(Bounds::default());
    Ok(ReadResult::Text {
        content: cut.content.clone(),
        total_lines,
        has_more: cut.truncated || has_rest,
        truncation: cut.truncated.then_some(cut),
    })
}

/// Collects the lines `first..end` of a stream.
struct Window {
    first: u64,
    end: u64,
    /// The current line.
    line: u64,
    /// The first bytes of the window.
    kept: Vec<u8>,
    /// The size of the window.
    bytes: u64,
}

impl Window {
    fn new(first: u64, end: u64) -> Self {
        Self {
            first,
            end,
            line: 0,
            kept: Vec::new(),
            bytes: 0,
        }
    }

    fn push(&mut self, mut bytes: &[u8]) {
        while let Some(end_of_line) = memchr(b'\n', bytes) {
            let (line, rest) = bytes.split_at(end_of_line);
            self.keep(line);
            // The newline after the last requested line is not part of the window.
            if self.line + 1 < self.end {
                self.keep(b"\n");
            }
            self.line += 1;
            bytes = rest.get(1..).unwrap_or_default();
        }
        self.keep(bytes);
    }

    /// Keeps bytes of the current line, if the line is in the window.
    fn keep(&mut self, bytes: &[u8]) {
        if self.line < self.first || self.line >= self.end {
            return;
        }
        self.bytes += as_u64(bytes.len());
        // One byte more than the limit shows that the window exceeds it.
        let room = (MAX_BYTES + 1).saturating_sub(as_u64(self.kept.len()));
        let most = usize::try_from(room).unwrap_or(usize::MAX).min(bytes.len());
        self.kept
            .extend_from_slice(bytes.get(..most).unwrap_or_default());
    }
}

fn image(file: &mut File, path: &str, size: u64, mime_type: &str) -> Result<ReadResult, ToolError> {
    let too_large = |size| ToolError::TooLarge {
        path: path.to_owned(),
        size,
        most: MAX_IMAGE,
    };
    if size > MAX_IMAGE {
        return Err(too_large(size));
    }
    let mut bytes = Vec::new();
    file.take(MAX_IMAGE + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| ToolError::from_io(path, &error))?;
    let size = as_u64(bytes.len());
    if size > MAX_IMAGE {
        return Err(too_large(size));
    }
    Ok(ReadResult::Image {
        data: STANDARD.encode(bytes),
        mime_type: mime_type.to_owned(),
    })
}

fn image_type(path: &str) -> Option<&'static str> {
    let extension = Path::new(path).extension()?.to_str()?;
    Some(match extension.to_ascii_lowercase().as_str() {
        "jpg" | "jpeg" => "image/jpeg",
        "png" => "image/png",
        "gif" => "image/gif",
        "webp" => "image/webp",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn window(text: &str, first: u64, end: u64, chunk: usize) -> (String, u64) {
        let mut window = Window::new(first, end);
        for piece in text.as_bytes().chunks(chunk) {
            window.push(piece);
        }
        assert_eq!(window.bytes, as_u64(window.kept.len()));
        (String::from_utf8(window.kept).unwrap(), window.line + 1)
    }

    proptest! {
        #[test]
        fn window_holds_the_requested_lines(
            text in "[a\n]{0,40}", first in 0_usize..12, limit in 1_usize..12, chunk in 1_usize..9
        ) {
            let lines: Vec<&str> = text.split('\n').collect();
            let wanted: Vec<&str> = lines.iter().skip(first).take(limit).copied().collect();
            let (kept, total) = window(&text, as_u64(first), as_u64(first + limit), chunk);
            prop_assert_eq!(total, as_u64(lines.len()));
            prop_assert_eq!(kept, wanted.join("\n"));
        }
    }
}
