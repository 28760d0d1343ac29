//! Command-line options.

use std::path::PathBuf;

/// The options of the server, most of which make it misbehave.
#[derive(Debug, Default)]
pub(crate) struct Options {
    /// `--die`: exits at once.
    die: bool,
    /// `--die-unless FILE`: exits at once while the file does not exist.
    die_unless: Option<PathBuf>,
    /// `--deaf`: reads, and never answers.
    pub(crate) deaf: bool,
    /// `--stubborn`: keeps running after the end of its input and after SIGTERM.
    pub(crate) stubborn: bool,
    /// `--junk-first`: writes lines that are not JSON-RPC first.
    pub(crate) junk_first: bool,
    /// `--describe TEXT`, `--describe-from FILE`: the description of `echo_raw`. A file allows the
    /// description to change between starts.
    pub(crate) description: Option<String>,
    /// `--revision DATE`: the newest supported revision.
    pub(crate) revision: Option<String>,
    /// `--pages N`: the page size of lists.
    pub(crate) page: Option<usize>,
}

impl Options {
    /// Reads the arguments, then the words of `MCP_FIXTURE`; the error is the unknown argument.
    pub(crate) fn read() -> Result<Self, String> {
        let more = std::env::var("MCP_FIXTURE").unwrap_or_default();
        let more: Vec<String> = more.split_whitespace().map(str::to_owned).collect();
        let mut arguments = std::env::args().skip(1).chain(more);
        let mut options = Self::default();
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().ok_or_else(|| argument.clone());
            match argument.as_str() {
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
                "--pages" => options.page = Some(value()?.parse().map_err(|_| argument.clone())?),
                _ => return Err(argument),
            }
        }
        Ok(options)
    }

    /// Whether the server exits at once.
    pub(crate) fn dies(&self) -> bool {
        self.die || self.die_unless.as_ref().is_some_and(|file| !file.exists())
    }
}
