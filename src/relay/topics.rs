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
/// How often a topic's limit is asked for while what is larger passes.
const ASK_LIMIT_AGAIN: Duration = Duration::from_secs(60);
/// For how long a topic that refused us is left alone: at first, and at most. Only an event tells
/// whether the right is there by now, and each refusal costs all topics a new producer.
const LEFT_ALONE_MIN: Duration = Duration::from_secs(5);
const LEFT_ALONE_MAX: Duration = Duration::from_secs(60);

#[derive(Debug)]
enum Known {
    /// Not asked yet, or the question is on its way.
    Asking,
    Present,
    Absent,
    Denied(Right),
    /// The cluster did not answer, and why.
    Silent(String),
    /// No topic: what rows have whose topic can be none. Never asked for.
    Nowhere,
}

#[derive(Debug)]
struct Topic {
    name: String,
    known: Known,
    /// The count that keys are spread over; it stays while events are on their way, or a key's
    /// later events could overtake its earlier ones.
    partitions: Option<i32>,
    /// There are more by now: new events wait until nothing of the topic is on its way.
    growth: Option<i32>,
    /// The breaker holds its events.
    is_tripped: bool,
    /// `max.message.bytes`, where the cluster lets us read it.
    limit: Option<usize>,
    /// Not before this is it asked for again because something larger passed.
    limit_ask_at: Moment,
    /// Since when the cluster says, without a break, that it has no such topic.
    absent_since: Option<Moment>,
    is_asked: bool,
    ask_at: Moment,
    /// It refused an event for want of a right: left alone until then, and for how long.
    alone_until: Moment,
    alone_for: Duration,
}

/// A topic's keys are spread over more partitions from now on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grown {
    pub topic: String,
    pub before: i32,
    pub now: i32,
}

#[derive(Debug, Default)]
pub struct Topics {
    by_name: HashMap<String, u16>,
    list: Vec<Topic>,
    /// Those whose growth waits: mostly none.
    growing: Vec<u16>,
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
        let is_nowhere = name.is_empty();
        self.open += usize::from(!is_nowhere);
        self.list.push(Topic {
            name: name.to_owned(),
            known: if is_nowhere {
                Known::Nowhere
            } else {
                Known::Asking
            },
            partitions: None,
            growth: None,
            is_tripped: false,
            limit: None,
            limit_ask_at: Moment::ZERO,
            absent_since: None,
            is_asked: false,
            ask_at: Moment::ZERO,
            alone_until: Moment::ZERO,
            alone_for: LEFT_ALONE_MIN,
        });
        Some(id)
    }

    #[must_use]
    pub fn name(&self, id: u16) -> &str {
        &self.list[usize::from(id)].name
    }

    /// The number of partitions, where the topic is known to exist, none is being added and its
    /// events are not held.
    #[must_use]
    pub fn partitions(&self, id: u16) -> Option<i32> {
        let is_tripped = self.list[usize::from(id)].is_tripped;
        if is_tripped {
            None
        } else {
            self.partitions_anyway(id)
        }
    }

    /// As [`Topics::partitions`], of a topic whose events are held, too.
    #[must_use]
    pub fn partitions_anyway(&self, id: u16) -> Option<i32> {
        let topic = &self.list[usize::from(id)];
        match topic.known {
            Known::Present if topic.growth.is_none() => topic.partitions,
            Known::Present
            | Known::Asking
            | Known::Absent
            | Known::Denied(_)
            | Known::Silent(_)
            | Known::Nowhere => None,
        }
    }

    /// The size above which a record is refused, before it is compressed, in bytes; `None` where
    /// that is not known.
    #[must_use]
    pub fn limit(&self, id: u16) -> Option<usize> {
        self.list[usize::from(id)].limit
    }

    /// Something larger than the limit has passed: is the limit to be asked for again?
    pub fn may_ask_limit(&mut self, id: u16, now: Moment) -> bool {
        let topic = &mut self.list[usize::from(id)];
        let is_due = now >= topic.limit_ask_at;
        if is_due {
            topic.limit_ask_at = now + ASK_LIMIT_AGAIN;
        }
        is_due
    }

    /// An old "not there" is no verdict on a topic that somebody wants to use again.
    pub fn ask_anew(&mut self, id: u16, now: Moment) {
        let topic = &mut self.list[usize::from(id)];
        if matches!(topic.known, Known::Absent | Known::Denied(_)) {
            topic.known = Known::Asking;
            topic.ask_at = now;
        }
    }

    #[must_use]
    pub fn is_tripped(&self, id: u16) -> bool {
        self.list[usize::from(id)].is_tripped
    }

    /// The topic's events are held.
    pub fn trip(&mut self, name: &str) {
        if let Some(id) = self.id(name) {
            self.list[usize::from(id)].is_tripped = true;
        }
    }

    pub fn untrip(&mut self, name: &str) {
        if let Some(id) = self.by_name.get(name) {
            self.list[usize::from(*id)].is_tripped = false;
        }
    }

    pub fn untrip_all(&mut self) {
        for topic in &mut self.list {
            topic.is_tripped = false;
        }
    }

    /// Topics that the cluster has not had for longer than the grace time.
    #[must_use]
    pub fn given_up(&self, now: Moment, grace: Duration) -> Vec<u16> {
        if self.open == 0 {
            return Vec::new();
        }
        self.by_name
            .values()
            .copied()
            .filter(|id| self.is_given_up(*id, now, grace))
            .collect()
    }

    #[must_use]
    pub fn is_given_up(&self, id: u16, now: Moment, grace: Duration) -> bool {
        let topic = &self.list[usize::from(id)];
        !topic.is_tripped
            && topic
                .absent_since
                .is_some_and(|since| now.saturating_sub(since) >= grace)
    }

    /// An event was refused because we may not write to the topic, whatever its description says.
    pub fn refuses(&mut self, id: u16, now: Moment) {
        let topic = &mut self.list[usize::from(id)];
        if now < topic.alone_until {
            return;
        }
        let was_long_ago = now > topic.alone_until + LEFT_ALONE_MAX;
        topic.alone_for = if was_long_ago {
            LEFT_ALONE_MIN
        } else {
            (topic.alone_for * 2).min(LEFT_ALONE_MAX)
        };
        topic.alone_until = now + topic.alone_for;
    }

    /// Is the topic left alone because it refused an event?
    #[must_use]
    pub fn is_left_alone(&self, name: &str, now: Moment) -> bool {
        let id = self.by_name.get(name);
        id.is_some_and(|id| now < self.list[usize::from(*id)].alone_until)
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
        if matches!(topic.known, Known::Nowhere) {
            return false;
        }
        topic.absent_since = match state {
            TopicState::Absent => topic.absent_since.or(Some(now)),
            // Silence is no answer: it neither begins the grace time nor ends it.
            TopicState::Unknown(_) => topic.absent_since,
            TopicState::Present { .. } | TopicState::Denied(_) => None,
        };
        topic.known = match state {
            TopicState::Present {
                partitions,
                max_message_bytes,
            } => {
                topic.limit = max_message_bytes.or(topic.limit);
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

    /// What the producer itself knows of a topic: it takes events for that many partitions. Fewer
    /// than before is no news that could be acted on: the producer refuses what they are not.
    pub fn has_partitions(&mut self, name: &str, partitions: i32) {
        let Some(id) = self.by_name.get(name) else {
            return;
        };
        let topic = &mut self.list[usize::from(*id)];
        if topic.partitions.is_some_and(|before| partitions > before) {
            if topic.growth.is_none() {
                self.growing.push(*id);
            }
            topic.growth = Some(partitions);
        }
    }

    /// Takes up what has grown, as soon as nothing of the topic is on its way: a key's later
    /// events, which may go to another partition, then cannot overtake its earlier ones.
    pub fn grow(&mut self, mut is_on_its_way: impl FnMut(u16) -> bool) -> Vec<Grown> {
        let mut grown = Vec::new();
        let list = &mut self.list;
        self.growing.retain(|id| {
            if is_on_its_way(*id) {
                return true;
            }
            let topic = &mut list[usize::from(*id)];
            let now = topic.growth.take().or(topic.partitions);
            if let (Some(before), Some(now)) = (topic.partitions, now) {
                topic.partitions = Some(now);
                grown.push(Grown {
                    topic: topic.name.clone(),
                    before,
                    now,
                });
            }
            false
        });
        grown
    }

    /// The names to ask the cluster for now.
    pub fn questions(&mut self, now: Moment) -> Vec<String> {
        let mut names = Vec::new();
        if self.open == 0 {
            return names;
        }
        for topic in &mut self.list {
            let is_present = matches!(topic.known, Known::Present);
            let is_nowhere = matches!(topic.known, Known::Nowhere);
            if !is_present && !is_nowhere && !topic.is_asked && now >= topic.ask_at {
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
            .filter(|t| !t.is_asked && !matches!(t.known, Known::Present | Known::Nowhere))
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
        let topic = &self.list[usize::from(id)];
        match topic.known {
            Known::Asking | Known::Present => !topic.is_tripped,
            Known::Absent | Known::Denied(_) | Known::Silent(_) | Known::Nowhere => false,
        }
    }

    /// Why events wait for this topic. `None` where they do not, or it has only just been asked.
    #[must_use]
    pub fn why_not(&self, id: u16) -> Option<WhyNot> {
        match &self.list[usize::from(id)].known {
            Known::Asking | Known::Present | Known::Nowhere => None,
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
        let named = self.list.iter().filter(|t| !t.name.is_empty());
        named.map(|t| t.name.as_str())
    }

    /// What was known may be wrong and nothing is on its way: every topic is asked for again
    /// before its next event.
    pub fn doubt_all(&mut self) {
        for index in 0..self.list.len() {
            self.doubt(u16::try_from(index).expect("a topic's number"));
        }
    }

    /// As [`Topics::doubt_all`], of one.
    pub fn doubt(&mut self, id: u16) {
        self.growing.retain(|own| *own != id);
        let topic = &mut self.list[usize::from(id)];
        match topic.known {
            Known::Nowhere => return,
            Known::Present => self.open += 1,
            Known::Asking | Known::Absent | Known::Denied(_) | Known::Silent(_) => {}
        }
        topic.known = Known::Asking;
        topic.partitions = None;
        topic.growth = None;
        topic.is_asked = false;
        topic.ask_at = Moment::ZERO;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Moment = Moment::from_secs(1);

    fn present(partitions: i32) -> TopicState {
        TopicState::Present {
            partitions,
            max_message_bytes: None,
        }
    }

    fn one_topic() -> (Topics, u16) {
        let mut topics = Topics::default();
        let id = topics.id("t").expect("the first");
        assert!(topics.answer("t", &present(6), NOW));
        (topics, id)
    }

    // Case K09.
    #[test]
    fn new_partitions_are_used_once_nothing_of_the_topic_is_on_its_way() {
        let (mut topics, id) = one_topic();
        let other = topics.id("other").expect("the second");
        topics.answer("other", &present(3), NOW);
        topics.has_partitions("t", 12);
        topics.has_partitions("nobody's", 12);
        assert_eq!(
            (topics.partitions(id), topics.partitions(other)),
            (None, Some(3))
        );
        assert!(topics.may_come(id) && topics.why_not(id).is_none());
        assert_eq!(topics.grow(|topic| topic == id), []);
        // The cluster's own answer changes nothing, and it may grow again meanwhile.
        topics.answer("t", &present(12), NOW);
        topics.has_partitions("t", 18);
        assert_eq!(topics.partitions(id), None);
        let grown = Grown {
            topic: "t".to_owned(),
            before: 6,
            now: 18,
        };
        assert_eq!(topics.grow(|topic| topic == other), [grown]);
        assert_eq!(topics.partitions(id), Some(18));
        assert_eq!(topics.grow(|_| false), []);
    }

    #[test]
    fn fewer_partitions_are_not_taken_up_before_the_topic_is_in_doubt() {
        let (mut topics, id) = one_topic();
        topics.has_partitions("t", 6);
        topics.has_partitions("t", 3);
        assert_eq!(topics.partitions(id), Some(6));
        topics.has_partitions("t", 12);
        topics.doubt_all();
        assert_eq!(topics.grow(|_| false), []);
        topics.answer("t", &present(3), NOW);
        assert_eq!(topics.partitions(id), Some(3));
    }
}
