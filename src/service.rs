//! The loop: wait for something, tell the machine, do what it orders. The only place that sees
//! both the decisions (`relay`) and the sockets (`io`), and the only one that reads a clock.
//!
//! In each turn, in this order: delivery reports (they free the window), WAL that is already in
//! the buffer while the machine wants it, orders; then it waits for whichever comes first of a
//! signal, an answer of a job, the side session's end, Kafka's wake-up, more WAL, the next timeout.
//!
//! # Invariants
//! Nothing that can block runs here: connecting, statements and questions to the cluster are jobs
//! on the side that answer over a channel.

mod apart;
mod health;
mod jobs;
mod letters;
mod pace;
mod signals;
mod words;

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use rustix::time::{ClockId, clock_gettime};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

use crate::config::RunConfig;
use crate::error::{self, Class, DbError, Exit, Failure};
use crate::fault;

use crate::io::heal::{self, Healing};
use crate::io::kafka::{self, Publisher};
use crate::io::side::Side;
use crate::io::slot::{Frame, Intake, Slot, SlotError, Turn};
use crate::io::wall_clock;
use crate::record::{Record, Report, Ticket, TopicState};
use crate::relay::Moment;
use crate::relay::intake::Outlet;
use crate::relay::machine::Machine;
use crate::relay::orders::{
    Close, Heard, Notice, OpenError, Order, Probed, Purge, Settings, Severity, StreamEnd,
};
use crate::telemetry::{self, Peer};
use health::{Sampler, Vitals};
use jobs::{Done, Link, Session, Surroundings};
use pace::Pace;
pub use signals::Termination;

/// Events that were given to the Kafka client and are not delivered.
const IN_FLIGHT_EVENTS_MAX: usize = 10_000;
/// From the oldest undelivered event to the newest taken one.
const SPAN_EVENTS_MAX: usize = 100_000;
/// The server cuts a silent connection after this, and we take ourselves to be cut off after half.
const WAL_SENDER_TIMEOUT: Duration = Duration::from_secs(15);
/// WAL messages between two looks at the delivery reports.
const BURST: usize = 256;
/// Signals closer together than this ask for one and the same stop.
const SAME_STOP: Duration = Duration::from_secs(1);
/// What the server repeats is logged again after this.
const SAID_AGAIN_AFTER: Duration = Duration::from_secs(60);
const LIVE_INTERVAL: Duration = Duration::from_secs(1);
/// Batches are not made smaller than this, whatever a broker refuses.
const BATCH_BYTES_MIN: usize = 16_384;

/// Who ends the relay.
pub enum StopBy {
    /// SIGTERM and SIGINT.
    Signals,
    /// Whoever runs it as a part: signals are theirs to handle.
    Request(oneshot::Receiver<()>),
}

/// `walrelay run`.
///
/// # Errors
/// What ended the relay, other than being asked to stop.
pub async fn run(config: RunConfig) -> Result<(), Failure> {
    run_by(config, StopBy::Signals).await
}

/// As [`run`], ended by somebody else.
///
/// # Errors
/// As [`run`].
pub async fn run_by(config: RunConfig, stop: StopBy) -> Result<(), Failure> {
    let client_id = format!("walrelay-{}", config.source.slot);
    let kafka = kafka::Settings::new(&config.kafka, client_id)?;
    run_with(config, kafka, stop).await
}

/// As [`run`], on Kafka settings that the caller shares (the demo broker).
///
/// # Errors
/// As [`run`].
pub async fn run_with(
    config: RunConfig,
    kafka: kafka::Settings,
    stop: StopBy,
) -> Result<(), Failure> {
    // Before anything can be seen of us: from then on a signal is an order to drain.
    let signals = Signals::new(stop)?;
    let settings = Settings {
        on_poison: config.on_poison,
        on_gap: config.on_gap,
        topic_grace: config.topic_grace,
        mapping: config.mapping.clone(),
        in_flight_events_max: IN_FLIGHT_EVENTS_MAX,
        in_flight_bytes_max: config.in_flight_bytes,
        span_events_max: SPAN_EVENTS_MAX,
        stall_timeout: config.stall_timeout,
        shutdown_timeout: config.shutdown_timeout,
        wal_sender_timeout: WAL_SENDER_TIMEOUT,
    };
    let (tell, answers) = mpsc::unbounded_channel();
    let now = now();
    let process_id = process_id()?;
    let vitals = Vitals::start(config.http, &config.source, &process_id)?;
    let mut service = Service {
        machine: Machine::new(settings, now),
        publisher: Publisher::new(&kafka)?,
        apart: None,
        surroundings: Arc::new(Surroundings {
            source: config.source,
            topics: config.mapping.constant_topic().into_iter().collect(),
            mapping: config.mapping,
            create_topics: config.kafka.create_topics,
            on_gap: config.on_gap,
            kafka,
            process_id,
            wal_sender_timeout: WAL_SENDER_TIMEOUT,
            sessions: AtomicU32::new(0),
            told: Mutex::default(),
            table_oid: AtomicU32::new(0),
        }),
        vitals,
        tell,
        side: None,
        link: None,
        sampler: Sampler::default(),
        slot: None,
        heal: None,
        opening: None,
        reports: Vec::new(),
        pace: Pace::default(),
        batch_bytes: 1_000_000,
        is_batch_shrunk: false,
        live_at: now,
        standbys_said_at: None,
        exit: None,
    };
    service.run(answers, signals).await
}

/// Since boot, suspension included.
fn now() -> Moment {
    let time = clock_gettime(ClockId::Boottime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or_default();
    let nanos = u32::try_from(time.tv_nsec).unwrap_or_default();
    Duration::new(seconds, nanos)
}

/// A name that no other process has.
///
/// # Errors
/// There is no /proc.
pub fn process_id() -> Result<String, Failure> {
    std::fs::read_to_string("/proc/sys/kernel/random/uuid")
        .map(|id| id.trim().to_owned())
        .map_err(|error| {
            Failure::new(
                Exit::Unexpected,
                format!("cannot read /proc/sys/kernel/random/uuid: {error}"),
                "run on Linux with /proc mounted",
            )
        })
}

struct Service {
    machine: Machine,
    publisher: Publisher,
    /// Of what is sent apart; made when there is something for the first time.
    apart: Option<Publisher>,
    surroundings: Arc<Surroundings>,
    vitals: Vitals,
    tell: mpsc::UnboundedSender<Done>,
    /// The session that holds the lock; away while a job looks for the lead with it.
    side: Option<Side>,
    link: Option<Arc<Link>>,
    sampler: Sampler,
    slot: Option<Slot>,
    /// In the place of `slot`: the rows of a gap.
    heal: Option<Box<Healing>>,
    opening: Option<JoinHandle<()>>,
    reports: Vec<Report>,
    pace: Pace,
    batch_bytes: usize,
    is_batch_shrunk: bool,
    live_at: Moment,
    /// When the server last said that it waits for a standby.
    standbys_said_at: Option<Moment>,
    exit: Option<Result<(), Failure>>,
}

/// What the wait ended with.
enum Event {
    Signal,
    Answer(Done),
    SideEnded(DbError),
    Kafka,
    Stream(Result<Turn, DbError>),
    Heal(Result<heal::Turn, DbError>),
    Timeout,
}

impl Outlet for Publisher {
    fn send(&mut self, record: &Record<'_>, ticket: Ticket) {
        // A failing hand-over shows nowhere but in a report.
        let _ = fault::sending(ticket.0, || record.event_id());
        Publisher::send(self, record, ticket);
    }
}

impl Service {
    async fn run(
        &mut self,
        mut answers: mpsc::UnboundedReceiver<Done>,
        mut signals: Signals,
    ) -> Result<(), Failure> {
        tokio::select! {
            () = signals.next() => return Ok(()),
            () = self.vitals.wait_alive() => {}
            done = jobs::reach(Arc::clone(&self.surroundings)) => self.on_first_reach(done)?,
        }
        self.machine.advance(now());
        loop {
            let now = now();
            self.vitals.turned(now);
            self.machine.turned(now);
            self.take_reports(now);
            self.read_buffered(now);
            self.machine.advance(now);
            self.obey(now);
            self.sample(now);
            self.publish_progress(now);
            if let Some(exit) = self.exit.take() {
                telemetry::clear_live();
                return exit;
            }
            if self.machine.wants_wal() && self.has_frames() {
                // Nothing else is waited for, but everything else gets its turn.
                tokio::task::yield_now().await;
                continue;
            }
            if self.machine.wants_wal() {
                self.rest();
            }
            let event = self.wait(&mut signals, &mut answers, now).await;
            self.handle(event, &mut signals);
        }
    }

    /// See [`pace`]: a real, short sleep of the whole thread.
    fn rest(&mut self) {
        if let Some(slot) = &self.slot {
            let (lag, in_flight) = (self.machine.lag(), self.publisher.in_flight());
            self.pace
                .rest(lag, in_flight, slot.gulp(), || slot.waiting());
        }
    }

    fn has_frames(&mut self) -> bool {
        self.pace.has_more
    }

    async fn wait(
        &mut self,
        signals: &mut Signals,
        answers: &mut mpsc::UnboundedReceiver<Done>,
        now: Moment,
    ) -> Event {
        let wants_wal = self.machine.wants_wal();
        let timeout = self.machine.next_timeout(now).saturating_sub(now);
        let live = self.live_at.saturating_sub(now);
        let timeout = if telemetry::live_is_on() {
            timeout.min(live)
        } else {
            timeout
        };
        let Service {
            publisher,
            apart,
            side,
            slot,
            heal,
            ..
        } = self;
        tokio::select! {
            biased;
            () = signals.next() => Event::Signal,
            Some(done) = answers.recv() => Event::Answer(done),
            error = closed(side) => Event::SideEnded(error),
            () = publisher.woken() => Event::Kafka,
            () = apart::woken(apart) => Event::Kafka,
            turn = stream_turn(slot, wants_wal) => Event::Stream(turn),
            turn = heal_turn(heal, wants_wal) => Event::Heal(turn),
            () = tokio::time::sleep(timeout) => Event::Timeout,
        }
    }

    fn handle(&mut self, event: Event, signals: &mut Signals) {
        let now = now();
        self.machine.turned(now);
        match event {
            Event::Signal if signals.count > 1 => {
                self.exit = Some(Err(Failure::new(
                    Exit::Unexpected,
                    "stopped by a second signal, without draining",
                    "nothing is lost: what was not confirmed is in the slot and comes again",
                )));
            }
            Event::Signal => self.machine.on_stop_asked(now),
            Event::Answer(done) => self.on_done(done, now),
            Event::SideEnded(error) => {
                self.side = None;
                self.link = None;
                self.sampler.session(None, now);
                self.vitals.postgres_failed(Class::Transient);
                self.machine
                    .on_side_end(error.sqlstate(), &error.to_string(), now);
            }
            Event::Stream(Ok(Turn::Read(_))) => self.pace.read(),
            Event::Stream(Ok(Turn::Ended)) => {
                self.stream_ended(StreamEnd::Lost("end of file".to_owned()), now);
            }
            Event::Stream(Err(error)) => {
                self.stream_ended(StreamEnd::Lost(error.to_string()), now);
            }
            Event::Heal(Ok(heal::Turn::Read)) => {}
            Event::Heal(Ok(heal::Turn::Healed(rows))) => self.healed(rows, now),
            Event::Heal(Err(error)) => {
                self.stream_ended(StreamEnd::Lost(error.to_string()), now);
            }
            Event::Kafka | Event::Timeout => {}
        }
    }

    fn healed(&mut self, rows: u64, now: Moment) {
        let Some((generation, consistent_point)) = self.heal.take().map(|heal| heal.made()) else {
            return;
        };
        if let Some(link) = &self.link {
            link.generation.store(generation, Ordering::Relaxed);
            link.heals.store(false, Ordering::Relaxed);
        }
        self.machine
            .on_healed(rows, generation, consistent_point, now);
    }

    fn stream_error(&self, error: &DbError) -> StreamEnd {
        words::stream_error(error, &self.surroundings.source)
    }

    fn stream_ended(&mut self, end: StreamEnd, now: Moment) {
        self.vitals.postgres_failed(match &end {
            StreamEnd::Lost(_) => Class::Transient,
            StreamEnd::Never(_) | StreamEnd::Gap(_) => Class::Definite,
        });
        self.slot = None;
        self.heal = None;
        self.pace.has_more = false;
        self.machine.on_stream_end(end, now);
    }

    // ---- Kafka -----------------------------------------------------------------------------

    fn take_reports(&mut self, now: Moment) {
        self.publisher.drain(&mut self.reports);
        if !self.reports.is_empty() {
            worked_but_said_failed(&mut self.reports);
            self.vitals.refused(&self.reports);
            self.machine.on_reports(&self.reports, now);
            self.reports.clear();
        }
        // Nothing is in flight, so that this is done at once. Not while the machine is about to
        // order a rebuild, or waits for one: it must hear of that.
        let is_idle = self.publisher.in_flight() == 0 && self.publisher.is_sending();
        if self.is_batch_shrunk && is_idle {
            self.is_batch_shrunk = false;
            self.publisher.start_rebuild();
        }
        if is_idle && self.publisher.wants_another() {
            self.publisher.start_rebuild();
        }
        if let Some(rebuilt) = self.publisher.rebuild_turn(now) {
            self.vitals.progress.reconnected(Peer::Kafka);
            let heard = if rebuilt.late {
                Heard::NotAll
            } else {
                Heard::All
            };
            self.machine.on_rebuilt(heard, now);
        }
        self.take_reports_apart(now);
        let known = self.publisher.take_partitions();
        if !known.is_empty() {
            self.machine.on_partitions(&known, now);
        }
        for notice in self.publisher.client_notices() {
            let entry = error::kafka::entry(notice.code);
            self.vitals.progress.failed(Peer::Kafka, entry.class);
            if notice.code == error::kafka::CLUSTER_AUTHORIZATION_FAILED {
                tracing::error!("kafka: {}; remedy: {}", notice.text, entry.remedy);
                continue;
            }
            tracing::warn!(
                code = notice.code.0,
                times = notice.times,
                "kafka: {}",
                notice.text
            );
        }
    }

    /// A cluster that refuses us for good is an end before anything was begun; one that is not
    /// there is waited for.
    fn on_first_reach(&mut self, done: Done) -> Result<(), Failure> {
        if let Done::Reached(reach) = &done {
            if let Some(failure) = reach.definite() {
                return Err(failure);
            }
            for warning in reach.warnings() {
                tracing::warn!("{}", warning.found);
            }
        }
        self.on_done(done, now());
        Ok(())
    }

    fn on_reach(&mut self, reach: kafka::Reach, now: Moment) {
        match self.publisher.on_reach(reach, now) {
            kafka::News::None => {}
            kafka::News::Trouble { what, remedy } => {
                tracing::error!("kafka: {what}; remedy: {remedy}");
            }
            kafka::News::WellAgain => tracing::info!("kafka: every broker is reachable again"),
        }
    }

    fn limit_batch(&mut self, bytes: usize) {
        let bytes = bytes.max(BATCH_BYTES_MIN);
        if bytes < self.batch_bytes {
            self.batch_bytes = bytes;
            self.publisher.set_batch_limit(bytes);
            self.is_batch_shrunk = true;
        }
    }

    // ---- WAL -------------------------------------------------------------------------------

    fn read_buffered(&mut self, now: Moment) {
        self.pace.has_more = false;
        let mut taken = 0;
        while self.machine.wants_wal() {
            if taken == BURST {
                self.pace.has_more = true;
                return;
            }
            taken += 1;
            if let Some(heal) = &mut self.heal {
                let Some(body) = heal.next_body() else {
                    return;
                };
                self.machine.on_copy_data(body, now, &mut self.publisher);
                continue;
            }
            let Some(slot) = &mut self.slot else {
                return;
            };
            match slot.next_frame() {
                Ok(None) => return,
                Ok(Some(Frame::Copy(body))) => {
                    self.machine.on_copy_data(body, now, &mut self.publisher);
                }
                Ok(Some(Frame::Notice {
                    sqlstate,
                    message,
                    detail,
                })) => self.on_server_notice(&sqlstate, &message, detail.as_deref(), now),
                Ok(Some(Frame::CopyDone)) => {}
                Ok(Some(Frame::CommandComplete)) => {
                    let end = StreamEnd::Lost("the server shuts down".to_owned());
                    self.stream_ended(end, now);
                }
                Ok(Some(Frame::Error(error))) => {
                    let end = self.stream_error(&error);
                    self.stream_ended(end, now);
                }
                Err(SlotError::FrameTooLarge { length }) => {
                    let lsn = self.machine.transaction_lsn();
                    self.machine
                        .on_huge_row(words::frame_too_large(length, lsn), now);
                }
                Err(SlotError::Db(error)) => {
                    let end = self.stream_error(&error);
                    self.stream_ended(end, now);
                }
            }
        }
        // Shut in the middle of a gulp: what is left is taken when the machine wants it again.
        let has_rows = self.heal.as_ref().is_some_and(|heal| heal.has_more());
        self.pace.has_more = has_rows || self.slot.as_ref().is_some_and(|slot| slot.buffered() > 0);
    }

    fn on_server_notice(
        &mut self,
        sqlstate: &str,
        message: &str,
        detail: Option<&str>,
        now: Moment,
    ) {
        if words::is_about_standbys(message) {
            // It says so again and again; health tells it, too.
            if self
                .standbys_said_at
                .is_none_or(|at| now >= at + SAID_AGAIN_AFTER)
            {
                self.standbys_said_at = Some(now);
                tracing::warn!(
                    sqlstate,
                    "the server holds the stream back (WaitForStandbyConfirmation): {message}; remedy: start that standby again, or take it out of synchronized_standby_slots and reload"
                );
            }
        } else if sqlstate == "55000" {
            self.machine
                .on_rows_skipped(words::rows_skipped(message, detail), now);
        } else {
            tracing::warn!(sqlstate, "the server says: {message}");
        }
    }

    // ---- orders ----------------------------------------------------------------------------

    fn obey(&mut self, now: Moment) {
        while let Some(order) = self.machine.poll_order() {
            match order {
                Order::SeekLead => {
                    self.link = None;
                    let side = self.side.take();
                    self.spawn(jobs::seek(Arc::clone(&self.surroundings), side));
                }
                Order::Open => self.open(now),
                Order::Close(how) => self.close(how, now),
                Order::Status(status) => {
                    if let Some(heal) = &self.heal {
                        heal.flushed(status.flush);
                    }
                    if let Some(slot) = &mut self.slot {
                        slot.queue_status(&status.encode(wall_clock()));
                    }
                }
                Order::Probe => {
                    if let Some(link) = self.link.clone() {
                        let walsender = self.slot.as_ref().map(Slot::backend_pid);
                        self.spawn(jobs::probe(link, walsender));
                    }
                }
                Order::Send(ticket, record) => Outlet::send(&mut self.publisher, &record, ticket),
                Order::Try(number, record) => self.send_apart(number, &record, now),
                Order::RebuildTrial => self.rebuild_apart(now),
                Order::Letters(statement) => self.say_about_letters(statement),
                Order::ReadTail { topic, since } => {
                    let around = Arc::clone(&self.surroundings);
                    self.spawn(letters::read_tail(around, topic, since));
                }
                Order::Rebuild(Purge::Queue) => self.publisher.start_rebuild(),
                Order::Rebuild(Purge::Everything) => self.publisher.forget_all(),
                Order::Lookup(topic) => {
                    self.spawn(jobs::lookup(Arc::clone(&self.surroundings), topic));
                }
                Order::EraseStop => self.with_link(jobs::erase_stop),
                Order::Store { stop, halted } => {
                    self.with_link(|link| jobs::store(link, stop, halted));
                }
                Order::ClearHalted => self.with_link(jobs::clear_halted),
                Order::BeginHeal(gap, policy) => {
                    if let Some(link) = self.link.clone() {
                        link.heals.store(true, Ordering::Relaxed);
                        self.spawn(jobs::begin_heal(link, gap, policy));
                    }
                }
                Order::Notice(notice) => self.log(&notice),
                Order::Exit(result) => self.exit = Some(result),
            }
        }
    }

    fn spawn(&self, job: impl Future<Output = Done> + 'static) -> JoinHandle<()> {
        let tell = self.tell.clone();
        tokio::task::spawn_local(async move {
            // Nobody listens any more: the service has ended.
            let _ = tell.send(job.await);
        })
    }

    fn with_link<F: Future<Output = Done> + 'static>(&self, job: impl FnOnce(Arc<Link>) -> F) {
        match self.link.clone() {
            Some(link) => {
                self.spawn(job(link));
            }
            None => {
                let _ = self.tell.send(Done::NotWritten);
            }
        }
    }

    fn open(&mut self, now: Moment) {
        match (self.link.clone(), &self.side) {
            (Some(link), Some(_)) => {
                let job = jobs::open(Arc::clone(&self.surroundings), link);
                self.opening = Some(self.spawn(job));
            }
            _ => self
                .machine
                .on_open_failed(OpenError::Later("the side session is gone".to_owned()), now),
        }
    }

    fn close(&mut self, how: Close, now: Moment) {
        if let Some(opening) = self.opening.take() {
            opening.abort();
        }
        self.pace.has_more = false;
        self.heal = None;
        match (self.slot.take(), how) {
            (Some(slot), Close::Finish) => {
                self.spawn(jobs::finish(Box::new(slot)));
            }
            (Some(_) | None, Close::Abort) | (None, Close::Finish) => {
                let end = StreamEnd::Lost("closed by us".to_owned());
                self.machine.on_stream_end(end, now);
            }
        }
    }

    fn on_done(&mut self, done: Done, now: Moment) {
        match done {
            Done::Sought { side, link, seek } => {
                let client = side.as_ref().map(|side| Arc::clone(&side.client));
                self.sampler.session(client, now);
                let sessions = self.surroundings.sessions.load(Ordering::Relaxed);
                self.vitals.sought(&seek, sessions);
                self.side = side;
                self.link = link;
                self.machine.on_seek(*seek, now);
            }
            Done::Opened(Ok((session, opened))) => {
                self.opening = None;
                self.vitals.opened();
                match session {
                    Session::Stream(slot) => self.slot = Some(*slot),
                    Session::Heal(heal) => self.heal = Some(heal),
                }
                self.machine.on_opened(&opened, now);
            }
            Done::Opened(Err(error)) => {
                self.opening = None;
                self.vitals.postgres_failed(match &error {
                    OpenError::Later(_) => Class::Transient,
                    OpenError::Never(_) | OpenError::Gap(_) => Class::Definite,
                });
                self.machine.on_open_failed(error, now);
            }
            Done::Finished => {
                let end = StreamEnd::Lost("closed by us".to_owned());
                self.machine.on_stream_end(end, now);
            }
            Done::Probed { probed, walsender } => {
                let is_same = walsender == self.slot.as_ref().map(Slot::backend_pid);
                let probed = Probed {
                    has_slot: probed.has_slot || !is_same,
                    ..probed
                };
                self.machine.on_probe(&probed, now);
            }
            Done::Topic { name, state } => {
                if let TopicState::Present {
                    max_message_bytes: Some(bytes),
                    ..
                } = state
                {
                    self.limit_batch(bytes);
                }
                if let TopicState::Present { .. } = state {
                    let around = Arc::clone(&self.surroundings);
                    self.spawn(letters::may_read(around, name.clone()));
                }
                self.machine.on_topic(&name, &state, now);
            }
            Done::Reached(reach) => self.on_reach(reach, now),
            Done::Sampled(sample) => {
                self.sampler.answered();
                self.vitals.sampled(sample);
            }
            Done::Letters(answer) => self.on_letters(answer, now),
            Done::Tail { topic, answer } => self.machine.on_tail(&topic, answer, now),
            Done::Nothing => {}
            Done::StopErased => self.machine.on_stop_erased(now),
            Done::Stored => self.machine.on_stored(),
            Done::Cleared => {}
            Done::NotWritten => self.machine.on_not_written(now),
        }
    }

    // ---- words -----------------------------------------------------------------------------

    fn log(&mut self, notice: &Notice) {
        // Something changed: health is told in this turn.
        self.live_at = Moment::ZERO;
        if *notice == Notice::BatchTooLarge {
            self.limit_batch(self.batch_bytes / 2);
        }
        if let Notice::KafkaStalled { .. } = notice {
            self.publisher.suspect();
        }
        let slot = self.surroundings.source.slot.as_str();
        match notice.severity() {
            Severity::Info => tracing::info!(slot, "{notice}"),
            Severity::Warning => tracing::warn!(slot, "{notice}"),
            Severity::Error => tracing::error!(slot, "{notice}"),
        }
    }

    /// Asks the database how the slot stands, every few seconds.
    fn sample(&mut self, now: Moment) {
        if let Some(client) = self.sampler.due(now) {
            self.spawn(jobs::sample(Arc::clone(&self.surroundings), client));
        }
    }

    fn publish_progress(&mut self, now: Moment) {
        let progress = &self.vitals.progress;
        let deliveries = self.machine.take_deliveries();
        for reason in &deliveries.parked {
            progress.parked(*reason);
        }
        progress.spared(deliveries.retried, deliveries.passed_over);
        if !deliveries.by_topic.is_empty() {
            let clock = SystemTime::now();
            for (topic, events, bytes) in &deliveries.by_topic {
                progress.delivered(topic, *events, *bytes);
            }
            for (committed, events) in &deliveries.commit_times {
                progress.latency(*committed, clock, *events);
            }
        }
        if now < self.live_at {
            return;
        }
        self.live_at = now + LIVE_INTERVAL;
        if self.publisher.wants_look(now) {
            self.spawn(jobs::reach(Arc::clone(&self.surroundings)));
        }
        self.vitals.hand_over(&self.machine, &self.publisher, now);
        if telemetry::live_is_on() {
            telemetry::show_live(&self.vitals.progress.live_line(SystemTime::now()));
        }
    }
}

/// What a fault that was planned for a delivery makes of it.
fn worked_but_said_failed(reports: &mut [Report]) {
    for report in reports {
        if report.result.is_ok() && fault::delivered(report.ticket.0).is_err() {
            report.result = Err(error::kafka::REQUEST_TIMED_OUT);
        }
    }
}

async fn closed(side: &mut Option<Side>) -> DbError {
    match side {
        Some(side) => side.closed().await,
        None => std::future::pending().await,
    }
}

async fn stream_turn(slot: &mut Option<Slot>, wants_wal: bool) -> Result<Turn, DbError> {
    let Some(slot) = slot else {
        return std::future::pending().await;
    };
    let intake = if wants_wal {
        Intake::Open
    } else {
        Intake::Closed
    };
    slot.turn(intake).await
}

async fn heal_turn(
    heal: &mut Option<Box<Healing>>,
    wants_wal: bool,
) -> Result<heal::Turn, DbError> {
    match heal {
        // What was read goes first.
        Some(heal) if wants_wal && !heal.has_more() => heal.turn().await,
        Some(_) | None => std::future::pending().await,
    }
}

/// What asks the relay to stop: once to drain, twice to end at once.
struct Signals {
    source: StopSource,
    count: usize,
    /// When the last of them was counted.
    asked_at: Option<Moment>,
}

enum StopSource {
    Signals(Termination),
    Request(oneshot::Receiver<()>),
    /// It has asked, and can do so only once.
    Spent,
}

impl Signals {
    fn new(stop: StopBy) -> Result<Self, Failure> {
        let source = match stop {
            StopBy::Signals => StopSource::Signals(Termination::listen()?),
            StopBy::Request(request) => StopSource::Request(request),
        };
        Ok(Signals {
            source,
            count: 0,
            asked_at: None,
        })
    }

    /// Cancel-safe.
    async fn next(&mut self) {
        match &mut self.source {
            StopSource::Signals(termination) => termination.next().await,
            StopSource::Request(request) => {
                // A sender that is gone asks as well: nobody is left to run us for.
                let _ = request.await;
                self.source = StopSource::Spent;
            }
            StopSource::Spent => std::future::pending().await,
        }
        // One stop may be said twice at once: to the process and to its group.
        let now = now();
        if self.asked_at.is_none_or(|at| now >= at + SAME_STOP) {
            self.asked_at = Some(now);
            self.count += 1;
        }
    }
}
