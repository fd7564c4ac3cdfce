//! When to read the socket: at once while caught up, in gulps when behind.
//!
//! Read message by message, a walsender spends most of its time in system calls, and so do we and
//! the broker: a produce request costs the same with one record in it as with a hundred. And it
//! stays that way, each of the three being too busy with small pieces to let them grow. So a
//! stream that is behind is read in gulps: the thread sleeps until the socket holds a good deal.
//! It really sleeps: a runtime that waits would be woken by every message that arrives, which is
//! the cost to be saved. What sleeps with it (reports, signals, statuses) has time: a gulp takes
//! 30 milliseconds at most, and only where events are older than that already.
//!
//! Behind is what the server's own clock says: how old a commit was when it was sent. How much a
//! read brings says little: on a busy machine one row at a time may arrive from a long backlog.

use std::time::Duration;

/// Rows that had been committed for so long when they were sent are a backlog: throughput is all
/// that matters to it. Well above what a disk needs to flush a commit: a row's time is that of its
/// commit record, and it is sent only when that is on disk.
const BEHIND: Duration = Duration::from_millis(200);
/// Between two looks at the socket.
const STEP: Duration = Duration::from_millis(1);
/// The longest gulp, in steps: what a slow server is waited for.
const STEPS_MAX: u32 = 30;
/// A socket that holds this much and gains nothing in a step is full.
const FULL_BYTES: usize = 64 << 10;
/// One that holds less and gains nothing for so many steps: the server has no more.
const IDLE_STEPS: u32 = 3;

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
    /// how much the socket holds, `gulp` how much of it makes a good read.
    pub fn rest(
        &mut self,
        lag: Duration,
        in_flight: usize,
        gulp: usize,
        waiting: impl Fn() -> usize,
    ) {
        // Once a read: turns that were caused by reports read nothing and rest no more.
        if !std::mem::take(&mut self.has_read) {
            return;
        }
        if lag >= BEHIND {
            let (mut held, mut idle) = (0, 0);
            for _ in 0..STEPS_MAX {
                std::thread::sleep(STEP);
                let now = waiting();
                idle = if now == held { idle + 1 } else { 0 };
                let is_full = idle > 0 && now >= FULL_BYTES.min(gulp / 2);
                if now >= gulp || is_full || idle >= IDLE_STEPS {
                    return;
                }
                held = now;
            }
        } else if in_flight >= GATHER_FROM {
            std::thread::sleep(GATHER);
        }
    }
}
