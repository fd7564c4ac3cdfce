//! Sockets. They carry and decide nothing: what to do about an error, when to read and what to
//! report is the machine's to say.
//!
//! # Invariants
//! No file here imports `relay`; what the two share are the words of `record` and `wire`.

pub mod backlog;
pub mod catalog;
pub mod connect;
mod conversation;
pub mod dead_letters;
pub mod fetch;
pub mod frames;
pub mod heal;
pub mod http;
pub mod kafka;
mod login;
pub mod new_slot;
pub mod preflight;
pub mod registry;
pub mod rival;
pub mod sample;
pub mod side;
pub mod slot;
pub mod slot_view;
pub mod sql;
pub mod standing;
mod tls;
pub mod topics;
pub mod writers;

use std::time::SystemTime;

use crate::lsn::PgTimestamp;

/// What the clock on the wall says, as messages of the stream carry it.
#[must_use]
pub fn wall_clock() -> PgTimestamp {
    let since = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    PgTimestamp::from_unix_micros(i64::try_from(since.as_micros()).unwrap_or_default())
}
