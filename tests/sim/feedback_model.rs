//! Feedback against a slow, obviously right model: what was said and heard is kept for ever, and
//! whether a status is due is worked out from all of it.

use std::time::Duration;

use walrelay::lsn::Lsn;
use walrelay::relay::feedback::Feedback;

use crate::history::Moment;
use crate::rng::Rng;

#[derive(Default)]
struct Model {
    /// Each status: when, and the flush it told.
    statuses: Vec<(Moment, Lsn)>,
    /// Each time that the server asked.
    asked: Vec<Moment>,
    /// Each time that flush was seen to have moved beyond what was told.
    moved: Vec<Moment>,
    received: Lsn,
}

impl Model {
    fn is_due(&self, now: Moment) -> bool {
        let Some((last, _)) = self.statuses.last() else {
            return true;
        };
        // Moments do not repeat within a run, so that "after" is plain.
        let is_asked = self.asked.iter().any(|at| at > last);
        let first_moved = self.moved.iter().filter(|at| *at > last).min();
        is_asked
            || now >= *last + Duration::from_secs(1)
            || first_moved.is_some_and(|at| now >= *at + Duration::from_millis(100))
    }

    fn told(&self) -> Lsn {
        self.statuses
            .iter()
            .map(|(_, flush)| *flush)
            .max()
            .unwrap_or_default()
    }
}

#[test]
fn a_status_is_sent_when_the_model_says_and_never_else() {
    for seed in 0..300 {
        let mut rng = Rng::new(seed);
        let mut now = Duration::from_secs(50);
        let mut feedback = Feedback::new(now);
        let mut model = Model::default();
        let mut flush = Lsn(0);
        for _ in 0..400 {
            now += rng.micros(1, 60_000);
            match rng.range(0, 8) {
                0 | 1 => {
                    model.received = Lsn(model.received.0 + rng.range(1, 9));
                    feedback.received(model.received);
                }
                2 if rng.permille(300) => {
                    model.asked.push(now);
                    feedback.reply_requested();
                }
                3 => flush = Lsn(rng.range(flush.0, model.received.0 + 1)),
                _ => {}
            }
            // As the machine does after everything that happened.
            feedback.flush_is(flush, now);
            if flush > model.told() {
                model.moved.push(now);
            }
            let due = model.is_due(now);
            assert_eq!(feedback.due_at() <= now, due, "seed {seed} at {now:?}");
            let status = feedback.poll(flush, now);
            assert_eq!(status.is_some(), due, "seed {seed} at {now:?}");
            if let Some(status) = status {
                assert_eq!((status.write, status.flush), (model.received, flush));
                model.statuses.push((now, flush));
            }
            assert_eq!(feedback.told_flush(), model.told());
        }
    }
}
