//! A gap: rows that were committed to the outbox and are in no stream any more.

use std::fmt;

use crate::lsn::Lsn;

/// What is done about a gap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnGap {
    /// A new slot is made, and what the stream does not carry is published from the table.
    Heal,
    /// The relay ends with exit code 4.
    Halt,
    /// A new slot is made, and the rows in between are given up.
    Skip,
}

impl OnGap {
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            OnGap::Heal => "heal",
            OnGap::Halt => "halt",
            OnGap::Skip => "skip",
        }
    }
}

/// Why rows may be in no stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cause {
    SlotGone,
    /// The server removed WAL that the slot still needed, and says so in these words.
    SlotLost(String),
    /// Somebody advanced or re-created it.
    SlotMoved {
        confirmed: Lsn,
        reported: Lsn,
    },
    /// The stream cannot pass what was written while the publication did not exist, or the server
    /// skips it; its own words.
    PublicationGone(String),
    /// What the publication covers is not what it was when everything before was delivered.
    PublicationDiffers,
}

/// A gap, and as far as it could be counted, what is in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gap {
    pub cause: Cause,
    pub missing: Option<Missing>,
}

/// Rows outside of what is proved to be delivered. Some of them may have been published: what came
/// after the last checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Missing {
    pub rows: i64,
    /// First and last, of the column `id`.
    pub ids: Option<(i64, i64)>,
    /// First and last `created_at`.
    pub times: Option<(String, String)>,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Cause::SlotGone => write!(
                f,
                "the slot is gone, though the registry says that it was made: what was committed since it vanished is in no stream"
            ),
            Cause::SlotLost(why) => write!(
                f,
                "the slot is lost ({why}): the server removed WAL that it still needed, what it had not sent is in no stream"
            ),
            Cause::SlotMoved {
                confirmed,
                reported,
            } => write!(
                f,
                "the slot's confirmed_flush_lsn is {confirmed}, above {reported}, the highest position that was ever reported: somebody advanced or re-created the slot, what was committed in between is in no stream"
            ),
            Cause::PublicationGone(why) => write!(
                f,
                "rows were written while the publication did not exist, they are in no stream: {why}"
            ),
            Cause::PublicationDiffers => write!(
                f,
                "the publication is not what it was when the last checkpoint was made: rows written meanwhile may be in no stream"
            ),
        }
    }
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.rows == 0 {
            return write!(f, "no row lies outside of the last checkpoint");
        }
        write!(f, "{} rows lie outside of the last checkpoint", self.rows)?;
        if let Some((first, last)) = self.ids {
            write!(f, ", ids {first} to {last}")?;
        }
        if let Some((first, last)) = &self.times {
            write!(f, ", created from {first} to {last}")?;
        }
        write!(
            f,
            "; those of them that were published just before the gap are among them"
        )
    }
}

impl fmt::Display for Gap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.cause)?;
        match &self.missing {
            Some(missing) => write!(f, "; {missing}"),
            None => Ok(()),
        }
    }
}

/// The policy, where it was not set: to heal is right only where nobody but our own retention deletes
/// rows, and that is known of the table that `init` made.
#[must_use]
pub fn policy(set: Option<OnGap>, is_provable: bool) -> OnGap {
    match set {
        Some(on_gap) => on_gap,
        None if is_provable => OnGap::Heal,
        None => OnGap::Halt,
    }
}
