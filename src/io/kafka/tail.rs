//! Reads the end of a topic for the `event_id`s in it: what a relay that died, or a producer that
//! had to be given up, has delivered without hearing of it.
//!
//! A client of its own on a thread of its own: it asks where each partition ends and where the time
//! in question begins, reads in between, and asks for the ends again until nothing comes any more.
//! That last part is for what is still on its way: requests of a dead producer that wait in a
//! broker's socket, records that followers do not have yet.
//!
//! # Invariants
//! - What is answered was read: a partition counts as read to its end when the record before the
//!   end came, or when the broker said, in an answer to a question that was asked after the end
//!   became known, that there is nothing more. (Transaction markers and compacted records have
//!   offsets and never come.)
//! - Only what every consumer can see counts: a record of a transaction that was aborted does not.
//! - Never more than [`RECORDS_MAX`] and [`SETTLING_RECORDS_MAX`] offsets, whoever else writes.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{BorrowedMessage, Headers as _, Message as _};
use rdkafka::{Offset, TopicPartitionList};
use tokio::sync::{Semaphore, oneshot};

use super::context::Inbox;
use super::{ClientNotice, Settings};
use crate::lsn::PgTimestamp;
use crate::record::OWN_HEADERS;
use crate::tail::{Kept, Tail, TailAnswer};

/// In all partitions of a topic. A relay re-sends what was in flight (10,000 at most) and what it
/// had not confirmed (a tenth of a second), or one transaction: 200,000 is a hundred seconds of 2,000
/// events a second, or a transaction of that size. With what settling adds a set of UUIDs has 2^18
/// places of 17 bytes, twice that while it grows: 13 MB.
const RECORDS_MAX: i64 = 200_000;
/// For all that comes while the ends are asked for again: twice a dead producer's window.
const SETTLING_RECORDS_MAX: i64 = 20_000;
/// Where brokers stamp records, their clock may be behind the database's by so much.
const CLOCKS_APART: Duration = Duration::from_secs(10);

/// Without a record, an end or an answer: the cluster does not answer.
const STILL_MAX: Duration = Duration::from_secs(10);
/// Without one while not a single broker can be reached.
const DOWN_MAX: Duration = Duration::from_secs(2);
/// One wait; between two of them we look whether anybody still wants the answer.
const SLICE: Duration = Duration::from_secs(1);
const POLL: Duration = Duration::from_millis(100);
/// Topics that are read at a time: each has a client with its own connections and 4 MiB of records.
const AT_ONCE_MAX: usize = 4;

/// How long the ends are watched.
#[derive(Clone, Copy, Debug)]
struct Settling {
    /// Two looks that agree are so far apart.
    apart: Duration,
    /// On a topic that never rests.
    most: Duration,
}

/// Requests that a broker has are appended within milliseconds.
const USUALLY: Settling = Settling {
    apart: Duration::from_millis(150),
    most: Duration::from_secs(2),
};
/// A broker that wakes up has other things to do as well.
const AFTER_A_SILENCE: Settling = Settling {
    apart: Duration::from_secs(1),
    most: Duration::from_secs(5),
};
/// A first answer takes tens of milliseconds: after this the cluster was silent.
const SILENCE: Duration = Duration::from_secs(1);
/// So long does a silence make us careful.
const SILENCE_LINGERS: Duration = Duration::from_secs(30);

/// What the readers of one cluster share.
pub struct Tails {
    at_once: Arc<Semaphore>,
    /// When the cluster was last seen not to answer.
    silent: Mutex<Option<Instant>>,
}

impl Default for Tails {
    fn default() -> Self {
        Tails {
            at_once: Arc::new(Semaphore::new(AT_ONCE_MAX)),
            silent: Mutex::new(None),
        }
    }
}

impl Tails {
    fn fell_silent(&self) {
        *self.silent.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    fn settling(&self) -> Settling {
        let silent = *self.silent.lock().unwrap_or_else(PoisonError::into_inner);
        match silent {
            Some(at) if at.elapsed() < SILENCE_LINGERS => AFTER_A_SILENCE,
            Some(_) | None => USUALLY,
        }
    }
}

/// The `event_id`s of the records of a topic that may be as young as `since`, the commit time of the
/// first re-sent transaction, in all partitions and up to their ends. Gives up on a cluster that does
/// not answer, within 10 seconds; ask again after a pause. Dropping the future ends it.
pub async fn read_tail(settings: &Settings, topic: &str, since: PgTimestamp) -> TailAnswer {
    let tails = Arc::clone(&settings.tails);
    let Ok(permit) = Arc::clone(&tails.at_once).acquire_owned().await else {
        return TailAnswer::Failed("nobody reads any more".into());
    };
    let (reply, answer) = oneshot::channel();
    let settings = settings.clone();
    let topic = topic.to_owned();
    // Not one of the runtime's threads: those are waited for when the process ends.
    let spawned = std::thread::Builder::new()
        .name("kafka-tail".into())
        .spawn(move || {
            let consumer = match consumer(&settings) {
                Ok(consumer) => consumer,
                Err(words) => {
                    let _ = reply.send(TailAnswer::Failed(words));
                    return;
                }
            };
            let answer = Reading::new(&consumer, &topic, &tails, &reply).answer(since, &settings);
            if matches!(answer, TailAnswer::Failed(_)) {
                tails.fell_silent();
            }
            // Whoever does not wait any more has dropped his end.
            let _ = reply.send(answer);
            // After the answer: it takes its time.
            drop(consumer);
            drop(permit);
        });
    if let Err(error) = spawned {
        return TailAnswer::Failed(format!("no thread to read with: {error}"));
    }
    answer
        .await
        .unwrap_or_else(|_| TailAnswer::Failed("the reading ended without an answer".into()))
}

fn consumer(settings: &Settings) -> Result<BaseConsumer<Inbox>, String> {
    let recipe = settings.asking().map_err(|failure| failure.one_line())?;
    let mut config = recipe.config;
    config
        // Partitions are assigned and nothing is committed. The library asks who coordinates the
        // group all the same, and a refusal of that is passed over.
        .set("group.id", "walrelay-tail")
        .set("enable.auto.commit", "false")
        .set("enable.auto.offset.store", "false")
        .set("enable.partition.eof", "true")
        .set("isolation.level", "read_committed")
        // Records that retention has taken since the ends were asked for.
        .set("auto.offset.reset", "earliest")
        // An empty answer is held back for this long.
        .set("fetch.wait.max.ms", "50")
        .set("fetch.error.backoff.ms", "50")
        // The records that wait for us; a batch that is larger comes alone.
        .set("queued.max.messages.kbytes", "4096")
        .set("message.max.bytes", "1000000")
        .set("fetch.max.bytes", "4194304")
        .set("reconnect.backoff.ms", "50")
        .set("reconnect.backoff.max.ms", "250");
    if settings.mock().is_some() {
        // The demo broker holds an answer back for as long, whatever arrives meanwhile.
        config.set("fetch.wait.max.ms", "1");
    }
    config
        .create_with_context(recipe.context)
        .map_err(|error| error.to_string())
}

/// Why a reading ends without a tail.
#[derive(Debug, PartialEq, Eq)]
enum End {
    Denied,
    Failed(String),
}

/// What one poll brought, a record apart.
enum Event {
    PartitionEnds(i32),
    Nothing,
}

/// Offsets of one partition: `from` to before `end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Range {
    partition: i32,
    from: i64,
    end: i64,
}

impl Range {
    fn len(&self) -> i64 {
        self.end - self.from
    }
}

/// Offsets by partition.
type Offsets = HashMap<i32, i64>;

/// One reading of one topic.
struct Reading<'a> {
    consumer: &'a BaseConsumer<Inbox>,
    topic: &'a str,
    tails: &'a Tails,
    asked_by: &'a oneshot::Sender<TailAnswer>,
    /// When the cluster last gave us anything.
    progress: Cell<Instant>,
    all_down: Cell<bool>,
    /// The client library's words for what it could not do.
    complaint: Cell<Option<ClientNotice>>,
}

impl<'a> Reading<'a> {
    fn new(
        consumer: &'a BaseConsumer<Inbox>,
        topic: &'a str,
        tails: &'a Tails,
        asked_by: &'a oneshot::Sender<TailAnswer>,
    ) -> Self {
        Reading {
            consumer,
            topic,
            tails,
            asked_by,
            progress: Cell::new(Instant::now()),
            all_down: Cell::new(false),
            complaint: Cell::new(None),
        }
    }

    fn answer(&self, since: PgTimestamp, settings: &Settings) -> TailAnswer {
        // The demo broker knows no times, and keeps little.
        let since = match settings.mock() {
            Some(_) => Offset::Beginning,
            None => Offset::Offset(no_later_than_now(since)),
        };
        match self.read_all(since) {
            Ok((tail, complete)) => TailAnswer::Read { tail, complete },
            Err(End::Denied) => TailAnswer::Denied,
            Err(End::Failed(words)) => TailAnswer::Failed(words),
        }
    }

    fn read_all(&self, since: Offset) -> Result<(Tail, bool), End> {
        let partitions = self.partitions()?;
        // The ends before the beginnings: what is appended in between is young, and where nothing
        // is that young the first end is where to begin later.
        let mut looked = Instant::now();
        let ends = self.offsets(&partitions, Offset::End)?;
        let begins = self.offsets(&partitions, since)?;
        let mut ranges: Vec<Range> = ends
            .iter()
            .map(|(partition, end)| Range {
                partition: *partition,
                from: begins.get(partition).map_or(*end, |from| *from.min(end)),
                end: *end,
            })
            .collect();
        let mut complete = !keep_newest(&mut ranges, RECORDS_MAX);
        let mut read = ends;
        let mut tail = Tail::default();
        complete &= self.read(&ranges, &mut tail)?.fitted;

        let settling = self.tails.settling();
        let mut room = SETTLING_RECORDS_MAX;
        let from = Instant::now();
        loop {
            self.rest_until(looked + settling.apart)?;
            looked = Instant::now();
            let ends = self.offsets(&partitions, Offset::End)?;
            let mut ranges: Vec<Range> = ends
                .iter()
                .map(|(partition, end)| Range {
                    partition: *partition,
                    from: *read.get(partition).unwrap_or(end),
                    end: *end,
                })
                .filter(|range| range.len() > 0)
                .collect();
            complete &= !keep_newest(&mut ranges, room);
            room -= ranges.iter().map(Range::len).sum::<i64>();
            let found = self.read(&ranges, &mut tail)?;
            complete &= found.fitted;
            read.extend(ends);
            // Another producer's records without an `event_id` are nobody's late ones.
            if !found.is_new || room <= 0 || from.elapsed() >= settling.most {
                return Ok((tail, complete));
            }
        }
    }

    /// The topic's partitions. Also makes the client know the topic: one that it has not heard of
    /// is assigned only at its next look.
    fn partitions(&self) -> Result<Vec<i32>, End> {
        loop {
            // Where tokens are used, the first poll is where one is asked for.
            self.rest(Duration::ZERO)?;
            let answer = self.consumer.fetch_metadata(Some(self.topic), SLICE);
            let Ok(metadata) = answer else {
                self.patience()?;
                continue;
            };
            self.progressed();
            let topic = metadata.topics().iter().find(|t| t.name() == self.topic);
            let Some(topic) = topic else {
                return Err(self.failed("the cluster's answer does not name the topic"));
            };
            return match topic.error().map(RDKafkaErrorCode::from) {
                None if !topic.partitions().is_empty() => {
                    Ok(topic.partitions().iter().map(|p| p.id()).collect())
                }
                None => Err(self.failed("the topic has no partitions yet")),
                Some(RDKafkaErrorCode::TopicAuthorizationFailed) => Err(End::Denied),
                Some(code) => Err(self.failed(&code.to_string())),
            };
        }
    }

    /// Where each partition ends, or the first offset of a time; partitions that have none are left
    /// out. One question to each broker; asked again while leaders move.
    fn offsets(&self, partitions: &[i32], at: Offset) -> Result<Offsets, End> {
        let mut asked = TopicPartitionList::new();
        for partition in partitions {
            asked
                .add_partition_offset(self.topic, *partition, at)
                .map_err(|error| self.failed(&error.to_string()))?;
        }
        loop {
            match self.consumer.offsets_for_times(asked.clone(), SLICE) {
                Ok(answer) => match offsets_in(&answer, at) {
                    Ok(found) => {
                        self.progressed();
                        return Ok(found);
                    }
                    Err(Some(KafkaError::OffsetFetch(
                        RDKafkaErrorCode::TopicAuthorizationFailed,
                    ))) => return Err(End::Denied),
                    Err(_) => {}
                },
                Err(KafkaError::OffsetFetch(RDKafkaErrorCode::TopicAuthorizationFailed)) => {
                    return Err(End::Denied);
                }
                Err(_) => {}
            }
            self.patience()?;
            self.rest(POLL)?;
        }
    }

    /// Reads ranges to their ends, into `tail`.
    fn read(&self, ranges: &[Range], tail: &mut Tail) -> Result<Found, End> {
        let mut found = Found {
            is_new: false,
            fitted: true,
        };
        let mut open: HashMap<i32, Range> = ranges
            .iter()
            .filter(|range| range.len() > 0)
            .map(|range| (range.partition, *range))
            .collect();
        if open.is_empty() {
            return Ok(found);
        }
        self.assign(open.values())?;
        while !open.is_empty() {
            let ended = match self.consumer.poll(POLL) {
                Some(Ok(record)) => match open.get(&record.partition()) {
                    Some(range) => {
                        if record.offset() < range.end {
                            found.take(tail, &record);
                        }
                        self.progressed();
                        (record.offset() + 1 >= range.end).then_some(record.partition())
                    }
                    // Of a partition that others write to: that is for the next look.
                    None => None,
                },
                Some(Err(error)) => match self.hear(error)? {
                    Event::PartitionEnds(partition) => Some(partition),
                    Event::Nothing => None,
                },
                None => None,
            };
            if let Some(partition) = ended {
                open.remove(&partition);
                self.progressed();
            }
            self.patience()?;
        }
        let unassigned = self.consumer.unassign();
        unassigned.map_err(|error| self.failed(&error.to_string()))?;
        Ok(found)
    }

    fn assign<'r>(&self, ranges: impl Iterator<Item = &'r Range>) -> Result<(), End> {
        let mut from = TopicPartitionList::new();
        for range in ranges {
            let at = Offset::Offset(range.from);
            from.add_partition_offset(self.topic, range.partition, at)
                .map_err(|error| self.failed(&error.to_string()))?;
        }
        let assigned = self.consumer.assign(&from);
        assigned.map_err(|error| self.failed(&error.to_string()))
    }

    /// Waits with the client's ears open: at least one poll, nothing is assigned.
    fn rest(&self, span: Duration) -> Result<(), End> {
        self.rest_until(Instant::now() + span)
    }

    fn rest_until(&self, until: Instant) -> Result<(), End> {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if let Some(Err(error)) = self.consumer.poll(left.min(POLL)) {
                self.hear(error)?;
            }
            if Instant::now() >= until {
                return Ok(());
            }
        }
    }

    fn hear(&self, error: KafkaError) -> Result<Event, End> {
        let code = match error {
            KafkaError::PartitionEOF(partition) => return Ok(Event::PartitionEnds(partition)),
            KafkaError::MessageConsumption(code) => code,
            error => return Err(self.failed(&error.to_string())),
        };
        match code {
            RDKafkaErrorCode::TopicAuthorizationFailed => Err(End::Denied),
            RDKafkaErrorCode::UnknownTopicOrPartition
            | RDKafkaErrorCode::UnknownTopic
            | RDKafkaErrorCode::UnknownPartition => Err(self.failed(&code.to_string())),
            RDKafkaErrorCode::AllBrokersDown => {
                self.all_down.set(true);
                Ok(Event::Nothing)
            }
            // The rest the client library puts right by itself, or the deadline ends it: a lost
            // connection, a leader that moved, a group that we are no member of anyway.
            _ => Ok(Event::Nothing),
        }
    }

    fn progressed(&self) {
        if self.progress.get().elapsed() >= SILENCE {
            self.tails.fell_silent();
        }
        self.progress.set(Instant::now());
        self.all_down.set(false);
    }

    /// Ends a reading that nobody waits for, or that nothing comes of.
    fn patience(&self) -> Result<(), End> {
        if self.asked_by.is_closed() {
            return Err(End::Failed("nobody waits for it any more".into()));
        }
        let still = self.progress.get().elapsed();
        if still < SILENCE {
            return Ok(());
        }
        self.listen();
        let complaint = self.complaint.take();
        let is_definite = complaint.as_ref().is_some_and(ClientNotice::is_definite);
        self.complaint.set(complaint);
        if is_definite || still >= STILL_MAX || self.all_down.get() && still >= DOWN_MAX {
            return Err(self.failed("no answer"));
        }
        Ok(())
    }

    /// The likeliest cause of a silence, in the client library's words.
    fn listen(&self) {
        let notices = self.consumer.context().take_notices();
        let known = self.complaint.take();
        let likeliest = notices.into_iter().chain(known);
        self.complaint
            .set(likeliest.max_by_key(ClientNotice::weight));
    }

    fn failed(&self, words: &str) -> End {
        self.listen();
        End::Failed(match self.complaint.take() {
            Some(notice) => format!("{words} ({})", notice.text),
            None => words.to_owned(),
        })
    }
}

/// What one reading of ranges brought.
#[derive(Clone, Copy, Debug)]
struct Found {
    /// An `event_id` that was not known yet.
    is_new: bool,
    /// There was room for all.
    fitted: bool,
}

impl Found {
    fn take(&mut self, tail: &mut Tail, record: &BorrowedMessage<'_>) {
        let own = OWN_HEADERS[0];
        let headers = record.headers().into_iter().flat_map(|all| all.iter());
        let id = headers.filter(|h| h.key == own).find_map(|h| h.value);
        let Some(id) = id else {
            return;
        };
        match tail.insert(id) {
            Kept::New => self.is_new = true,
            Kept::Known => {}
            Kept::NoRoom => self.fitted = false,
        }
    }
}

/// Milliseconds since the Unix epoch, some time before `since`, and before our own now where the
/// database's clock is ahead.
fn no_later_than_now(since: PgTimestamp) -> i64 {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let now = i64::try_from(now.as_millis()).unwrap_or(i64::MAX);
    let apart = i64::try_from(CLOCKS_APART.as_millis()).expect("seconds");
    since.unix_millis().min(now).saturating_sub(apart).max(0)
}

/// # Errors
/// A partition was not answered for, with the broker's reason where there is one.
fn offsets_in(answer: &TopicPartitionList, asked: Offset) -> Result<Offsets, Option<KafkaError>> {
    let mut offsets = Offsets::new();
    for element in answer.elements() {
        if let Err(error) = element.error() {
            return Err(Some(error));
        }
        match element.offset() {
            // What was asked is still there: nobody answered.
            offset if offset == asked => return Err(None),
            Offset::Offset(offset) => {
                offsets.insert(element.partition(), offset);
            }
            // No record is that young.
            Offset::End => {}
            Offset::Beginning | Offset::Stored | Offset::Invalid | Offset::OffsetTail(_) => {
                return Err(None);
            }
        }
    }
    Ok(offsets)
}

/// Shortens the longest ranges at their old end until no more than `most` offsets are left. True
/// where something had to go.
fn keep_newest(ranges: &mut [Range], most: i64) -> bool {
    ranges.sort_by_key(Range::len);
    let mut left = most;
    let mut shortened = false;
    for at in 0..ranges.len() {
        let sharers = i64::try_from(ranges.len() - at).unwrap_or(i64::MAX);
        let share = left / sharers;
        let range = &mut ranges[at];
        if range.len() > share {
            range.from = range.end - share;
            shortened = true;
        }
        left -= range.len();
    }
    shortened
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges(lengths: &[i64]) -> Vec<Range> {
        let all = (0..).zip(lengths);
        all.map(|(partition, length)| Range {
            partition,
            from: 1_000,
            end: 1_000 + length,
        })
        .collect()
    }

    fn kept(lengths: &[i64], most: i64) -> (bool, Vec<i64>) {
        let mut all = ranges(lengths);
        let shortened = keep_newest(&mut all, most);
        all.sort_by_key(|range| range.partition);
        for (range, length) in all.iter().zip(lengths) {
            assert_eq!(range.end, 1_000 + length, "the newest stay");
            assert!(range.from >= 1_000);
        }
        (shortened, all.iter().map(Range::len).collect())
    }

    #[test]
    fn the_longest_ranges_give_up_their_oldest_records() {
        assert_eq!(kept(&[3, 0, 7], 10), (false, vec![3, 0, 7]));
        assert_eq!(kept(&[3, 0, 8], 10), (true, vec![3, 0, 7]));
        assert_eq!(kept(&[100, 5, 40, 100], 65), (true, vec![20, 5, 20, 20]));
        assert_eq!(kept(&[9, 9, 9], 10), (true, vec![3, 3, 4]));
        assert_eq!(kept(&[9, 9], 0), (true, vec![0, 0]));
        assert_eq!(kept(&[], 0), (false, vec![]));
    }

    #[test]
    fn the_time_is_a_margin_before_the_commit_and_never_in_the_future() {
        let commit = PgTimestamp::from_unix_micros(1_700_000_000_000_000);
        assert_eq!(no_later_than_now(commit), 1_699_999_990_000);
        let ahead = no_later_than_now(PgTimestamp(i64::MAX));
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = now.expect("after 1970").as_millis();
        assert!(u128::try_from(ahead).expect("positive") <= now - 10_000);
        assert_eq!(no_later_than_now(PgTimestamp(i64::MIN)), 0);
    }

    #[test]
    fn a_silence_makes_the_next_readings_careful() {
        let tails = Tails::default();
        assert_eq!(tails.settling().apart, USUALLY.apart);
        tails.fell_silent();
        assert_eq!(tails.settling().apart, AFTER_A_SILENCE.apart);
    }
}
