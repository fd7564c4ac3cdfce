//! What a process has used, from /proc.

use std::fs;
use std::ops::Sub;
use std::time::Duration;

/// Processor time, of all threads, the ended ones included; hundredths of a second.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cpu {
    pub user: Duration,
    pub system: Duration,
}

impl Cpu {
    /// Zero for a process that is gone.
    pub fn of(pid: impl std::fmt::Display) -> Cpu {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // After the name in parentheses, which may hold blanks: fields 14 and 15 are the times.
        let mut ticks = stat
            .rsplit(')')
            .next()
            .unwrap_or_default()
            .split_whitespace()
            .skip(11)
            .map(|ticks| ticks.parse::<u64>().unwrap_or_default());
        let mut next = || Duration::from_millis(ticks.next().unwrap_or_default() * 10);
        Cpu {
            user: next(),
            system: next(),
        }
    }

    pub fn total(self) -> Duration {
        self.user + self.system
    }

    /// The larger of two looks at one process, one of which may have come too late.
    pub fn or(self, later: Cpu) -> Cpu {
        if later.total() > self.total() {
            later
        } else {
            self
        }
    }
}

impl Sub for Cpu {
    type Output = Cpu;

    fn sub(self, earlier: Cpu) -> Cpu {
        Cpu {
            user: self.user.saturating_sub(earlier.user),
            system: self.system.saturating_sub(earlier.system),
        }
    }
}

/// Time on a processor of all living threads, to the nanosecond: for a process that does little.
pub fn on_processor(pid: u32) -> Duration {
    let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else {
        return Duration::ZERO;
    };
    let nanos: u64 = tasks
        .flatten()
        .filter_map(|task| fs::read_to_string(task.path().join("schedstat")).ok())
        .filter_map(|text| text.split_whitespace().next()?.parse::<u64>().ok())
        .sum();
    Duration::from_nanos(nanos)
}

/// Peak resident memory in megabytes (of 2^20 bytes).
#[allow(clippy::cast_precision_loss)]
pub fn megabytes(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// Microseconds an event.
pub fn per_event(time: Duration, events: usize) -> f64 {
    time.as_secs_f64() * 1e6 / count(events)
}

/// A number of things as a number to calculate with.
#[allow(clippy::cast_precision_loss)]
pub fn count(n: usize) -> f64 {
    n as f64
}

pub fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
