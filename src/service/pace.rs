//! When to read the socket: at once while caught up, in gulps when behind.
//!
//! A walsender that is read message by message spends most of its time in system calls. When we
//! are behind, a short pause before the next read lets it fill the socket, so that one read brings
//! hundreds of rows, and one produce request carries them.

use std::time::Duration;

/// A read of at least this many bytes means that the server has more than we have taken.
const BEHIND_BYTES: usize = 16 * 1024;
const PAUSE: Duration = Duration::from_millis(1);

#[derive(Debug, Default)]
pub struct Pace {
    /// Whole messages may be waiting in the buffer.
    pub has_more: bool,
    last_read: usize,
}

impl Pace {
    pub fn read(&mut self, bytes: usize) {
        self.last_read = bytes;
    }

    /// How long to wait before the next read.
    pub fn pause(&self, _in_flight: usize) -> Duration {
        if self.last_read >= BEHIND_BYTES {
            PAUSE
        } else {
            Duration::ZERO
        }
    }
}
