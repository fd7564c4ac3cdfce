//! When to look at the cluster again, and what of it is worth a line. Pure: time is an argument.

use std::time::Duration;

use super::Reach;

/// A cluster that was found in trouble is looked at again after this.
const AGAIN_AFTER: Duration = Duration::from_secs(5);
/// A trouble that lasts is said again after this.
const SAID_AGAIN_AFTER: Duration = Duration::from_secs(60);

/// What is known of the cluster while the relay runs.
#[derive(Default)]
pub struct Watch {
    reach: Reach,
    is_looking: bool,
    looked_at: Option<Duration>,
    /// The client library has complained since the last look, or nothing is delivered.
    is_suspicious: bool,
    /// What was said last, and when.
    said: Option<((String, String), Duration)>,
}

/// What a look is to the log.
#[derive(Debug, PartialEq, Eq)]
pub enum News {
    None,
    Trouble { what: String, remedy: String },
    WellAgain,
}

impl Watch {
    /// Something hints that not all is well.
    pub fn suspect(&mut self) {
        self.is_suspicious = true;
    }

    /// Is another look due? Then it is taken to be under way until `on_reach`.
    pub fn wants_look(&mut self, now: Duration) -> bool {
        let is_late_enough = self.looked_at.is_none_or(|at| now >= at + AGAIN_AFTER);
        let is_due = is_late_enough && (self.is_suspicious || self.trouble().is_some());
        if self.is_looking || !is_due {
            return false;
        }
        self.is_looking = true;
        self.is_suspicious = false;
        true
    }

    /// Did the last look find nothing wrong?
    #[must_use]
    pub fn is_well(&self) -> bool {
        self.looked_at.is_some() && self.trouble().is_none()
    }

    pub fn on_reach(&mut self, reach: Reach, now: Duration) -> News {
        self.is_looking = false;
        self.looked_at = Some(now);
        self.reach = reach;
        let Some(trouble) = self.reach.trouble() else {
            return match self.said.take() {
                Some(_) => News::WellAgain,
                None => News::None,
            };
        };
        let is_said = self
            .said
            .as_ref()
            .is_some_and(|(said, at)| *said == trouble && now < *at + SAID_AGAIN_AFTER);
        if is_said {
            return News::None;
        }
        self.said = Some((trouble.clone(), now));
        let (what, remedy) = trouble;
        News::Trouble { what, remedy }
    }

    /// What is wrong as the last look found it, and what to do about it.
    #[must_use]
    pub fn trouble(&self) -> Option<(String, String)> {
        self.reach.trouble()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::Finding;

    fn bad(what: &str) -> Reach {
        Reach::in_trouble(Finding::failed("kafka", what, "mend it"))
    }

    fn trouble(what: &str) -> News {
        News::Trouble {
            what: what.to_owned(),
            remedy: "mend it".to_owned(),
        }
    }

    const fn at(seconds: u64) -> Duration {
        Duration::from_secs(1_000 + seconds)
    }

    #[test]
    fn a_trouble_is_said_once_a_minute_and_its_end_once() {
        let mut watch = Watch::default();
        assert_eq!(watch.on_reach(bad("a"), at(0)), trouble("a"));
        assert_eq!(watch.on_reach(bad("a"), at(5)), News::None);
        assert_eq!(watch.on_reach(bad("b"), at(10)), trouble("b"));
        assert_eq!(watch.on_reach(bad("b"), at(69)), News::None);
        assert_eq!(watch.on_reach(bad("b"), at(70)), trouble("b"));
        assert_eq!(watch.trouble().expect("lasts").0, "b");
        assert_eq!(watch.on_reach(Reach::default(), at(75)), News::WellAgain);
        assert_eq!(watch.trouble(), None);
        assert_eq!(watch.on_reach(Reach::default(), at(80)), News::None);
    }

    #[test]
    fn a_cluster_is_looked_at_while_in_trouble_or_under_suspicion_only() {
        let mut watch = Watch::default();
        watch.on_reach(Reach::default(), at(0));
        assert!(!watch.wants_look(at(600)));
        watch.suspect();
        assert!(watch.wants_look(at(600)));
        assert!(!watch.wants_look(at(700)), "one look at a time");
        watch.on_reach(bad("a"), at(701));
        assert!(!watch.wants_look(at(705)));
        assert!(watch.wants_look(at(706)));
        watch.on_reach(Reach::default(), at(707));
        assert!(!watch.wants_look(at(800)));
    }
}
