//! When to read the socket: at once while caught up, in gulps when behind.
//!
//! Read message by message, a walsender spends most of its time in system calls, and so do we and
//! the broker: a produce request costs the same with one record in it as with a hundred. And it
//! stays that way, each of the three being too busy with small pieces to let them grow. So a
//! stream that is behind is read in gulps, all that is there, with the thread asleep in between.
//! It really sleeps: a runtime that waits would be woken by every message that arrives, which is
//! the cost to be saved. What sleeps with it (reports, signals, statuses) has time: a nap takes
//! 16 milliseconds at most.
//!
//! Behind is what the server's own clock says: how old a commit was when it was sent. How much a
//! read brings says little: on a busy machine one row at a time may arrive from a long backlog.

use std::time::Duration;

use crate::io::slot::Gulp;

/// Rows that had been committed for so long when they were sent are a backlog: throughput is all
/// that matters to it. Well above what a disk needs to flush a commit: a row's time is that of its
/// commit record, and it is sent only when that is on disk.
const BEHIND: Duration = Duration::from_millis(200);

/// So many events on their way are about as many produce requests, when they come one by one.
const GATHER_FROM: usize = 12;
/// Caught up, but under load: what a gathered event waits at most.
const GATHER: Duration = Duration::from_millis(2);

#[derive(Debug, Default)]
pub struct Pace {
    /// Whole messages may be waiting in the buffer.
    pub has_more: bool,
    /// Something was read since the last rest.
    has_read: bool,
}

impl Pace {
    pub fn read(&mut self) {
        self.has_read = true;
    }

    /// Rests before the next read, if that pays: `lag` is how far behind the stream is, `waiting`
    /// how much the socket holds.
    pub fn rest(
        &mut self,
        lag: Duration,
        in_flight: usize,
        gulp: Gulp,
        waiting: impl FnOnce() -> usize,
    ) {
        // Once a read: turns that were caused by reports read nothing and rest no more.
        if !std::mem::take(&mut self.has_read) {
            return;
        }
        if lag >= BEHIND {
            if waiting() < gulp.enough {
                std::thread::sleep(gulp.nap);
            }
        } else if in_flight >= GATHER_FROM {
            std::thread::sleep(GATHER);
        }
    }
}
