//! A fake Kafka: topics, and clients that send one batch a partition at a time, exactly once, for
//! ever, unless something other than an outage goes wrong. Below it the reflex of the publisher
//! that `service` owns: after a bad report nothing is sent until the client was built anew.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::Duration;

use walrelay::error::{Class, kafka};
use walrelay::lsn::PgTimestamp;
use walrelay::record::{KafkaCode, Record, Report, Ticket, TopicState};
use walrelay::relay::intake::Outlet;
use walrelay::tail::{Tail, TailAnswer};

use crate::history::{Ctx, EventId, Fact, Moment, ProcId};
use crate::world::Event;

pub type ClientId = u32;
pub type FlightId = u32;

const PURGE_QUEUE: KafkaCode = KafkaCode(-152);
const PURGE_INFLIGHT: KafkaCode = KafkaCode(-151);
const INVALID_TIMESTAMP: KafkaCode = KafkaCode(32);
const LAST_WORDS: Duration = Duration::from_secs(2);

#[derive(Clone, Debug)]
struct Msg {
    ticket: Ticket,
    event: EventId,
    /// Milliseconds since 1970, where it has a time.
    stamp: Option<i64>,
    /// As the topic's limit counts, before compression.
    bytes: usize,
}

#[derive(Debug)]
struct Flight {
    client: ClientId,
    proc: ProcId,
    lane: (String, i32),
    msgs: Vec<Msg>,
    is_appended: bool,
    /// Its client has given it up.
    is_orphan: bool,
    /// It is not on the wire: its client waits with the next attempt.
    is_at_rest: bool,
    /// And the network holds it back for longer than a tail is watched.
    is_stuck: bool,
}

#[derive(Debug, Default)]
struct Lane {
    queue: VecDeque<Msg>,
    flight: Option<FlightId>,
}

#[derive(Debug)]
struct Client {
    proc: ProcId,
    kind: Kind,
    lanes: BTreeMap<(String, i32), Lane>,
    reports: Vec<Report>,
    is_fatal: bool,
    is_frozen: bool,
    is_pumped: bool,
    refusing_topic: Option<(String, Moment)>,
}

/// As `io::kafka::publisher` has it: what a refusal means for what stands behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Gapless,
    Apart,
}

#[derive(Debug)]
struct Topic {
    partitions: i32,
    max_message_bytes: Option<usize>,
    /// By partition, in its order: when a record says that it is from.
    logs: BTreeMap<i32, Vec<(EventId, i64)>>,
}

/// Where brokers stamp records their clocks may be apart: a tail is read from so much earlier.
const CLOCKS_APART_MS: i64 = 10_000;

/// How often what goes wrong, in 1,000 batches.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rates {
    pub lie: u64,
    pub transient: u64,
    pub definite: u64,
}

pub struct Broker {
    topics: BTreeMap<String, Topic>,
    clients: HashMap<ClientId, Client>,
    flights: BTreeMap<FlightId, Flight>,
    pub is_up: bool,
    pub rates: Rates,
    /// Refused with this code: one record (`false`) or its whole batch (`true`).
    pub poison: BTreeMap<EventId, (KafkaCode, bool)>,
    /// Everything of these topics is refused.
    pub refusing: BTreeMap<String, KafkaCode>,
    /// May tails be read, and how many records of them?
    pub may_read: bool,
    pub tail_max: usize,
    /// For so long the ends of a topic are watched: a dead producer's requests may be on their way.
    pub settling: Duration,
    next_id: u32,
}

impl Broker {
    pub fn new() -> Self {
        Broker {
            topics: BTreeMap::new(),
            clients: HashMap::new(),
            flights: BTreeMap::new(),
            is_up: true,
            rates: Rates::default(),
            poison: BTreeMap::new(),
            refusing: BTreeMap::new(),
            may_read: true,
            tail_max: usize::MAX,
            settling: Duration::from_millis(600),
            next_id: 1,
        }
    }

    fn id(&mut self) -> u32 {
        self.next_id += 1;
        self.next_id
    }

    pub fn make_topic(
        &mut self,
        name: &str,
        partitions: i32,
        max_message_bytes: Option<usize>,
        ctx: &mut Ctx,
    ) {
        if self.topics.contains_key(name) {
            return;
        }
        let topic = Topic {
            partitions,
            max_message_bytes,
            logs: BTreeMap::new(),
        };
        self.topics.insert(name.to_owned(), topic);
        ctx.fact(Fact::TopicMade {
            topic: name.to_owned(),
        });
    }

    pub fn delete_topic(&mut self, name: &str, ctx: &mut Ctx) {
        self.topics.remove(name);
        ctx.fact(Fact::TopicGone {
            topic: name.to_owned(),
        });
    }

    pub fn grow_topic(&mut self, name: &str) {
        if let Some(topic) = self.topics.get_mut(name) {
            topic.partitions += 1;
        }
    }

    pub fn partitions(&self) -> BTreeMap<String, i32> {
        let topics = self.topics.iter();
        topics
            .map(|(name, topic)| (name.clone(), topic.partitions))
            .collect()
    }

    /// What a topic holds from a time on, and for the checker which events those are.
    pub fn tail(
        &self,
        name: &str,
        since: PgTimestamp,
        ctx: &mut Ctx,
    ) -> (TailAnswer, Vec<EventId>) {
        if !self.is_up || ctx.rng.permille(30) {
            return (TailAnswer::Failed("no answer".to_owned()), Vec::new());
        }
        let Some(topic) = self.topics.get(name) else {
            return (TailAnswer::Failed("no such topic".to_owned()), Vec::new());
        };
        if !self.may_read {
            return (TailAnswer::Denied, Vec::new());
        }
        let from = since.unix_millis() - CLOCKS_APART_MS;
        let mut events: Vec<EventId> = Vec::new();
        let mut complete = true;
        for log in topic.logs.values() {
            // An offset is asked for by time: everything behind it is read.
            let first = log.iter().position(|(_, millis)| *millis >= from);
            let tail = &log[first.unwrap_or(log.len())..];
            complete &= tail.len() <= self.tail_max;
            let skipped = tail.len().saturating_sub(self.tail_max);
            events.extend(tail[skipped..].iter().map(|(event, _)| event));
        }
        let texts: Vec<String> = events.iter().map(ToString::to_string).collect();
        let tail: Tail = texts.iter().map(String::as_bytes).collect();
        (TailAnswer::Read { tail, complete }, events)
    }

    pub fn has_topic(&self, name: &str) -> bool {
        self.topics.contains_key(name)
    }

    pub fn lookup(&self, name: &str, ctx: &mut Ctx) -> TopicState {
        if !self.is_up || ctx.rng.permille(10) {
            return TopicState::Unknown("no answer".to_owned());
        }
        match self.topics.get(name) {
            Some(topic) => TopicState::Present {
                partitions: topic.partitions,
                max_message_bytes: topic.max_message_bytes,
            },
            None => TopicState::Absent,
        }
    }

    pub fn mend(&mut self, event: EventId, ctx: &mut Ctx) {
        if self.poison.remove(&event).is_some() {
            ctx.fact(Fact::Mended { event });
        }
    }

    pub fn mend_all(&mut self, ctx: &mut Ctx) {
        self.refusing.clear();
        let all: Vec<EventId> = self.poison.keys().copied().collect();
        for event in all {
            self.mend(event, ctx);
        }
    }

    // ---- clients ---------------------------------------------------------------------------

    fn client(&mut self, proc: ProcId, kind: Kind) -> ClientId {
        let id = self.id();
        let client = Client {
            proc,
            kind,
            lanes: BTreeMap::new(),
            reports: Vec::new(),
            is_fatal: false,
            is_frozen: false,
            is_pumped: false,
            refusing_topic: None,
        };
        self.clients.insert(id, client);
        id
    }

    /// The process was killed, or the client destroyed: what is on the wire may be written yet.
    pub fn drop_client(&mut self, id: ClientId) {
        self.clients.remove(&id);
        for flight in self.flights.values_mut().filter(|f| f.client == id) {
            flight.is_orphan = true;
        }
    }

    pub fn freeze(&mut self, id: ClientId, is_frozen: bool, ctx: &mut Ctx) {
        if let Some(client) = self.clients.get_mut(&id) {
            client.is_frozen = is_frozen;
            if !is_frozen {
                client.is_pumped = true;
                ctx.after(Duration::ZERO, Event::Pump(id));
            }
        }
    }

    fn hand_over(
        &mut self,
        id: ClientId,
        record: &Record<'_>,
        ticket: Ticket,
        ctx: &mut Ctx,
    ) -> Result<(), KafkaCode> {
        let event = event_of(record);
        let client = self.clients.get_mut(&id).expect("the publisher's own");
        if client.is_fatal {
            return Err(KafkaCode(-150));
        }
        if let Some((topic, until)) = &client.refusing_topic {
            if ctx.now >= *until {
                client.refusing_topic = None;
            } else if *topic == record.topic {
                return Err(KafkaCode(-188));
            }
        }
        if let Some((KafkaCode(10), false)) = self.poison.get(&event)
            && ctx.rng.permille(500)
        {
            // Larger than message.max.bytes: refused to the caller's face.
            return Err(KafkaCode(10));
        }
        assert!(record.partition >= 0, "a record without a partition");
        let lane = (record.topic.clone().into_owned(), record.partition);
        let lane = client.lanes.entry(lane).or_default();
        lane.queue.push_back(Msg {
            ticket,
            event,
            stamp: record.timestamp_ms,
            bytes: bytes_of(record),
        });
        if !client.is_pumped {
            client.is_pumped = true;
            let linger = ctx.rng.micros(100, 1_500);
            ctx.after(linger, Event::Pump(id));
        }
        Ok(())
    }

    /// Sends what waits: one batch a partition.
    pub fn pump(&mut self, id: ClientId, ctx: &mut Ctx) {
        let Some(client) = self.clients.get_mut(&id) else {
            return;
        };
        client.is_pumped = false;
        if client.is_frozen || client.is_fatal {
            return;
        }
        let names: Vec<(String, i32)> = client.lanes.keys().cloned().collect();
        for name in names {
            let client = self.clients.get_mut(&id).expect("as above");
            let lane = client.lanes.get_mut(&name).expect("as above");
            if lane.flight.is_some() || lane.queue.is_empty() {
                continue;
            }
            let most = ctx.rng.count(1, 12).min(lane.queue.len());
            let mut msgs: Vec<Msg> = lane.queue.drain(..most).collect();
            // An oversize record sits in a batch of its own.
            let poison = &self.poison;
            let alone = |m: &Msg| matches!(poison.get(&m.event), Some((_, false)));
            if let Some(index) = msgs.iter().position(alone)
                && msgs.len() > 1
            {
                let from = index.max(1);
                for msg in msgs.drain(from..).rev() {
                    lane.queue.push_front(msg);
                }
            }
            self.next_id += 1;
            let flight = self.next_id;
            lane.flight = Some(flight);
            let body = Flight {
                client: id,
                proc: client.proc,
                lane: name,
                msgs,
                is_appended: false,
                is_orphan: false,
                is_at_rest: false,
                is_stuck: false,
            };
            self.flights.insert(flight, body);
            let latency = ctx.rng.micros(200, 4_000);
            ctx.after(latency, Event::Flight(flight));
        }
    }

    /// A batch reaches the broker, or fails to.
    pub fn flight(&mut self, id: FlightId, ctx: &mut Ctx) {
        let Some(flight) = self.flights.get_mut(&id) else {
            return;
        };
        if !self.is_up {
            if flight.is_orphan {
                // The socket's end: it was never taken.
                self.flights.remove(&id);
            } else {
                let pause = ctx.rng.millis(50, 500);
                self.try_later(id, pause, ctx);
            }
            return;
        }
        if flight.is_orphan {
            self.orphan(id, ctx);
            return;
        }
        flight.is_at_rest = false;
        let partitions = self.topics.get(&flight.lane.0).map(|t| t.partitions);
        if partitions.is_none_or(|partitions| flight.lane.1 >= partitions) {
            self.without_topic(id, ctx);
            return;
        }
        if flight.is_appended {
            // A retry of what was written: the sequence number tells.
            self.respond(id, ctx);
            return;
        }
        let refusal = self.refusal(id, ctx);
        if let Some((code, is_written)) = refusal {
            if is_written {
                ctx.reach("worked but said failed");
                self.append(id, ctx);
            }
            self.refuse(id, code, is_written, ctx);
            return;
        }
        self.append(id, ctx);
        self.respond(id, ctx);
    }

    fn try_later(&mut self, id: FlightId, pause: Duration, ctx: &mut Ctx) {
        self.flights
            .get_mut(&id)
            .expect("the caller has it")
            .is_at_rest = true;
        ctx.after(pause, Event::Flight(id));
    }

    /// What a dead producer had put on the wire: written yet, or not, or later than anybody waits.
    fn orphan(&mut self, id: FlightId, ctx: &mut Ctx) {
        let flight = &self.flights[&id];
        let topic = self.topics.get(&flight.lane.0);
        let is_there = topic.is_some_and(|topic| flight.lane.1 < topic.partitions);
        let is_taken =
            !flight.is_appended && !flight.is_at_rest && is_there && !self.is_refused(id);
        if is_taken && !flight.is_stuck && ctx.rng.permille(30) {
            ctx.reach("a request is stuck in the network");
            self.flights.get_mut(&id).expect("looked up").is_stuck = true;
            let pause = ctx.rng.millis(700, 5_000);
            ctx.after(pause, Event::Flight(id));
            return;
        }
        if is_taken && ctx.rng.permille(600) {
            ctx.reach("a late append");
            if self.flights[&id].is_stuck {
                for msg in &self.flights[&id].msgs {
                    ctx.fact(Fact::SaidFailed { event: msg.event });
                }
            }
            self.append(id, ctx);
        }
        self.flights.remove(&id);
    }

    /// Whose batch this is.
    pub fn owner(&self, id: FlightId) -> Option<ProcId> {
        let flight = self.flights.get(&id)?;
        (!flight.is_orphan).then_some(flight.proc)
    }

    fn is_refused(&self, id: FlightId) -> bool {
        let msgs = &self.flights[&id].msgs;
        let topic = &self.flights[&id].lane.0;
        let is_refused = self.refusing.contains_key(topic) || self.is_too_large(id);
        is_refused || msgs.iter().any(|m| self.refused_with(m).is_some())
    }

    fn too_large(&self, id: FlightId) -> Vec<EventId> {
        let flight = &self.flights[&id];
        let topic = self.topics.get(&flight.lane.0);
        let limit = topic.and_then(|topic| topic.max_message_bytes);
        let is_too_large = |msg: &&Msg| limit.is_some_and(|n| msg.bytes + BATCH_OVERHEAD > n);
        let msgs = flight.msgs.iter().filter(is_too_large);
        msgs.map(|msg| msg.event).collect()
    }

    fn is_too_large(&self, id: FlightId) -> bool {
        !self.too_large(id).is_empty()
    }

    /// The operator raises what topics take.
    pub fn raise_limits(&mut self, ctx: &mut Ctx) {
        for topic in self
            .topics
            .values_mut()
            .filter(|t| t.max_message_bytes.is_some())
        {
            topic.max_message_bytes = Some(1_000_000);
            ctx.reach("a limit was raised");
        }
    }

    fn refused_with(&self, msg: &Msg) -> Option<KafkaCode> {
        let (code, _) = self.poison.get(&msg.event)?;
        (*code != INVALID_TIMESTAMP || msg.stamp.is_some()).then_some(*code)
    }

    /// Why this batch is refused, and whether it is written all the same.
    fn refusal(&self, id: FlightId, ctx: &mut Ctx) -> Option<(KafkaCode, bool)> {
        let msgs = &self.flights[&id].msgs;
        let topic = &self.flights[&id].lane.0;
        if let Some(code) = self.refusing.get(topic) {
            return Some((*code, false));
        }
        if self.is_too_large(id) {
            ctx.reach("larger than its topic takes");
            for event in self.too_large(id) {
                ctx.fact(Fact::TooLarge { event });
            }
            return Some((KafkaCode(10), false));
        }
        if let Some(code) = msgs.iter().find_map(|m| self.refused_with(m)) {
            return Some((code, false));
        }
        if ctx.rng.permille(self.rates.lie) {
            return Some((KafkaCode(*ctx.rng.pick(&[45, 59, -148, -1, 7])), true));
        }
        if ctx.rng.permille(self.rates.transient) {
            return Some((KafkaCode(*ctx.rng.pick(&[-1, 13, 89, 74, 47])), false));
        }
        if ctx.rng.permille(self.rates.definite) {
            return Some((KafkaCode(*ctx.rng.pick(&[29, 44])), false));
        }
        None
    }

    fn append(&mut self, id: FlightId, ctx: &mut Ctx) {
        let flight = self.flights.get_mut(&id).expect("the caller has it");
        flight.is_appended = true;
        let proc = flight.proc;
        let (name, partition) = &flight.lane;
        let topic = self.topics.get_mut(name).expect("the caller knows it");
        let log = topic.logs.entry(*partition).or_default();
        for msg in &flight.msgs {
            let now = ctx.clock().unix_millis();
            log.push((msg.event, msg.stamp.unwrap_or(now)));
            ctx.fact(Fact::Appended {
                event: msg.event,
                proc,
            });
        }
    }

    fn respond(&mut self, id: FlightId, ctx: &mut Ctx) {
        let latency = ctx.rng.micros(200, 3_000);
        // Not "if": the answer may be lost when the broker goes away meanwhile.
        ctx.after(latency, Event::Response(id));
    }

    /// The broker's word arrives at the client.
    pub fn response(&mut self, id: FlightId, ctx: &mut Ctx) {
        let Some(flight) = self.flights.get(&id) else {
            return;
        };
        if flight.is_orphan {
            self.flights.remove(&id);
            return;
        }
        let is_frozen = self
            .clients
            .get(&flight.client)
            .is_some_and(|c| c.is_frozen);
        if !self.is_up || is_frozen {
            // Lost on the way, or unread: asked again later.
            let pause = ctx.rng.millis(50, 500);
            ctx.after(pause, Event::Flight(id));
            return;
        }
        let flight = self.flights.remove(&id).expect("looked up above");
        for msg in &flight.msgs {
            ctx.fact(Fact::Acked { event: msg.event });
        }
        let reports = flight.msgs.iter().map(|m| Report {
            ticket: m.ticket,
            result: Ok(()),
        });
        let reports = reports.collect();
        self.report(flight.client, reports, ctx);
        self.lane_is_free(flight.client, &flight.lane, ctx);
    }

    fn lane_is_free(&mut self, id: ClientId, lane: &(String, i32), ctx: &mut Ctx) {
        let Some(client) = self.clients.get_mut(&id) else {
            return;
        };
        if let Some(lane) = client.lanes.get_mut(lane) {
            lane.flight = None;
        }
        if !client.is_pumped {
            client.is_pumped = true;
            ctx.after(Duration::from_micros(50), Event::Pump(id));
        }
    }

    fn report(&mut self, id: ClientId, reports: Vec<Report>, ctx: &mut Ctx) {
        if let Some(client) = self.clients.get_mut(&id) {
            client.reports.extend(reports);
            let proc = client.proc;
            let latency = ctx.rng.micros(0, 500);
            ctx.after(latency, Event::Wake(proc));
        }
    }

    /// A produce request failed: `gapless` makes the client fatal, its queue comes back at once.
    fn refuse(&mut self, id: FlightId, code: KafkaCode, is_written: bool, ctx: &mut Ctx) {
        let flight = self.flights.remove(&id).expect("the caller has it");
        let culprits: Vec<&Msg> = flight
            .msgs
            .iter()
            .filter(|m| self.refused_with(m).is_some())
            .collect();
        let names_them = culprits.len() >= 2;
        let mut reports = Vec::new();
        for msg in &flight.msgs {
            let is_innocent = names_them && self.refused_with(msg).is_none();
            let code = if is_innocent { KafkaCode(-138) } else { code };
            if is_written {
                ctx.fact(Fact::SaidFailed { event: msg.event });
            }
            reports.push(Report {
                ticket: msg.ticket,
                result: Err(code),
            });
        }
        ctx.reach("a batch was refused");
        let is_deadly = kafka::entry(code).class == Class::Fatal;
        let is_apart = |client: &Client| client.kind == Kind::Apart;
        if self.clients.get(&flight.client).is_some_and(is_apart) && !is_deadly {
            self.report(flight.client, reports, ctx);
            self.lane_is_free(flight.client, &flight.lane, ctx);
            return;
        }
        let mut purged = self.queued(flight.client);
        if let Some(client) = self.clients.get_mut(&flight.client) {
            client.is_fatal = true;
            if let Some(lane) = client.lanes.get_mut(&flight.lane) {
                lane.flight = None;
            }
        }
        // The first failure drained may be a consequence.
        if ctx.rng.permille(300) {
            purged.append(&mut reports);
            reports = purged;
        } else {
            reports.append(&mut purged);
        }
        self.report(flight.client, reports, ctx);
    }

    /// The topic is gone: silence, or after a while everything that waits for it fails.
    fn without_topic(&mut self, id: FlightId, ctx: &mut Ctx) {
        if ctx.rng.permille(700) {
            let pause = ctx.rng.millis(100, 1_000);
            self.try_later(id, pause, ctx);
            return;
        }
        let flight = self.flights.remove(&id).expect("the caller has it");
        let topic = flight.lane.0.clone();
        let until = ctx.now + Duration::from_millis(600);
        let code = KafkaCode(*ctx.rng.pick(&[3, -190]));
        let Some(client) = self.clients.get_mut(&flight.client) else {
            return;
        };
        client.refusing_topic = Some((topic.clone(), until));
        let mut msgs = flight.msgs;
        let mut flights = Vec::new();
        for (name, lane) in &mut client.lanes {
            if name.0 == topic {
                flights.extend(lane.flight.take());
                msgs.extend(lane.queue.drain(..));
            }
        }
        for other in flights.into_iter().filter(|other| *other != id) {
            if let Some(flight) = self.flights.remove(&other) {
                if flight.is_appended {
                    for msg in &flight.msgs {
                        ctx.fact(Fact::SaidFailed { event: msg.event });
                    }
                }
                msgs.extend(flight.msgs);
            }
        }
        if flight.is_appended {
            for msg in &msgs {
                ctx.fact(Fact::SaidFailed { event: msg.event });
            }
        }
        let failed = msgs.iter().map(|m| Report {
            ticket: m.ticket,
            result: Err(code),
        });
        let failed = failed.collect();
        ctx.reach("a topic went away under its events");
        self.report(flight.client, failed, ctx);
    }

    /// Takes what is not on the wire out of a client, as purged.
    fn queued(&mut self, id: ClientId) -> Vec<Report> {
        let mut purged = Vec::new();
        if let Some(client) = self.clients.get_mut(&id) {
            for lane in client.lanes.values_mut() {
                purged.extend(lane.queue.drain(..).map(|m| Report {
                    ticket: m.ticket,
                    result: Err(PURGE_QUEUE),
                }));
            }
        }
        purged
    }

    fn purge_queue(&mut self, id: ClientId, ctx: &mut Ctx) {
        let purged = self.queued(id);
        self.report(id, purged, ctx);
    }

    fn purge_inflight(&mut self, id: ClientId, ctx: &mut Ctx) {
        let mut purged = Vec::new();
        let is_apart = self.clients.get(&id).is_some_and(|c| c.kind == Kind::Apart);
        // Where tails are read nothing of the stream need be sent twice for this.
        let is_unheard = is_apart || !self.may_read || self.tail_max < usize::MAX;
        for flight in self.flights.values_mut() {
            if flight.client == id && !flight.is_orphan {
                flight.is_orphan = true;
                for msg in &flight.msgs {
                    if is_unheard {
                        ctx.fact(Fact::SaidFailed { event: msg.event });
                    }
                    purged.push(Report {
                        ticket: msg.ticket,
                        result: Err(PURGE_INFLIGHT),
                    });
                }
            }
        }
        if let Some(client) = self.clients.get_mut(&id) {
            for lane in client.lanes.values_mut() {
                lane.flight = None;
            }
        }
        if !purged.is_empty() {
            ctx.reach("purged on the wire");
        }
        self.report(id, purged, ctx);
    }

    fn take_reports(&mut self, id: ClientId) -> Vec<Report> {
        self.clients
            .get_mut(&id)
            .map(|c| std::mem::take(&mut c.reports))
            .unwrap_or_default()
    }
}

/// A batch's header and a record's lengths.
const BATCH_OVERHEAD: usize = 70;

fn bytes_of(record: &Record<'_>) -> usize {
    let headers = record.headers.iter();
    let headers = headers.map(|h| h.name.len() + h.value.as_ref().map_or(0, |v| v.len()) + 4);
    record.key.len() + record.value.as_ref().map_or(0, |v| v.len()) + headers.sum::<usize>()
}

fn event_of(record: &Record<'_>) -> EventId {
    let text = record.headers[0].value.as_deref().unwrap_or_default();
    let text = std::str::from_utf8(text).expect("ours");
    EventId(text[1..].parse().expect("e and a number"))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Sending,
    Refusing,
    Emptying { deadline: Option<Moment> },
}

/// As `io::kafka::Publisher`, over the fake.
pub struct Publisher {
    proc: ProcId,
    kind: Kind,
    /// The broker was not heard out.
    late: bool,
    pub client: ClientId,
    state: State,
    ready: Vec<Report>,
    in_flight: usize,
    /// Tickets without a report: each gets exactly one.
    open: BTreeSet<Ticket>,
}

impl Publisher {
    pub fn new(proc: ProcId, kind: Kind, broker: &mut Broker) -> Self {
        Publisher {
            proc,
            kind,
            late: false,
            client: broker.client(proc, kind),
            state: State::Sending,
            ready: Vec::new(),
            in_flight: 0,
            open: BTreeSet::new(),
        }
    }

    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    pub fn is_sending(&self) -> bool {
        self.state == State::Sending
    }

    pub fn drain(&mut self, reports: &mut Vec<Report>, broker: &mut Broker) {
        self.collect(broker);
        for report in &self.ready {
            assert!(self.open.remove(&report.ticket), "reported twice");
        }
        self.in_flight -= self.ready.len();
        reports.append(&mut self.ready);
    }

    fn collect(&mut self, broker: &mut Broker) {
        let fresh = broker.take_reports(self.client);
        let mut failed = fresh.iter().filter_map(|r| r.result.err());
        if failed.any(|code| self.is_stopped_by(code)) && self.state == State::Sending {
            self.state = State::Refusing;
        }
        self.ready.extend(fresh);
    }

    fn is_stopped_by(&self, code: KafkaCode) -> bool {
        match self.kind {
            Kind::Gapless => true,
            Kind::Apart => kafka::entry(code).class == Class::Fatal,
        }
    }

    pub fn send(
        &mut self,
        record: &Record<'_>,
        ticket: Ticket,
        broker: &mut Broker,
        ctx: &mut Ctx,
    ) {
        self.in_flight += 1;
        assert!(self.open.insert(ticket), "a ticket is in flight already");
        self.collect(broker);
        let result = match self.state {
            State::Sending => broker.hand_over(self.client, record, ticket, ctx),
            State::Refusing | State::Emptying { .. } => Err(PURGE_QUEUE),
        };
        if let Err(code) = result {
            if self.state == State::Sending && self.is_stopped_by(code) {
                self.state = State::Refusing;
            }
            self.ready.push(Report { ticket, result });
            ctx.after(Duration::ZERO, Event::Wake(self.proc));
        }
    }

    pub fn start_rebuild(&mut self, broker: &mut Broker, ctx: &mut Ctx) {
        broker.purge_queue(self.client, ctx);
        if !matches!(self.state, State::Emptying { .. }) {
            self.state = State::Emptying { deadline: None };
        }
    }

    pub fn forget_all(&mut self, broker: &mut Broker, ctx: &mut Ctx) {
        self.start_rebuild(broker, ctx);
        self.late |= self.in_flight > 0;
        broker.purge_inflight(self.client, ctx);
    }

    /// When the client is new: whether the old one was not heard out.
    pub fn rebuild_turn(&mut self, broker: &mut Broker, ctx: &mut Ctx) -> Option<bool> {
        let State::Emptying { deadline } = self.state else {
            return None;
        };
        if self.in_flight > 0 {
            let next = Some(ctx.now + LAST_WORDS);
            match deadline {
                None => self.state = State::Emptying { deadline: next },
                Some(at) if ctx.now >= at => {
                    self.late = true;
                    broker.purge_inflight(self.client, ctx);
                    self.state = State::Emptying { deadline: next };
                }
                Some(_) => {}
            }
            return None;
        }
        broker.drop_client(self.client);
        self.client = broker.client(self.proc, self.kind);
        self.state = State::Sending;
        Some(std::mem::take(&mut self.late))
    }
}

/// The publisher with its broker at hand.
pub struct Sending<'a> {
    pub publisher: &'a mut Publisher,
    pub broker: &'a mut Broker,
    pub ctx: &'a mut Ctx,
}

impl Outlet for Sending<'_> {
    fn send(&mut self, record: &Record<'_>, ticket: Ticket) {
        self.publisher.send(record, ticket, self.broker, self.ctx);
    }
}
