//! The conditions of being ready, each judged from the evidence alone.

use std::time::{Duration, SystemTime};

use super::{
    Evidence, Facts, Held, Lead, Leader, Numbers, Sample, SlotSample, Stream, Trouble, approximate,
    rfc3339, span, wall,
};
use crate::lsn::Lsn;

/// The loop turns every second: facts of a loop that is slower than this are no longer true.
const TURNS_WITHIN: Duration = Duration::from_secs(5);
/// A sample is taken every few seconds; an older one than this says nothing about now.
const SAMPLE_FRESH: Duration = Duration::from_secs(35);
/// Nothing delivered for so long, with events on their way, is no slow broker any more.
const SILENT_MAX: Duration = Duration::from_secs(10);
/// An event that is older than this and not delivered: consumers notice.
const OLDEST_MAX: Duration = Duration::from_secs(30);
/// `confirmed_flush_lsn` moves with every keepalive, every few seconds at most.
const CONFIRMED_WITHIN: Duration = Duration::from_secs(60);

/// One condition at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// `None`: not known.
    pub ok: Option<bool>,
    pub what: String,
    pub remedy: Option<String>,
}

type Judge = fn(&Evidence) -> Verdict;

/// Every condition, in the order in which a person looks for the cause.
pub const CONDITIONS: [(&str, Judge); 12] = [
    ("loop", turning),
    ("database", database),
    ("leadership", leadership),
    ("slot", slot),
    ("publication", publication),
    ("stream", stream),
    ("kafka", kafka),
    ("topics", topics),
    ("event", event),
    ("dead letters", dead_letters),
    ("progress", progress),
    ("running", running),
];

/// Those of which no other log line tells.
pub const IS_LOGGED: [&str; 3] = ["slot", "publication", "progress"];

impl Verdict {
    fn holds(what: impl Into<String>) -> Self {
        Verdict {
            ok: Some(true),
            what: what.into(),
            remedy: None,
        }
    }

    fn unknown(what: impl Into<String>) -> Self {
        Verdict {
            ok: None,
            what: what.into(),
            remedy: None,
        }
    }

    fn fails(what: impl Into<String>, remedy: impl Into<String>) -> Self {
        Verdict {
            ok: Some(false),
            what: what.into(),
            remedy: Some(remedy.into()),
        }
    }

    fn of(trouble: &Trouble) -> Self {
        Verdict::fails(trouble.what.clone(), trouble.remedy.clone())
    }
}

fn turning(e: &Evidence) -> Verdict {
    if e.quiet < TURNS_WITHIN {
        return Verdict::holds("the relay's loop turns");
    }
    Verdict::fails(
        format!(
            "the relay's loop has not turned for {}: what follows was true then",
            seconds(e.quiet)
        ),
        "if it does not come back, restart this process (nothing is lost: what was not confirmed comes again) and report it",
    )
}

fn database(e: &Evidence) -> Verdict {
    match &e.facts.lead {
        Lead::Starting => Verdict::unknown("not connected yet"),
        Lead::Leading | Lead::Standby(_) => Verdict::holds("connected"),
        Lead::NoDatabase(trouble) => Verdict::of(trouble),
    }
}

fn leadership(e: &Evidence) -> Verdict {
    let leader = e.sample().and_then(|s| s.leader.as_deref());
    match (&e.facts.lead, leader) {
        (Lead::Leading, _) => Verdict::holds("leading"),
        (Lead::Standby(why), leader) => Verdict::fails(
            match leader {
                Some(leader) => format!("standing by: {leader} leads"),
                None => format!("standing by: {why}"),
            },
            "nothing to do: this instance takes over when the leader goes; ask the leader's /readyz",
        ),
        (Lead::Starting | Lead::NoDatabase(_), _) => {
            Verdict::unknown("it is not known who leads: no database session")
        }
    }
}

fn slot(e: &Evidence) -> Verdict {
    let name = &e.slot;
    let sample = match e.sample_or_why() {
        Ok(sample) => sample,
        Err(why) => return Verdict::unknown(why),
    };
    let Some(slot) = &sample.slot else {
        return Verdict::fails(
            format!("slot {name} is gone"),
            "find out who dropped it; `walrelay init` says what the ways on are",
        );
    };
    match slot.wal_status.as_deref() {
        Some("lost") => {
            return Verdict::fails(
                format!(
                    "slot {name} is lost (wal_status lost): the server has removed WAL that was not streamed"
                ),
                "raise max_slot_wal_keep_size; events that were not streamed are only in the table",
            );
        }
        Some("unreserved") => {
            return Verdict::fails(
                format!(
                    "slot {name} is about to be lost (wal_status unreserved): {} are retained, more than max_slot_wal_keep_size; the next checkpoint removes them",
                    bytes(retained(sample, slot))
                ),
                "raise max_slot_wal_keep_size now (a reload is enough), then mend what holds the slot back",
            );
        }
        Some(_) | None => {}
    }
    let mut what = format!(
        "wal_status {}, {} retained, {}",
        slot.wal_status.as_deref().unwrap_or("unknown"),
        bytes(retained(sample, slot)),
        match slot.safe_wal_size {
            Some(safe) => format!(
                "{} more may be written before it is lost",
                bytes(u64::try_from(safe).ok())
            ),
            None => "no limit is set (max_slot_wal_keep_size)".to_owned(),
        }
    );
    if let Some(who) = sample.held_by() {
        what.push_str("; restart_lsn may be held back by ");
        what.push_str(&who);
    }
    Verdict::holds(what)
}

fn publication(e: &Evidence) -> Verdict {
    match e.sample_or_why() {
        Err(why) => Verdict::unknown(why),
        Ok(Sample {
            publication: Some(trouble),
            ..
        }) => Verdict::of(trouble),
        Ok(_) => Verdict::holds(format!("publication {} covers {}", e.publication, e.table)),
    }
}

fn stream(e: &Evidence) -> Verdict {
    match (&e.facts.lead, &e.facts.stream) {
        (Lead::Standby(_), _) => Verdict::unknown("the leader streams"),
        (Lead::Starting | Lead::NoDatabase(_), _) => Verdict::unknown("no database session"),
        (Lead::Leading, Stream::Open) => match e.sample().and_then(|s| s.dead_standbys.as_ref()) {
            None => Verdict::holds("streaming"),
            Some(names) => Verdict::fails(
                format!(
                    "the server sends nothing (WaitForStandbyConfirmation) until it is confirmed by each of synchronized_standby_slots, of which {names}"
                ),
                "start that standby again, or, if it is gone for good, take it out of synchronized_standby_slots (alter system set …; select pg_reload_conf()): the stream then goes on by itself",
            ),
        },
        (Lead::Leading, Stream::Opening) => Verdict::unknown("the replication connection is made"),
        (Lead::Leading, Stream::Closed(why)) => {
            let holder = e.sample().and_then(|s| s.slot.as_ref()?.holder);
            let remedy = match holder {
                Some(pid) => format!(
                    "another session holds the slot: end it (select pg_terminate_backend({pid})) and what starts it; this relay takes the slot as soon as it is free"
                ),
                None => {
                    "it is tried again by itself, every 2 s at most; mend what is named".to_owned()
                }
            };
            Verdict::fails(format!("not streaming: {why}"), remedy)
        }
        (Lead::Leading, Stream::WaitsForKafka) => Verdict::fails(
            "not streaming: closed until Kafka answers, for a connection that confirms nothing would block the server's shutdown",
            "see the conditions kafka and topics; the events are safe in the slot",
        ),
    }
}

fn kafka(e: &Evidence) -> Verdict {
    let kafka = &e.facts.kafka;
    let trouble = kafka.refused.as_ref().or(kafka.trouble.as_ref());
    let silent = kafka.silent_since.map(|since| span(since, e.now));
    if let Some(silent) = silent.filter(|silent| *silent >= SILENT_MAX) {
        let what = format!(
            "kafka has delivered nothing for {}, {} events wait",
            seconds(silent),
            e.facts.in_flight.events + e.facts.held.events
        );
        return match trouble {
            Some(Trouble { what: why, remedy }) => Verdict::fails(format!("{what}: {why}"), remedy),
            None => Verdict::fails(
                what,
                "look at the brokers: do they run, are they reachable from here, have the partitions leaders and enough replicas in sync? Events wait and are sent again by themselves",
            ),
        };
    }
    if let Some(trouble) = trouble {
        return Verdict::of(trouble);
    }
    match kafka.brokers {
        Some(brokers) if brokers.up == 0 => Verdict::fails(
            "no broker is connected",
            "look at the brokers and at --brokers; the relay connects again by itself",
        ),
        Some(brokers) => Verdict::holds(format!(
            "{} of {} brokers connected",
            brokers.up, brokers.known
        )),
        None if kafka.has_answered => Verdict::holds("the cluster has answered"),
        None => Verdict::unknown("no broker has answered yet"),
    }
}

/// Parked keys are no outage: the rest flows. What cannot be parked holds everything up, in the end.
fn dead_letters(e: &Evidence) -> Verdict {
    if let Some(trouble) = &e.facts.not_parked {
        return Verdict::fails(
            format!("dead letters cannot be written: {}", trouble.what),
            trouble.remedy.clone(),
        );
    }
    match (e.facts.tripped.as_slice(), e.facts.parked_keys) {
        ([], 0) => Verdict::holds("no key is parked"),
        ([], keys) => Verdict::holds(format!(
            "{keys} keys are parked: see walrelay dead-letters list"
        )),
        ([only], _) => Verdict::of(only),
        ([first, rest @ ..], _) => Verdict::fails(
            format!("{} (and {} topics more)", first.what, rest.len()),
            first.remedy.clone(),
        ),
    }
}

fn topics(e: &Evidence) -> Verdict {
    let waiting = &e.facts.topics;
    let Some(first) = waiting
        .iter()
        .find(|w| w.unanswered.is_none())
        .or(waiting.first())
    else {
        return Verdict::holds("no event waits for a topic");
    };
    let topic = &first.topic;
    let events = match first.events {
        1 => format!("event {} waits", first.first_event_id),
        n => format!("{n} events wait, the first is {}", first.first_event_id),
    };
    let mut what = match (&first.denied, &first.unanswered) {
        (Some(denied), _) => format!("{}: {events}", denied.what),
        (None, None) => format!("topic {topic} does not exist: {events}"),
        (None, Some(why)) => format!("topic {topic} cannot be used yet ({why}): {events}"),
    };
    if waiting.len() > 1 {
        let others: Vec<&str> = waiting
            .iter()
            .map(|w| w.topic.as_str())
            .filter(|name| name != topic)
            .collect();
        what.push_str("; events also wait for ");
        what.push_str(&others.join(", "));
    }
    if e.facts.is_full {
        what.push_str("; so many wait that everything else does too");
    }
    let remedy = match (&first.denied, &first.unanswered) {
        (Some(denied), _) => denied.remedy.clone(),
        (None, None) => format!("create {topic}, or run with --create-topics PARTITIONS"),
        (None, Some(_)) => "it is asked for again every 2 s; see the condition kafka".to_owned(),
    };
    Verdict::fails(what, remedy)
}

fn event(e: &Evidence) -> Verdict {
    match &e.facts.stuck_event {
        Some(trouble) => Verdict::of(trouble),
        None => Verdict::holds("no event stands in the way"),
    }
}

fn progress(e: &Evidence) -> Verdict {
    if e.facts.lead != Lead::Leading {
        return Verdict::unknown("only the leader knows");
    }
    let age = e.oldest_age();
    if let Some(age) = age.filter(|age| *age > OLDEST_MAX) {
        return Verdict::fails(
            format!("the oldest undelivered event is {} old", seconds(age)),
            "while walrelay_delivered_events_total grows the relay catches up by itself; else another condition names the cause",
        );
    }
    if let (Some(sample), Stream::Open) = (e.sample(), &e.facts.stream) {
        let still = span(sample.confirmed_since, e.now);
        let lag = sample.lag();
        if still > CONFIRMED_WITHIN && lag.is_some_and(|lag| lag > 0) {
            return Verdict::fails(
                format!(
                    "confirmed_flush_lsn has not moved for {} and is {} behind",
                    seconds(still),
                    bytes(lag)
                ),
                "a transaction that is still being decoded may take so long (pg_stat_replication, pg_stat_replication_slots); else restart this process and report it",
            );
        }
    }
    match age {
        Some(_) => Verdict::holds("events are delivered as they come"),
        None => {
            Verdict::unknown("not streaming, or not caught up: what is undelivered is not known")
        }
    }
}

fn running(e: &Evidence) -> Verdict {
    match &e.facts.ending {
        Some(trouble) => Verdict::of(trouble),
        None => Verdict::holds("not about to end"),
    }
}

impl Evidence {
    pub fn leader(&self) -> Leader {
        match self.facts.lead {
            Lead::Leading => Leader::Leading,
            Lead::Standby(_) => Leader::Standby,
            Lead::Starting | Lead::NoDatabase(_) => Leader::Unknown,
        }
    }

    /// A sample that is young enough to speak of now.
    fn sample(&self) -> Option<&Sample> {
        self.sample_or_why().ok()
    }

    fn sample_or_why(&self) -> Result<&Sample, String> {
        let Some(sample) = &self.sample else {
            return Err("the database was not asked yet".to_owned());
        };
        let age = span(sample.at, self.now);
        if age > SAMPLE_FRESH {
            let age = seconds(age);
            return Err(format!("the database last said so {age} ago"));
        }
        Ok(sample)
    }

    /// Zero when everything is delivered; `None` when that is not known.
    fn oldest_age(&self) -> Option<Duration> {
        let Facts {
            lead,
            stream,
            oldest_undelivered,
            received,
            ..
        } = &*self.facts;
        if matches!(lead, Lead::Standby(_)) {
            return None;
        }
        if let Some(oldest) = oldest_undelivered {
            return Some(span(wall(*oldest), self.now));
        }
        // Nothing is undelivered of what was taken. Was everything taken that the server had?
        let sample = self.sample()?;
        let end = sample.wal_end_before.unwrap_or(sample.wal_end);
        (*stream == Stream::Open && *received >= end).then_some(Duration::ZERO)
    }

    pub fn numbers(&self, delivered_events: u64) -> Numbers {
        let facts = &self.facts;
        let count = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
        let brokers = facts.kafka.brokers;
        let rtt = |rtt: Duration| (rtt > Duration::ZERO).then_some(rtt.as_secs_f64());
        let known = |lsn: Lsn| (lsn != Lsn::INVALID).then(|| lsn.to_string());
        let is_leading = facts.lead == Lead::Leading;
        let base = Numbers {
            delivered_lsn: facts.delivered.map(|(lsn, _)| lsn.to_string()),
            delivered_commit_time: facts.delivered.map(|(_, at)| rfc3339(wall(at))),
            received_lsn: known(facts.received).filter(|_| is_leading),
            oldest_undelivered_age_seconds: self.oldest_age().map(|age| age.as_secs_f64()),
            in_flight_events: count(facts.in_flight.events),
            in_flight_bytes: count(facts.in_flight.bytes),
            held_events: count(facts.held.events),
            held_bytes: count(facts.held.bytes),
            waiting: facts.topics.clone(),
            delivered_events,
            brokers_known: brokers.map(|b| count(b.known)),
            brokers_up: brokers.map(|b| count(b.up)),
            broker_rtt_p50_seconds: brokers.and_then(|b| rtt(b.rtt_p50)),
            broker_rtt_p99_seconds: brokers.and_then(|b| rtt(b.rtt_p99)),
            ..Numbers::default()
        };
        match self.sample() {
            Some(sample) => sample.numbers(base, self.now),
            None => base,
        }
    }
}

impl Sample {
    fn lag(&self) -> Option<u64> {
        let confirmed = self.slot.as_ref()?.confirmed_flush?;
        Some(self.wal_end.bytes_since(confirmed))
    }

    /// The sample's part of the numbers.
    fn numbers(&self, base: Numbers, now: SystemTime) -> Numbers {
        let slot = self.slot.as_ref();
        let age = span(self.at, now);
        let held = |held: &Held| match held {
            Held::Unknown => None,
            Held::None => Some(0.0),
            Held::By { age: then, .. } => Some((*then + age).as_secs_f64()),
        };
        let show = |lsn: Lsn| lsn.to_string();
        Numbers {
            confirmed_flush_lsn: slot.and_then(|s| s.confirmed_flush).map(show),
            restart_lsn: slot.and_then(|s| s.restart).map(show),
            wal_end: Some(self.wal_end.to_string()),
            lag_bytes: self.lag(),
            retained_bytes: slot.and_then(|s| retained(self, s)),
            safe_wal_size: slot.and_then(|s| s.safe_wal_size),
            max_slot_wal_keep_size_bytes: slot.and_then(|s| s.max_keep_bytes),
            wal_status: slot.and_then(|s| s.wal_status.clone()),
            wal_bytes_per_second: self.wal_bytes_per_second,
            oldest_transaction_age_seconds: held(&self.oldest_transaction),
            prepared_transaction_age_seconds: held(&self.prepared_transaction),
            restart_lsn_held_by: self.held_by(),
            waits_for_standbys: self.dead_standbys.clone(),
            sample_age_seconds: Some(age.as_secs_f64()),
            ..base
        }
    }

    /// Whoever may keep `restart_lsn` back, where it is behind at all by more than a moment's WAL.
    fn held_by(&self) -> Option<String> {
        const OLD: Duration = Duration::from_secs(60);
        let old = |held: &Held| match held {
            Held::By { who, age } if *age >= OLD => Some(format!("{who} (age {})", seconds(*age))),
            Held::By { .. } | Held::None | Held::Unknown => None,
        };
        let both: Vec<String> = [&self.prepared_transaction, &self.oldest_transaction]
            .into_iter()
            .filter_map(old)
            .collect();
        (!both.is_empty()).then(|| both.join(" and "))
    }
}

fn retained(sample: &Sample, slot: &SlotSample) -> Option<u64> {
    slot.restart
        .map(|restart| sample.wal_end.bytes_since(restart))
}

fn seconds(span: Duration) -> String {
    format!("{:.0} s", span.as_secs_f64())
}

fn bytes(count: Option<u64>) -> String {
    const UNITS: [(&str, u64); 3] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    let Some(count) = count else {
        return "an unknown amount".to_owned();
    };
    for (unit, size) in UNITS {
        if count >= size {
            return format!("{:.1} {unit}", approximate(count) / approximate(size));
        }
    }
    format!("{count} B")
}
