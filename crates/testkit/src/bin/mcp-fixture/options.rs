//! The switches.

use std::path::PathBuf;

/// How this server differs from a good one.
#[derive(Debug, Default)]
pub(crate) struct Options {
    /// `--die`: ends at once.
    die: bool,
    /// `--die-unless FILE`: ends at once while the file is not there.
    die_unless: Option<PathBuf>,
    /// `--deaf`: reads, and never answers.
    pub(crate) deaf: bool,
    /// `--stubborn`: goes on when its input ends, and when it is asked to end.
    pub(crate) stubborn: bool,
    /// `--junk-first`: says things that are no JSON-RPC before anything else.
    pub(crate) junk_first: bool,
    /// `--describe TEXT`, `--describe-from FILE`: what `echo_raw` says of itself, so that it
    /// can differ from start to start.
    pub(crate) description: Option<String>,
    /// `--revision DATE`: the newest revision it admits to.
    pub(crate) revision: Option<String>,
    /// `--pages N`: lists come in pages of so many.
    pub(crate) page: Option<usize>,
}

impl Options {
    /// Arguments, then the words of `MCP_FIXTURE`; the unknown word otherwise.
    pub(crate) fn read() -> Result<Self, String> {
        let more = std::env::var("MCP_FIXTURE").unwrap_or_default();
        let more: Vec<String> = more.split_whitespace().map(str::to_owned).collect();
        let mut words = std::env::args().skip(1).chain(more);
        let mut options = Self::default();
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or_else(|| word.clone());
            match word.as_str() {
                "--die" => options.die = true,
                "--die-unless" => options.die_unless = Some(value()?.into()),
                "--deaf" => options.deaf = true,
                "--stubborn" => options.stubborn = true,
                "--junk-first" => options.junk_first = true,
                "--describe" => options.description = Some(value()?),
                "--describe-from" => {
                    let text = std::fs::read_to_string(value()?).unwrap_or_default();
                    options.description = Some(text.trim().to_owned());
                }
                "--revision" => options.revision = Some(value()?),
                "--pages" => options.page = Some(value()?.parse().map_err(|_| word.clone())?),
                _ => return Err(word),
            }
        }
        Ok(options)
    }

    /// Whether it is not to live.
    pub(crate) fn dies(&self) -> bool {
        self.die || self.die_unless.as_ref().is_some_and(|file| !file.exists())
    }
}
