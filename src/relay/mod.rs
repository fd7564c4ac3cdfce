//! The decisions. Pure: no sockets, no clock, no logging; time is an argument. Everything that
//! can lose, reorder or repeat an event is in here, so that it can be simulated without a server.

pub mod breaker;
pub mod feedback;
mod headers;
pub mod held;
pub mod intake;
pub mod ledger;
pub mod machine;
pub mod mapping;
pub mod orders;
pub mod outbox;
pub mod parked;
pub mod route;
pub mod stamp;
pub mod tails;
pub mod topics;
pub mod trial;

use std::time::Duration;

/// A point in time: since the machine was booted, suspension included (`CLOCK_BOOTTIME`).
pub type Moment = Duration;
