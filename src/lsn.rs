//! The numbers of a Postgres log, each a type of its own so that they cannot be confused.
//!
//! # Invariants
//! An [`Lsn`] is only ever compared with one of the same server history; what tells two histories
//! apart is [`Triple`], never the position alone.

use std::fmt;
use std::num::ParseIntError;
use std::str::FromStr;

/// A position in the write-ahead log, in bytes (`pg_lsn`). Zero is Postgres's `InvalidXLogRecPtr`.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lsn(pub u64);

impl Lsn {
    pub const INVALID: Lsn = Lsn(0);

    /// Bytes from `earlier` to `self`, zero when `self` is not ahead.
    pub fn bytes_since(self, earlier: Lsn) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

impl fmt::Display for Lsn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:X}/{:X}", self.0 >> 32, self.0 & 0xFFFF_FFFF)
    }
}

impl fmt::Debug for Lsn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// What is wrong with a text that should be a `pg_lsn`.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ParseLsnError {
    #[error("a log position is two hexadecimal numbers with a slash between them")]
    NoSlash,
    #[error("not a hexadecimal number of 32 bits: {0}")]
    NotHex(#[from] ParseIntError),
}

impl FromStr for Lsn {
    type Err = ParseLsnError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (high, low) = text.split_once('/').ok_or(ParseLsnError::NoSlash)?;
        let high = u64::from(u32::from_str_radix(high, 16)?);
        let low = u64::from(u32::from_str_radix(low, 16)?);
        Ok(Lsn(high << 32 | low))
    }
}

/// A 32-bit transaction id as the stream carries it (it wraps).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Xid(pub u32);

impl fmt::Display for Xid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Microseconds since 2000-01-01 00:00 UTC, Postgres's own epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PgTimestamp(pub i64);

/// Microseconds from the Unix epoch to Postgres's.
const UNIX_TO_PG_MICROS: i64 = 946_684_800_000_000;

impl PgTimestamp {
    /// Milliseconds since the Unix epoch, rounded down.
    pub fn unix_millis(self) -> i64 {
        self.unix_micros().div_euclid(1_000)
    }

    /// Microseconds since the Unix epoch.
    pub fn unix_micros(self) -> i64 {
        self.0.saturating_add(UNIX_TO_PG_MICROS)
    }

    pub fn from_unix_micros(micros: i64) -> Self {
        PgTimestamp(micros.saturating_sub(UNIX_TO_PG_MICROS))
    }
}

/// What identifies a transaction across reconnects: a restored copy of a server repeats log
/// positions and transaction ids, but not all three of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Triple {
    pub commit_lsn: Lsn,
    pub xid: Xid,
    pub commit_time: PgTimestamp,
}

impl fmt::Display for Triple {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "commit {} of xid {} at {} µs",
            self.commit_lsn, self.xid, self.commit_time.0
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lsn_reads_what_it_prints() {
        for text in ["0/0", "1/B7736F0", "FFFFFFFF/FFFFFFFF"] {
            assert_eq!(
                text.parse::<Lsn>().expect("a valid position").to_string(),
                text
            );
        }
        assert!("1B".parse::<Lsn>().is_err());
        assert!("1/1FFFFFFFF".parse::<Lsn>().is_err());
    }

    #[test]
    fn a_time_before_1970_rounds_down() {
        assert_eq!(PgTimestamp::from_unix_micros(-1).unix_millis(), -1);
        assert_eq!(PgTimestamp(0).unix_millis(), 946_684_800_000);
    }
}
