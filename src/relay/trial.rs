//! Events that are sent apart, by a producer of their own, so that a refusal stops nobody else:
//! suspects of a refused batch, events that are larger than their topic's limit, one at which an
//! earlier run halted, and dead letters that are retried.
//!
//! ```text
//!           group                     all reports are in
//!   Idle ──────────▶ Out ──┬─────────────────────────────▶ Idle     delivered, or refused again:
//!    ▲                     │ the producer is dead                    a group is halved, one that
//!    └── Rebuilding ◀──────┘                                         was alone has its verdict
//! ```
//!
//! # Invariants
//! - Of one key one event is out at a time: what stands behind it cannot overtake it.
//! - A verdict is only passed on an event that was alone.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::Duration;

use super::Moment;
use super::held::Waiting;
use crate::record::{KafkaCode, Record, Ticket};

/// A group is at most so large; a refusal halves it.
const GROUP_MAX: usize = 1_000;
const GROUP_BYTES_MAX: usize = 900_000;
/// Refusals of an event that was alone, before it is taken for poison.
const REFUSALS_MAX: u32 = 2;
const REST_MIN: Duration = Duration::from_millis(100);
const REST_MAX: Duration = Duration::from_secs(5);

/// What is tried.
#[derive(Debug)]
pub enum Source {
    /// An event of the stream.
    Event(Box<Waiting>),
    /// A dead letter, by its number in the batch that is being retried.
    Letter {
        index: usize,
        record: Box<Record<'static>>,
    },
}

#[derive(Debug)]
pub struct Item {
    pub source: Source,
    pub topic: u16,
    /// The hash of what keeps its order.
    pub key: u64,
    /// The partition that the row itself asks for.
    pub asked: Option<i64>,
    /// Too large to share a batch, or to be judged by itself.
    pub is_alone: bool,
    /// It was held because its topic is tripped: a refusal parks it not.
    pub is_probe: bool,
    /// An earlier run halted at it: it goes when everything before it has arrived.
    pub is_gate: bool,
    refusals: u32,
}

impl Item {
    #[must_use]
    pub fn event(waiting: Waiting, is_alone: bool, is_probe: bool) -> Self {
        Item {
            topic: waiting.topic,
            key: waiting.key,
            asked: waiting.partition,
            is_alone,
            is_probe,
            is_gate: false,
            refusals: 0,
            source: Source::Event(Box::new(waiting)),
        }
    }

    #[must_use]
    pub fn letter(index: usize, record: Record<'static>, topic: u16, key: u64) -> Self {
        Item {
            topic,
            key,
            asked: (record.partition >= 0).then(|| record.partition.into()),
            is_alone: false,
            is_probe: false,
            is_gate: false,
            refusals: 0,
            source: Source::Letter {
                index,
                record: Box::new(record),
            },
        }
    }

    #[must_use]
    pub fn record(&self) -> &Record<'static> {
        match &self.source {
            Source::Event(waiting) => &waiting.record,
            Source::Letter { record, .. } => record,
        }
    }

    /// Its number in the batch that is being retried.
    #[must_use]
    pub fn letter_index(&self) -> Option<usize> {
        match &self.source {
            Source::Event(_) => None,
            Source::Letter { index, .. } => Some(*index),
        }
    }

    /// Items of one key stand in this order.
    fn order(&self) -> (bool, usize) {
        match &self.source {
            Source::Event(waiting) => (false, waiting.ticket.0),
            Source::Letter { index, .. } => (true, *index),
        }
    }

    /// Everything before it has to be out of the other producer's hands. A dead letter has
    /// nothing before it.
    fn waits_for(&self) -> Option<Ticket> {
        match &self.source {
            Source::Event(waiting) => Some(waiting.ticket),
            Source::Letter { .. } => None,
        }
    }
}

/// What became of an item.
#[derive(Debug)]
pub enum Outcome {
    Delivered(Item),
    /// Refused alone, with this.
    Poison(Item, KafkaCode),
}

/// What a finished group says as a whole.
#[derive(Debug, Default)]
pub struct Finished {
    pub outcomes: Vec<Outcome>,
    /// The first code that is no consequence of another and no poison.
    pub trouble: Option<KafkaCode>,
}

/// How a code is to be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Judged {
    Poison,
    /// As poison, and one refusal proves it.
    PoisonAtOnce,
    Trouble,
    Consequence,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Idle,
    Out,
    Rebuilding,
}

/// How far the other producer is.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// The oldest event that is with it, or has to come again.
    pub at_risk: Ticket,
    /// Everything below has arrived.
    pub delivered_below: Ticket,
}

impl Bounds {
    fn let_go(&self, item: &Item) -> bool {
        match item.waits_for() {
            Some(ticket) if item.is_gate => ticket <= self.delivered_below,
            Some(ticket) => ticket < self.at_risk,
            None => true,
        }
    }
}

#[derive(Debug)]
pub struct Trial {
    /// In the order in which they have to go.
    queue: VecDeque<Item>,
    out: Vec<(Item, Option<Result<(), KafkaCode>>)>,
    /// Tried items of a key, by its hash.
    keys: HashMap<u64, usize>,
    state: State,
    size: usize,
    rest: Duration,
    rests_until: Moment,
}

impl Default for Trial {
    fn default() -> Self {
        Trial {
            queue: VecDeque::new(),
            out: Vec::new(),
            keys: HashMap::new(),
            state: State::Idle,
            size: GROUP_MAX,
            rest: REST_MIN,
            rests_until: Moment::ZERO,
        }
    }
}

impl Trial {
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty() && self.out.is_empty()
    }

    /// Must an event of this key wait because another is being tried?
    #[must_use]
    pub fn has_key(&self, key: u64) -> bool {
        !self.keys.is_empty() && self.keys.contains_key(&key)
    }

    /// Must this event of the key wait because an earlier one is being tried?
    #[must_use]
    pub fn has_before(&self, key: u64, ticket: Ticket) -> bool {
        let is_before = |item: &Item| {
            item.key == key && item.waits_for().is_none_or(|earlier| earlier < ticket)
        };
        self.has_key(key) && (self.queue.iter().any(is_before) || self.out().any(is_before))
    }

    /// Is something with the producer?
    #[must_use]
    pub fn is_out(&self) -> bool {
        self.state == State::Out
    }

    /// Until when nothing is tried, where that is later than now.
    #[must_use]
    pub fn rests_until(&self) -> Option<Moment> {
        (!self.queue.is_empty() && self.state == State::Idle).then_some(self.rests_until)
    }

    /// What is not with the producer.
    pub fn waiting(&self) -> impl Iterator<Item = &Item> {
        self.queue.iter()
    }

    /// Topics of what waits.
    pub fn topics(&self) -> impl Iterator<Item = u16> {
        self.queue.iter().map(|item| item.topic)
    }

    /// Puts an item where its order has it.
    pub fn push(&mut self, item: Item) {
        *self.keys.entry(item.key).or_default() += 1;
        self.enqueue(item);
    }

    fn enqueue(&mut self, item: Item) {
        let order = item.order();
        let at = self.queue.partition_point(|own| own.order() <= order);
        self.queue.insert(at, item);
    }

    /// What is to be sent now, each with its number for [`Trial::report`].
    /// `place` is the partition that an item goes to, `None` while it cannot go.
    pub fn next_group(
        &mut self,
        bounds: Bounds,
        now: Moment,
        mut place: impl FnMut(&Item) -> Option<i32>,
    ) -> usize {
        if self.state != State::Idle || now < self.rests_until || self.queue.is_empty() {
            return 0;
        }
        let mut blocked: HashSet<u64> = HashSet::new();
        let mut staying = VecDeque::new();
        let mut to: Option<(u16, i32)> = None;
        let mut bytes = 0;
        while let Some(item) = self.queue.pop_front() {
            let is_first = self.out.is_empty();
            let is_full = self.out.len() >= self.size
                || bytes >= GROUP_BYTES_MAX
                || self.out.first().is_some_and(|(first, _)| first.is_alone);
            if is_full {
                staying.push_back(item);
                staying.append(&mut self.queue);
                break;
            }
            let is_free = !blocked.contains(&item.key)
                && bounds.let_go(&item)
                && (is_first || !item.is_alone);
            let partition = if is_free { place(&item) } else { None };
            // Whether it goes or stays: what comes behind it has to wait for it.
            blocked.insert(item.key);
            match partition {
                Some(partition) if to.is_none_or(|to| to == (item.topic, partition)) => {
                    to = Some((item.topic, partition));
                    bytes += item.record().footprint();
                    self.out.push((item, None));
                }
                Some(_) | None => staying.push_back(item),
            }
        }
        self.queue = staying;
        if !self.out.is_empty() {
            self.state = State::Out;
        }
        self.out.len()
    }

    /// The items that are out.
    pub fn out(&self) -> impl Iterator<Item = &Item> {
        self.out.iter().map(|(item, _)| item)
    }

    /// What the broker says of one of the group.
    pub fn report(&mut self, number: usize, result: Result<(), KafkaCode>) {
        if let Some((_, known)) = self.out.get_mut(number) {
            *known = Some(result);
        }
    }

    /// The group, once every report is in.
    pub fn finish(
        &mut self,
        now: Moment,
        mut judge: impl FnMut(&Item, KafkaCode) -> Judged,
    ) -> Option<Finished> {
        let is_complete =
            !self.out.is_empty() && self.out.iter().all(|(_, result)| result.is_some());
        if self.state != State::Out || !is_complete {
            return None;
        }
        self.state = State::Idle;
        let group = std::mem::take(&mut self.out);
        let was_alone = group.len() == 1;
        let mut finished = Finished::default();
        let mut again = Vec::new();
        let mut is_halved = false;
        for (mut item, result) in group {
            let code = match result.expect("all are in") {
                Ok(()) => {
                    self.forget_key(item.key);
                    finished.outcomes.push(Outcome::Delivered(item));
                    continue;
                }
                Err(code) => code,
            };
            match judge(&item, code) {
                judged @ (Judged::Poison | Judged::PoisonAtOnce) if was_alone => {
                    item.refusals += 1;
                    if judged == Judged::PoisonAtOnce || item.refusals >= REFUSALS_MAX {
                        self.forget_key(item.key);
                        finished.outcomes.push(Outcome::Poison(item, code));
                        continue;
                    }
                }
                Judged::Poison | Judged::PoisonAtOnce => is_halved = true,
                Judged::Trouble => {
                    finished.trouble = finished.trouble.or(Some(code));
                }
                Judged::Consequence => {}
            }
            again.push(item);
        }
        if finished.trouble.is_some() {
            self.rests_until = now + self.rest;
            self.rest = (self.rest * 2).min(REST_MAX);
        } else if is_halved {
            self.size = (again.len() / 2).max(1);
        } else if again.is_empty() {
            self.size = (self.size * 2).min(GROUP_MAX);
            self.rest = REST_MIN;
        }
        for item in again {
            self.enqueue(item);
        }
        Some(finished)
    }

    /// The producer is being built anew.
    pub fn rebuilding(&mut self) {
        self.state = State::Rebuilding;
    }

    pub fn rebuilt(&mut self) {
        if self.state == State::Rebuilding {
            self.state = State::Idle;
        }
    }

    /// Takes out what is meant and not with the producer.
    pub fn take(&mut self, mut is_meant: impl FnMut(&Item) -> bool) -> Vec<Item> {
        let mut taken = Vec::new();
        let mut staying = VecDeque::new();
        while let Some(item) = self.queue.pop_front() {
            if is_meant(&item) {
                self.forget_key(item.key);
                taken.push(item);
            } else {
                staying.push_back(item);
            }
        }
        self.queue = staying;
        taken
    }

    /// Which of a topic's items go alone for their size.
    pub fn review(&mut self, topic: u16, is_too_large: impl Fn(&Record<'static>) -> bool) {
        for item in &mut self.queue {
            if item.topic == topic && item.is_alone && !item.is_probe && !item.is_gate {
                item.is_alone = is_too_large(item.record());
            }
        }
    }

    /// Forgets everything. Returns whether something is with the producer, which then has to be
    /// built anew; nothing is sent before it was.
    pub fn clear(&mut self) -> bool {
        let state = std::mem::take(self).state;
        if state != State::Idle {
            self.state = State::Rebuilding;
        }
        state == State::Out
    }

    fn forget_key(&mut self, key: u64) {
        if let Some(count) = self.keys.get_mut(&key) {
            *count -= 1;
            if *count == 0 {
                self.keys.remove(&key);
            }
        }
    }
}
