//! What is known about topics: an event is handed over only to one that the cluster has.

use std::collections::HashMap;
use std::time::Duration;

use super::Moment;
use super::orders::WhyNot;
use crate::record::{Right, TopicState};

/// More topics than this is a template gone wrong (an id in a topic's name), not a design.
pub const TOPICS_MAX: usize = 10_000;
/// How often an absent topic is asked for: a new one is found within this.
const ASK_AGAIN: Duration = Duration::from_secs(2);

#[derive(Debug)]
enum Known {
    /// Not asked yet, or the question is on its way.
    Asking,
    Present,
    Absent,
    Denied(Right),
    /// The cluster did not answer, and why.
    Silent(String),
}

#[derive(Debug)]
struct Topic {
    name: String,
    known: Known,
    /// The count that keys are spread over; it stays while events are on their way, or a key's
    /// later events could overtake its earlier ones.
    partitions: Option<i32>,
    is_asked: bool,
    ask_at: Moment,
}

#[derive(Debug, Default)]
pub struct Topics {
    by_name: HashMap<String, u16>,
    list: Vec<Topic>,
    /// How many of them are not known to be present: mostly none, and then nothing is walked.
    open: usize,
}

impl Topics {
    /// The topic's number; `None` when there are too many. A new one is asked for at once.
    pub fn id(&mut self, name: &str) -> Option<u16> {
        if let Some(id) = self.by_name.get(name) {
            return Some(*id);
        }
        if self.list.len() >= TOPICS_MAX {
            return None;
        }
        let id = u16::try_from(self.list.len()).ok()?;
        self.by_name.insert(name.to_owned(), id);
        self.open += 1;
        self.list.push(Topic {
            name: name.to_owned(),
            known: Known::Asking,
            partitions: None,
            is_asked: false,
            ask_at: Moment::ZERO,
        });
        Some(id)
    }

    #[must_use]
    pub fn name(&self, id: u16) -> &str {
        &self.list[usize::from(id)].name
    }

    /// The number of partitions, where the topic is known to exist.
    #[must_use]
    pub fn partitions(&self, id: u16) -> Option<i32> {
        let topic = &self.list[usize::from(id)];
        match topic.known {
            Known::Present => topic.partitions,
            Known::Asking | Known::Absent | Known::Denied(_) | Known::Silent(_) => None,
        }
    }

    /// The cluster's answer. Returns whether the topic has just become usable.
    /// Silence about a topic that was there changes nothing.
    pub fn answer(&mut self, name: &str, state: &TopicState, now: Moment) -> bool {
        let Some(id) = self.by_name.get(name) else {
            return false;
        };
        let topic = &mut self.list[usize::from(*id)];
        topic.is_asked = false;
        topic.ask_at = now + ASK_AGAIN;
        let was_present = matches!(topic.known, Known::Present);
        topic.known = match state {
            TopicState::Present { partitions, .. } => {
                topic.partitions = topic.partitions.or(Some(*partitions));
                Known::Present
            }
            TopicState::Absent => Known::Absent,
            TopicState::Denied(right) => Known::Denied(*right),
            TopicState::Unknown(_) if was_present => Known::Present,
            TopicState::Unknown(why) => Known::Silent(why.clone()),
        };
        let is_present = matches!(topic.known, Known::Present);
        match (was_present, is_present) {
            (false, true) => self.open -= 1,
            (true, false) => self.open += 1,
            (true, true) | (false, false) => {}
        }
        !was_present && is_present
    }

    /// The names to ask the cluster for now.
    pub fn questions(&mut self, now: Moment) -> Vec<String> {
        let mut names = Vec::new();
        if self.open == 0 {
            return names;
        }
        for topic in &mut self.list {
            let is_present = matches!(topic.known, Known::Present);
            if !is_present && !topic.is_asked && now >= topic.ask_at {
                topic.is_asked = true;
                names.push(topic.name.clone());
            }
        }
        names
    }

    #[must_use]
    pub fn next_question_at(&self) -> Option<Moment> {
        if self.open == 0 {
            return None;
        }
        self.list
            .iter()
            .filter(|t| !t.is_asked && !matches!(t.known, Known::Present))
            .map(|t| t.ask_at)
            .min()
    }

    /// Topics that the cluster says it does not have, or not for us.
    pub fn absent(&self) -> impl Iterator<Item = &str> {
        self.list
            .iter()
            .filter(|t| matches!(t.known, Known::Absent | Known::Denied(_)))
            .map(|t| t.name.as_str())
    }

    /// Will the cluster's answer to a question of now decide about this topic?
    #[must_use]
    pub fn may_come(&self, id: u16) -> bool {
        match self.list[usize::from(id)].known {
            Known::Asking | Known::Present => true,
            Known::Absent | Known::Denied(_) | Known::Silent(_) => false,
        }
    }

    /// Why events wait for this topic. `None` where they do not, or it has only just been asked.
    #[must_use]
    pub fn why_not(&self, id: u16) -> Option<WhyNot> {
        match &self.list[usize::from(id)].known {
            Known::Asking | Known::Present => None,
            Known::Absent => Some(WhyNot::Absent),
            Known::Denied(right) => Some(WhyNot::Denied(*right)),
            Known::Silent(why) => Some(WhyNot::Silent(why.clone())),
        }
    }

    /// Is the cluster silent about some topic?
    #[must_use]
    pub fn is_unanswered(&self) -> bool {
        self.list
            .iter()
            .any(|t| matches!(t.known, Known::Asking | Known::Silent(_)))
    }

    /// Every topic's name: to ask whether they are all still there.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.list.iter().map(|t| t.name.as_str())
    }

    /// What was known may be wrong and nothing is on its way: every topic is asked for again
    /// before its next event.
    pub fn doubt_all(&mut self) {
        self.open = self.list.len();
        for topic in &mut self.list {
            topic.known = Known::Asking;
            topic.partitions = None;
            topic.is_asked = false;
            topic.ask_at = Moment::ZERO;
        }
    }
}
