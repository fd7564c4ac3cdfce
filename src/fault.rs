//! Named points at which a test lets this process die, hang or fail: `WALRELAY_FAULT=POINT[:EVENT_ID][=ACTION]`,
//! with `kill` (the default), `hang` or `error` as the action. Only in a build with feature `faults`:
//! in the product every call below is nothing.

/// Where a fault can be made to happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// A record is about to be given to the Kafka client.
    Send,
    /// The broker has acknowledged a record; nobody else knows yet, the slot least of all.
    Delivered,
    /// Dead letters are about to be written.
    Park,
    /// They are committed; the relay does not know yet.
    Parked,
    /// A retried dead letter is delivered, and is about to be settled.
    Settle,
    /// It is settled; the relay does not know yet.
    Settled,
}

/// What a fault of kind `error` is to its caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("injected by WALRELAY_FAULT")]
pub struct Injected;

#[cfg(not(feature = "faults"))]
mod seam {
    use super::{Injected, Point};

    /// # Errors
    /// Never.
    #[inline]
    pub fn reached<'a>(_: Point, _: impl FnOnce() -> &'a str) -> Result<(), Injected> {
        Ok(())
    }

    /// # Errors
    /// Never.
    #[inline]
    pub fn sending(_: usize, _: impl FnOnce() -> String) -> Result<(), Injected> {
        Ok(())
    }

    /// # Errors
    /// Never.
    #[inline]
    pub fn delivered(_: usize) -> Result<(), Injected> {
        Ok(())
    }
}

#[cfg(feature = "faults")]
mod seam {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::{Injected, Point};

    struct Planned {
        point: String,
        event_id: Option<String>,
        action: String,
    }

    fn planned() -> Option<&'static Planned> {
        static PLANNED: OnceLock<Option<Planned>> = OnceLock::new();
        PLANNED
            .get_or_init(|| {
                std::env::var("WALRELAY_FAULT")
                    .ok()
                    .map(|words| parse(&words))
            })
            .as_ref()
    }

    fn parse(words: &str) -> Planned {
        let (place, action) = words.split_once('=').unwrap_or((words, "kill"));
        let (point, event_id) = match place.split_once(':') {
            Some((point, event_id)) => (point, Some(event_id.to_owned())),
            None => (place, None),
        };
        Planned {
            point: point.to_owned(),
            event_id,
            action: action.to_owned(),
        }
    }

    fn name(point: Point) -> &'static str {
        match point {
            Point::Send => "send",
            Point::Delivered => "delivered",
            Point::Park => "park",
            Point::Parked => "parked",
            Point::Settle => "settle",
            Point::Settled => "settled",
        }
    }

    /// Ticket of the event whose delivery is to go wrong: reports name no more than that.
    static MEANT: AtomicUsize = AtomicUsize::new(usize::MAX);

    /// A record is about to be given to the Kafka client.
    ///
    /// # Errors
    /// One was planned for here.
    pub fn sending(ticket: usize, event_id: impl FnOnce() -> String) -> Result<(), Injected> {
        let Some(planned) = planned() else {
            return Ok(());
        };
        let event_id = event_id();
        let meant = planned.event_id.as_deref();
        if planned.point == name(Point::Delivered) && meant.is_none_or(|meant| meant == event_id) {
            MEANT.store(ticket, Ordering::Relaxed);
        }
        reached(Point::Send, || &event_id)
    }

    /// The broker has acknowledged it.
    ///
    /// # Errors
    /// One was planned for here.
    pub fn delivered(ticket: usize) -> Result<(), Injected> {
        let Some(planned) = planned() else {
            return Ok(());
        };
        if MEANT.load(Ordering::Relaxed) != ticket {
            return Ok(());
        }
        let id = planned.event_id.clone().unwrap_or_default();
        reached(Point::Delivered, || &id)
    }

    /// `event_id` is asked for only where a fault is planned.
    ///
    /// # Errors
    /// One was planned for here.
    ///
    /// # Panics
    /// The action is not one of the three.
    pub fn reached<'a>(point: Point, event_id: impl FnOnce() -> &'a str) -> Result<(), Injected> {
        let Some(planned) = planned().filter(|planned| planned.point == name(point)) else {
            return Ok(());
        };
        if planned
            .event_id
            .as_deref()
            .is_some_and(|id| id != event_id())
        {
            return Ok(());
        }
        match planned.action.as_str() {
            "kill" => {
                let own = rustix::process::getpid();
                let _ = rustix::process::kill_process(own, rustix::process::Signal::KILL);
                // The signal is on its way: nothing more may be done.
                loop {
                    std::thread::park();
                }
            }
            "hang" => loop {
                std::thread::park();
            },
            "error" => Err(Injected),
            other => panic!("WALRELAY_FAULT: no action {other}: kill, hang or error"),
        }
    }
}

pub use seam::{delivered, reached, sending};
