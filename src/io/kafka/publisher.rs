//! The publisher: one librdkafka producer, owned and polled by the thread that sends.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::error::KafkaError;
use rdkafka::message::{Header as KafkaHeader, OwnedHeaders};
use rdkafka::producer::{BaseProducer, BaseRecord, Producer as _, PurgeConfig};
use tracing::{error, info};

use super::context::{BrokerStats, ClientNotice, Inbox};
use super::native::{Producer, Signal};
use super::token::TokenSource;
use super::{News, Reach, Settings, Watch, code_of, native};
use crate::error::{Class, Failure, kafka};
use crate::record::{KafkaCode, Record, Report, Ticket};

/// How long a producer that is being replaced may still hear from the broker about what it has
/// sent. What the broker says in time need not be sent again.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// An outage is said again after this, not at each of the client library's attempts.
const SAID_AGAIN_AFTER: Duration = Duration::from_secs(60);
/// More different texts than this, and the oldest are forgotten all together.
const SAID_MAX: usize = 64;

/// A producer that was refused for want of a right is dead: the next one shows whether it was
/// granted.
const DENIED_AGAIN_AFTER: Duration = Duration::from_secs(10);
/// Two producers that are not refused say that it was.
const DENIED_FOR: Duration = Duration::from_secs(25);

const TOPIC_EXCEPTION: KafkaCode = KafkaCode(17);

/// ```text
///            bad report, refused send            start_rebuild / forget_all
///  Sending ───────────────────────────▶ Refusing ─────────────▶ Emptying
///     ▲ └──────────────────────────────────────────────────────▶ │
///     └──────────────────── rebuild_turn, nothing in flight ──────┘
/// ```
/// In all but `Sending` every send is refused, which is a report as any other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Sending,
    Refusing,
    Emptying { deadline: Option<Duration> },
}

/// A producer was replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rebuilt {
    /// The broker was not heard out: records reported as failed may have been written.
    pub late: bool,
}

/// What a refusal means for what is sent after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// The stream's: nothing may go before it.
    Gapless,
    /// One batch at a time: nothing is behind it.
    Apart,
}

pub struct Publisher {
    settings: Settings,
    kind: Kind,
    /// `None` while a replacement cannot be made.
    producer: Option<Producer>,
    signal: Arc<Signal>,
    /// Collected, not yet given to the caller.
    ready: Vec<Report>,
    notices: Vec<ClientNotice>,
    /// What was said, and when.
    said: HashMap<String, Instant>,
    in_flight: usize,
    state: State,
    late: bool,
    watch: Watch,
    /// What a producer was refused as a whole, and when.
    denied: Option<(ClientNotice, Instant)>,
    /// When the producer was made.
    made_at: Instant,
    /// What the producer logs in with.
    login: Option<(String, String)>,
}

impl Publisher {
    /// Makes the producer. Returns before it has connected: no broker need be there.
    ///
    /// # Errors
    /// Usage: properties that do not go together, a certificate file that is not there.
    pub fn new(settings: &Settings) -> Result<Self, Failure> {
        Publisher::of(settings, Kind::Gapless)
    }

    /// For records that are sent apart: the caller gives it one group at a time, of different keys.
    /// A refusal does not stop it; only a producer that is dead does.
    ///
    /// # Errors
    /// As [`Publisher::new`].
    pub fn apart(settings: &Settings) -> Result<Self, Failure> {
        Publisher::of(settings, Kind::Apart)
    }

    fn of(settings: &Settings, kind: Kind) -> Result<Self, Failure> {
        let signal = Arc::new(Signal::default());
        let producer = make(settings, kind, &signal)?;
        Ok(Publisher {
            settings: settings.clone(),
            kind,
            producer: Some(producer),
            signal,
            ready: Vec::new(),
            notices: Vec::new(),
            said: HashMap::new(),
            in_flight: 0,
            state: State::Sending,
            late: false,
            watch: Watch::default(),
            denied: None,
            made_at: Instant::now(),
            login: settings.login(),
        })
    }

    /// Resolves when [`Publisher::drain`] may have something, at once if it came before the call.
    /// Dropping the future loses no wake-up.
    pub async fn woken(&self) {
        self.signal.wait().await;
    }

    /// Appends all reports that are there. Does not block.
    pub fn drain(&mut self, reports: &mut Vec<Report>) {
        self.collect();
        self.in_flight -= self.ready.len();
        reports.append(&mut self.ready);
    }

    /// Hands a record to the client library, which copies it. Does not block and does not fail:
    /// a refusal is a report of the next `drain`, and everything after it is refused too, with
    /// `PURGE_QUEUE`, until the producer was rebuilt.
    pub fn send(&mut self, record: &Record<'_>, ticket: Ticket) {
        self.in_flight += 1;
        // A bad report that waits in the queue must stop this record too. The flag spares the
        // queue's lock while there is none.
        if self.signal.is_raised() {
            self.collect();
        }
        let result = match (self.state, &self.producer) {
            (State::Sending, Some(producer)) => hand_over(producer.client(), record, ticket),
            (State::Sending | State::Refusing | State::Emptying { .. }, _) => {
                Err(kafka::PURGE_QUEUE)
            }
        };
        if let Err(code) = result {
            if self.is_stopped_by(code) {
                self.refuse_from_now_on();
            }
            self.ready.push(Report { ticket, result });
            self.signal.raise();
        }
    }

    /// Records handed over whose report [`Publisher::drain`] has not given yet.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Would the next record be handed over? Not from a bad report until after the rebuild.
    #[must_use]
    pub fn is_sending(&self) -> bool {
        self.state == State::Sending
    }

    /// Begins to replace the producer. Due at the first bad report: from a producer that has
    /// failed, some records in flight get no report at all until it is purged. What waits in its
    /// queue comes back as `PURGE_QUEUE`, what the broker has is waited for. Go on draining, and
    /// turn [`Publisher::rebuild_turn`].
    pub fn start_rebuild(&mut self) {
        if let Some(producer) = &self.producer {
            // Non-blocking: the client's threads may be busy resolving a name for many seconds.
            let queue = PurgeConfig::default().queue().non_blocking();
            producer.client().purge(queue);
        }
        if !matches!(self.state, State::Emptying { .. }) {
            self.state = State::Emptying { deadline: None };
        }
    }

    /// As `start_rebuild`, and gives up at once on what the broker has: for another history of
    /// the database or a lost leadership, where nothing of ours may be written any more.
    pub fn forget_all(&mut self) {
        self.start_rebuild();
        self.purge_all();
    }

    /// One step of a rebuild; `None` when none was begun or it is not complete. To be turned after
    /// each drain and at least every second; `now` is any clock that does not jump.
    pub fn rebuild_turn(&mut self, now: Duration) -> Option<Rebuilt> {
        let State::Emptying { deadline } = self.state else {
            return None;
        };
        if self.in_flight > 0 {
            match deadline {
                None => {
                    let deadline = Some(now + LAST_WORDS);
                    self.state = State::Emptying { deadline };
                }
                Some(at) if now >= at => {
                    self.purge_all();
                    let deadline = Some(now + LAST_WORDS);
                    self.state = State::Emptying { deadline };
                }
                Some(_) => {}
            }
            return None;
        }
        self.retire();
        match make(&self.settings, self.kind, &self.signal) {
            Ok(producer) => {
                self.login = self.settings.login();
                self.producer = Some(producer);
                self.made_at = Instant::now();
                self.state = State::Sending;
                Some(Rebuilt {
                    late: std::mem::take(&mut self.late),
                })
            }
            Err(failure) => {
                error!("{}; will be tried again", failure.one_line());
                None
            }
        }
    }

    /// The largest batch that every topic takes. Takes effect with the next rebuild.
    pub fn set_batch_limit(&mut self, bytes: usize) {
        self.settings.limit_batch(bytes);
    }

    /// What the client library says about the cluster, each thing once a minute.
    pub fn client_notices(&mut self) -> Vec<ClientNotice> {
        if let Some(producer) = &self.producer {
            let context = producer.client().context();
            self.notices.append(&mut context.take_notices());
        }
        let token = self.settings.token();
        self.notices
            .extend(token.and_then(TokenSource::take_notice));
        if !self.notices.is_empty() {
            self.watch.suspect();
        }
        let now = Instant::now();
        let mut notices = std::mem::take(&mut self.notices);
        let denial = |notice: &&ClientNotice| notice.code == kafka::CLUSTER_AUTHORIZATION_FAILED;
        if let Some(notice) = notices.iter().find(denial) {
            self.denied = Some((notice.clone(), now));
        }
        notices.retain(|notice| self.is_due(&notice.text, now));
        notices
    }

    fn is_due(&mut self, text: &str, now: Instant) -> bool {
        let known = self.said.get(text);
        let is_due = known.is_none_or(|said| now - *said >= SAID_AGAIN_AFTER);
        if is_due {
            if self.said.len() >= SAID_MAX {
                self.said.clear();
            }
            self.said.insert(text.to_owned(), now);
        }
        is_due
    }

    /// What the cluster refuses this principal as a whole, and what to do about it.
    #[must_use]
    pub fn denied(&self) -> Option<(String, String)> {
        let (notice, _) = self.denied.as_ref()?;
        let what = format!("this principal may not produce: {}", notice.text);
        Some((what, kafka::entry(notice.code).remedy.to_owned()))
    }

    /// Is another producer to show whether the right was granted meanwhile?
    pub fn wants_another(&mut self) -> bool {
        let now = Instant::now();
        self.denied.take_if(|(_, at)| now - *at >= DENIED_FOR);
        self.denied.is_some() && now - self.made_at >= DENIED_AGAIN_AFTER
    }

    /// Something hints that not all is well with the cluster.
    pub fn suspect(&mut self) {
        self.watch.suspect();
    }

    /// Is another look at the cluster due? Then it is taken to be under way until `on_reach`.
    pub fn wants_look(&mut self, now: Duration) -> bool {
        self.watch.wants_look(now)
    }

    /// What a look has found; a password that was changed meanwhile is taken up.
    pub fn on_reach(&mut self, reach: Reach, now: Duration) -> News {
        self.renew_login();
        self.watch.on_reach(reach, now)
    }

    /// The client goes on with the user and the password that it was made with, while files change.
    fn renew_login(&mut self) {
        let login = self.settings.login();
        if let (Some(new), Some(producer)) = (&login, &self.producer)
            && login != self.login
        {
            native::set_login(producer.client(), &new.0, &new.1);
            info!("kafka: user or password has changed, and is used from now on");
            self.login = login;
        }
    }

    /// What is wrong with Kafka as the last look found it, and what to do about it.
    #[must_use]
    pub fn trouble(&self) -> Option<(String, String)> {
        self.watch.trouble()
    }

    /// Did the last look at the cluster find nothing wrong?
    #[must_use]
    pub fn is_well(&self) -> bool {
        self.watch.is_well()
    }

    /// From the client's statistics; `None` in the first ten seconds.
    #[must_use]
    pub fn broker_stats(&self) -> Option<BrokerStats> {
        self.producer.as_ref()?.client().context().stats()
    }

    /// How many partitions the producer knows of each topic: each time its statistics come.
    #[must_use]
    pub fn take_partitions(&self) -> Vec<(String, i32)> {
        match &self.producer {
            Some(producer) => producer.client().context().take_partitions(),
            None => Vec::new(),
        }
    }

    /// Looks without draining.
    #[cfg(test)]
    pub(super) fn holds_a_bad_report(&self) -> bool {
        let producer = self.producer.as_ref().expect("not in a rebuild");
        while producer.queue_length() > 0 {
            producer.client().poll(Duration::ZERO);
        }
        let reports = producer.client().context().reports();
        reports.iter().any(|report| report.result.is_err())
    }

    /// Empties the client's queue into `ready`.
    fn collect(&mut self) {
        self.signal.lower();
        let Some(producer) = &self.producer else {
            return;
        };
        // A poll handles one event, and librdkafka wakes us on empty -> not empty only: what is
        // left here would wait for ever.
        while producer.queue_length() > 0 {
            producer.client().poll(Duration::ZERO);
        }
        let mut fresh = producer.client().context().reports();
        let failed = fresh
            .iter()
            .filter_map(|report| report.result.err())
            .any(|code| self.is_stopped_by(code));
        if self.denied.is_some() && fresh.iter().any(|report| report.result.is_ok()) {
            self.denied = None;
        }
        self.ready.append(&mut fresh);
        drop(fresh);
        if failed {
            self.refuse_from_now_on();
        }
    }

    fn is_stopped_by(&self, code: KafkaCode) -> bool {
        match self.kind {
            Kind::Gapless => true,
            Kind::Apart => kafka::entry(code).class == Class::Fatal,
        }
    }

    fn refuse_from_now_on(&mut self) {
        if self.state == State::Sending {
            self.state = State::Refusing;
        }
    }

    fn purge_all(&mut self) {
        if let Some(producer) = &self.producer {
            self.late |= self.in_flight > 0;
            let all = PurgeConfig::default().queue().inflight().non_blocking();
            producer.client().purge(all);
        }
    }

    /// Destroys the producer on a thread of its own: the client library joins its own threads,
    /// and one of them may be resolving a name.
    fn retire(&mut self) {
        let Some(producer) = self.producer.take() else {
            return;
        };
        self.notices
            .append(&mut producer.client().context().take_notices());
        let spawned = std::thread::Builder::new()
            .name("kafka-retire".into())
            .spawn(move || drop(producer));
        if let Err(error) = spawned {
            // Then it was dropped here, by the closure that was never run.
            error!(%error, "no thread could be started");
        }
    }
}

fn make(settings: &Settings, kind: Kind, signal: &Arc<Signal>) -> Result<Producer, Failure> {
    let recipe = match kind {
        Kind::Gapless => settings.producing(),
        Kind::Apart => settings.producing_apart(),
    }?;
    let client = recipe.make()?;
    Ok(Producer::new(client, Arc::clone(signal)))
}

fn hand_over(
    client: &BaseProducer<Inbox>,
    record: &Record<'_>,
    ticket: Ticket,
) -> Result<(), KafkaCode> {
    let mut sent = BaseRecord::<[u8], [u8], usize>::with_opaque_to(&record.topic, ticket.0)
        .partition(record.partition)
        .key(&*record.key);
    // Zero is the client library's word for "now", too.
    if let Some(timestamp_ms) = record.timestamp_ms {
        sent = sent.timestamp(timestamp_ms);
    }
    if let Some(value) = &record.value {
        sent = sent.payload(&**value);
    }
    if !record.headers.is_empty() {
        let mut headers = OwnedHeaders::new_with_capacity(record.headers.len());
        for header in &record.headers {
            headers = headers.insert(KafkaHeader {
                key: &header.name,
                value: header.value.as_deref(),
            });
        }
        sent = sent.headers(headers);
    }
    client.send(sent).map_err(|(error, _)| match error {
        // The only error without a number: a NUL in the topic's name.
        KafkaError::Nul(_) => TOPIC_EXCEPTION,
        other => code_of(&other),
    })
}
