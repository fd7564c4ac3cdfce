//! When to read the socket: at once while little is on its way, in gulps when there is much.
//!
//! Read message by message, a walsender spends most of its time in system calls, and so do we and
//! the broker: a produce request costs the same with one record in it as with a hundred. So, when
//! the server has more than we have taken, or many events are on their way, the thread sleeps for
//! a moment before it reads. It really sleeps: a runtime that waits would be woken by every
//! message that arrives, which is the cost to be saved. What sleeps with it (reports, signals,
//! statuses) has time: the longest nap is five milliseconds.

use std::time::Duration;

/// A read that brought this much leaves the server with more: we are behind.
const BEHIND_BYTES: usize = 32 * 1024;
/// Behind: latency is made of the backlog, throughput is all that matters.
const NAP_BEHIND: Duration = Duration::from_millis(4);
/// So many events on their way are about as many produce requests, when they come one by one.
const GATHER_FROM: usize = 12;
/// Under load: what a gathered event waits at most.
const NAP_GATHER: Duration = Duration::from_millis(2);

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

    /// One nap a read.
    pub fn napped(&mut self) {
        self.last_read = 0;
    }

    /// How long to sleep before the next read.
    pub fn nap(&self, in_flight: usize) -> Duration {
        if self.last_read >= BEHIND_BYTES {
            NAP_BEHIND
        } else if self.last_read > 0 && in_flight >= GATHER_FROM {
            NAP_GATHER
        } else {
            Duration::ZERO
        }
    }
}
