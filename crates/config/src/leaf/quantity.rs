//! Durations and sizes.

use std::time::Duration;

use super::{Format, Leaf, without_detail};

/// Ten years: a longer duration is a mistake, and would overflow a deadline.
const MAX_SECONDS: u64 = 10 * 365 * 24 * 3600;

impl Format for Duration {
    const NAME: &'static str = "duration";
    const DESCRIPTION: &'static str = "a duration such as 50ms, 10s, 2m or 1h";
    const INTEGER: Option<u64> = Some(MAX_SECONDS);

    fn check(text: &str) -> Result<(), String> {
        Self::read(text).map(drop)
    }
}

impl Leaf for Duration {
    /// A bare number is in seconds, as in older files. Parts are added: `1m30s`.
    fn read(text: &str) -> Result<Self, String> {
        let longest = Duration::from_secs(MAX_SECONDS);
        let bounded = |total: Duration| {
            if total <= longest {
                Ok(total)
            } else {
                Err("at most ten years".to_owned())
            }
        };
        if !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit()) {
            let seconds = text.parse().unwrap_or(u64::MAX);
            return bounded(Duration::from_secs(seconds));
        }
        let mut total = Duration::ZERO;
        let mut rest = text;
        while !rest.is_empty() || text.is_empty() {
            let (amount, after) = leading_number(rest)?;
            let end = after
                .find(|c: char| c.is_ascii_digit())
                .unwrap_or(after.len());
            let (unit, after) = without_detail(after.split_at_checked(end))?;
            let part = match unit {
                "ms" => Duration::from_millis(amount),
                "s" => Duration::from_secs(amount),
                "m" => Duration::from_secs(amount.saturating_mul(60)),
                "h" => Duration::from_secs(amount.saturating_mul(3600)),
                "d" => Duration::from_secs(amount.saturating_mul(24 * 3600)),
                _ => return Err(String::new()),
            };
            total = bounded(total.saturating_add(part))?;
            rest = after;
        }
        Ok(total)
    }

    fn write(&self) -> String {
        if self.subsec_nanos() == 0 {
            format!("{}s", self.as_secs())
        } else {
            format!("{}ms", self.as_millis())
        }
    }
}

fn leading_number(text: &str) -> Result<(u64, &str), String> {
    let end = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let (digits, rest) = without_detail(text.split_at_checked(end))?;
    Ok((digits.parse().map_err(|_| String::new())?, rest))
}

/// Parses a size in the format of the configuration, for command line arguments.
pub fn read_size(text: &str) -> Result<u64, String> {
    u64::read(text).map_err(|_| format!("'{text}' is not {}", <u64 as Format>::DESCRIPTION))
}

/// A size in the format of [`read_size`].
pub fn show_size(bytes: u64) -> String {
    bytes.write()
}

/// Sizes in bytes.
impl Format for u64 {
    const NAME: &'static str = "byte-size";
    const DESCRIPTION: &'static str = "a size such as 64MiB, 4GiB, 1GB or a number of bytes";
    const INTEGER: Option<u64> = Some(i64::MAX.unsigned_abs());

    fn check(text: &str) -> Result<(), String> {
        Self::read(text).map(drop)
    }
}

impl Leaf for u64 {
    fn read(text: &str) -> Result<Self, String> {
        let (amount, unit) = leading_number(text)?;
        let unit: u64 = match unit.trim_start_matches(' ') {
            "" | "B" => 1,
            "kB" | "KB" => 1000,
            "MB" => 1000 * 1000,
            "GB" => 1000 * 1000 * 1000,
            "TB" => 1000 * 1000 * 1000 * 1000,
            "KiB" => 1 << 10,
            "MiB" => 1 << 20,
            "GiB" => 1 << 30,
            "TiB" => 1 << 40,
            _ => return Err(String::new()),
        };
        amount
            .checked_mul(unit)
            .filter(|bytes| *bytes <= i64::MAX.unsigned_abs())
            .ok_or_else(|| "the size is too large".to_owned())
    }

    fn write(&self) -> String {
        for (unit, bytes) in [
            ("GiB", 1 << 30),
            ("GB", 1_000_000_000),
            ("MiB", 1 << 20),
            ("MB", 1_000_000),
            ("KiB", 1 << 10),
        ] {
            if *self >= bytes && self.is_multiple_of(bytes) {
                return format!("{}{unit}", self / bytes);
            }
        }
        self.to_string()
    }
}
