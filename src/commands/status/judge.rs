//! From what was found out to what is said. Pure.

use std::time::{Duration, SystemTime};

use serde::Serialize;

use super::{Base, Facts, Relay, unreachable};
use crate::config::StatusConfig;
use crate::finding::{Finding, Group, State};
use crate::io::fetch::NoAnswer;
use crate::io::preflight::{self, Seen, described, size, span};
use crate::io::registry::{Instance, Registered};
use crate::io::slot_view::SlotLine;
use crate::io::sql::show_table;
use crate::io::standing::Waiting;
use crate::lsn::PgTimestamp;
use crate::telemetry::health::{Condition, Health};

/// Undelivered rows that are older need an explanation.
const OVERDUE: Duration = Duration::from_secs(30);

/// For a program; null is not known.
#[derive(Default, Serialize)]
pub struct Numbers {
    slot: String,
    confirmed_flush_lsn: Option<String>,
    restart_lsn: Option<String>,
    lag_bytes: Option<i64>,
    lag_seconds: Option<f64>,
    retained_bytes: Option<i64>,
    /// Null also where no limit is set.
    safe_wal_size: Option<i64>,
    wal_status: Option<String>,
    wal_bytes_per_second: Option<f64>,
    seconds_until_lost: Option<f64>,
    /// Null where they cannot be counted.
    waiting_rows: Option<i64>,
    /// Delivered rows may be among them.
    waiting_is_at_most: Option<bool>,
    waiting_by_event_type: Option<Vec<ByType>>,
    leader: Option<Session>,
    standbys: Option<Vec<Session>>,
    last_delivered_commit_time: Option<String>,
    last_delivered_lsn: Option<String>,
    halted_event: Option<String>,
    parked_events: Option<i64>,
    parked_keys: Option<i64>,
    tripped_topics: Option<Vec<String>>,
}

#[derive(Serialize)]
struct ByType {
    event_type: Option<String>,
    rows: i64,
    oldest_age_seconds: Option<f64>,
}

#[derive(Serialize)]
struct Session {
    pid: i32,
    user: Option<String>,
    application_name: Option<String>,
    client_addr: Option<String>,
    age_seconds: Option<f64>,
}

pub fn numbers(config: &StatusConfig, facts: &Facts) -> Numbers {
    let mut numbers = Numbers {
        slot: config.source.slot.clone(),
        ..Numbers::default()
    };
    if let Some((time, lsn)) = last_delivered(config, facts) {
        numbers.last_delivered_commit_time = Some(time);
        numbers.last_delivered_lsn = lsn;
    }
    let Ok(base) = &facts.database else {
        return numbers;
    };
    let seen = &base.seen;
    if let Some(slot) = seen.slot(&config.source.slot) {
        numbers.confirmed_flush_lsn = slot.state.confirmed_flush.map(|lsn| lsn.to_string());
        numbers.restart_lsn = slot.state.restart_lsn.map(|lsn| lsn.to_string());
        numbers.lag_bytes = slot.lag_bytes;
        numbers.retained_bytes = slot.retained_bytes;
        numbers.safe_wal_size = slot.safe_wal_size;
        numbers.wal_status = slot.state.wal_status.clone();
        numbers.seconds_until_lost = until_lost(slot, base.wal_bytes_per_second);
    }
    numbers.wal_bytes_per_second = base.wal_bytes_per_second;
    if let Ok(Some(waiting)) = &base.waiting {
        numbers.waiting_rows = Some(waiting.iter().map(|w| w.rows).sum());
        numbers.waiting_is_at_most = Some(base.is_at_most && !waiting.is_empty());
        numbers.lag_seconds = if waiting.is_empty() {
            Some(0.0)
        } else {
            oldest(waiting).map(|age| age.as_secs_f64())
        };
        let by_type = waiting.iter().map(|w| ByType {
            event_type: w.event_type.clone(),
            rows: w.rows,
            oldest_age_seconds: w.oldest.map(|age| age.as_secs_f64()),
        });
        numbers.waiting_by_event_type = Some(by_type.collect());
    }
    if let Ok(instances) = &seen.instances {
        numbers.leader = instances.iter().find(|i| i.is_leader).map(session);
        let others = instances.iter().filter(|i| !i.is_leader);
        numbers.standbys = Some(others.map(session).collect());
    }
    if let Ok(Some(letters)) = &base.letters {
        numbers.parked_events = Some(letters.totals.parked);
        numbers.parked_keys = Some(letters.totals.keys);
        let topics = letters.tripped.iter().map(|tripped| tripped.topic.clone());
        numbers.tripped_topics = Some(topics.collect());
    }
    numbers.halted_event = halted(seen, &config.source.slot).map(|(event, _)| event);
    numbers
}

fn session(instance: &Instance) -> Session {
    Session {
        pid: instance.session.pid,
        user: instance.session.user.clone(),
        application_name: instance.session.application_name.clone(),
        client_addr: instance.session.client_addr.clone(),
        age_seconds: instance.age.map(|age| age.as_secs_f64()),
    }
}

pub fn judge(config: &StatusConfig, facts: &Facts) -> Vec<Group> {
    let relay = relay(config, facts);
    let base = match &facts.database {
        Ok(base) => base,
        Err(error) => {
            let failure = unreachable(error, config);
            let finding = Finding {
                exit: failure.exit,
                ..Finding::failed("database", failure.causes.join("; "), failure.remedy)
            };
            let mut progress = vec![delivered(config, facts)];
            progress.extend(told_by_relay(config, facts));
            return vec![
                Group::new("relay", relay),
                Group::new("progress", progress),
                Group::new("database", vec![finding]),
            ];
        }
    };
    // What this role lacks for streaming is no concern of a report: it may be a monitor's.
    let mut trouble: Vec<Finding> = preflight::judge(&base.seen, &config.source, &config.mapping)
        .into_iter()
        .filter(|group| group.name != "role")
        .flat_map(|group| group.findings)
        .filter(|finding| finding.state == State::Failed)
        .collect();
    if let Err(error) = &base.seen.registry {
        trouble.push(Finding::unknown("registry", error.to_string()));
    }
    if let Some((event, reason)) = halted(&base.seen, &config.source.slot) {
        trouble.push(
            Finding::failed(
                "halted event",
                format!("event {event} stopped the relay: {reason}"),
                "see to its cause, then start the relay again: it sends that event alone, before \
                 any other",
            )
            .halted(),
        );
    }
    let mut groups = vec![
        Group::new("relay", relay),
        Group::new("progress", progress(config, facts, base)),
        Group::new("slot", slot(config, base)),
        Group::new("dead letters", dead_letters(base)),
        Group::new(super::TROUBLE, trouble),
    ];
    let is_told = groups
        .iter()
        .flat_map(|group| &group.findings)
        .any(|finding| finding.state == State::Failed);
    if !is_told && let Ok(Some(waiting)) = &base.waiting {
        groups.push(Group::new(
            "delivery",
            overdue(waiting, base.is_at_most).into_iter().collect(),
        ));
    }
    groups.retain(|group| !group.findings.is_empty());
    groups
}

fn dead_letters(base: &Base) -> Vec<Finding> {
    match &base.letters {
        Ok(None) => Vec::new(),
        Ok(Some(letters)) => letters.findings(),
        Err(error) => vec![Finding::unknown("parked", error.to_string())],
    }
}

/// Rows that nobody else explains, and that wait for longer than a relay should need.
fn overdue(waiting: &[Waiting], is_at_most: bool) -> Option<Finding> {
    let age = oldest(waiting).filter(|age| *age > OVERDUE)?;
    let subject = "overdue rows";
    if is_at_most {
        return Some(Finding::warning(
            subject,
            format!(
                "the oldest row that may be undelivered is {} old",
                span(age)
            ),
            "ask where the relay answers (--http): it knows what is delivered",
        ));
    }
    Some(Finding::failed(
        subject,
        format!(
            "the oldest undelivered row is {} old, and nothing else that was found explains it",
            span(age)
        ),
        "ask again: where that age shrinks, the relay works off what has piled up; else look at its \
         log, and restart it if nothing moves: nothing is lost",
    ))
}

/// What the registry has of the slot.
pub fn registered<'a>(seen: &'a Seen, slot: &str) -> Option<&'a Registered> {
    seen.registry.as_ref().ok()?.of_slot(slot)
}

fn halted(seen: &Seen, slot: &str) -> Option<(String, String)> {
    let halted = registered(seen, slot)?.halted.as_ref()?;
    Some((halted.event_id.clone(), halted.reason.clone()))
}

// ---- who runs ------------------------------------------------------------------------------

/// What the relay at the address says, if it is this slot's.
fn ours<'a>(config: &StatusConfig, facts: &'a Facts) -> Option<&'a Health> {
    let seen = facts.database.as_ref().ok().map(|base| &base.seen);
    facts
        .relay
        .health()
        .filter(|health| stranger(config, seen, health).is_none())
}

/// Whose relay it is that answers, where it is not this one. A slot of the same name may be in
/// another database: whoever leads has its id in the registry.
pub fn stranger(config: &StatusConfig, seen: Option<&Seen>, health: &Health) -> Option<String> {
    if health.slot != config.source.slot {
        return Some(format!("the relay of slot {}", health.slot));
    }
    let registry = seen?.registry.as_ref().ok()?;
    let row = registry.of_slot(&config.source.slot);
    let leader = row.and_then(|row| row.leader.as_deref());
    let is_another = health.leader == "leading" && leader != Some(&health.process_id);
    is_another.then(|| {
        format!(
            "another relay of a slot {} (process id {}, and the registry has {})",
            health.slot,
            health.process_id,
            leader.unwrap_or("none")
        )
    })
}

fn relay(config: &StatusConfig, facts: &Facts) -> Vec<Finding> {
    let mut findings = Vec::new();
    let instances = match &facts.database {
        Ok(base) => base.seen.instances.as_ref().ok(),
        Err(_) => None,
    };
    let leads = instances.and_then(|all| all.iter().find(|i| i.is_leader));
    match (instances, leads) {
        (None, _) => findings.push(Finding::unknown("leader", "the database does not tell")),
        (Some(_), Some(leader)) => {
            let mut found = instance(leader);
            let base = facts.database.as_ref().ok();
            let row = base.and_then(|base| registered(&base.seen, &config.source.slot));
            if let Some(id) = row.and_then(|row| row.leader.as_deref()) {
                found.push_str(&format!(", process id {id}"));
            }
            findings.push(Finding::ok("leader", found));
        }
        (Some(others), None) => findings.push(nobody_leads(config, facts, others)),
    }
    if let Some(instances) = instances {
        let standbys: Vec<String> = instances
            .iter()
            .filter(|i| !i.is_leader)
            .map(instance)
            .collect();
        let found = if standbys.is_empty() {
            "none".to_owned()
        } else {
            standbys.join("; ")
        };
        findings.push(Finding::ok("standbys", found));
    }
    findings.extend(process(config, facts, leads.is_some()));
    findings
}

fn nobody_leads(config: &StatusConfig, facts: &Facts, others: &[Instance]) -> Finding {
    let subject = "leader";
    let source = &config.source;
    let base = facts.database.as_ref().ok();
    let table = match base.map(|base| &base.table) {
        Some(Some(table)) => show_table(table),
        Some(None) => "the table that was dropped".to_owned(),
        None => show_table(&source.table),
    };
    if others.is_empty() {
        let found = format!("no relay of {table} runs");
        let seen = base.map(|base| &base.seen);
        let registry = seen.map(|seen| &seen.registry);
        return match registry {
            // How to start it is said with the swap.
            Some(Ok(registry)) if registry.swapped(&source.slot).is_some() => Finding {
                remedy: None,
                ..Finding::failed(subject, found, "")
            },
            // The one that reads it may have the lock of another table.
            Some(Err(_))
                if seen.is_some_and(|seen| {
                    seen.slot(&source.slot)
                        .is_some_and(|slot| slot.holder.is_some())
                }) =>
            {
                Finding::unknown(
                    subject,
                    format!(
                        "nobody has the lock of {table}, and whose the slot is the registry would tell"
                    ),
                )
            }
            Some(_) | None => Finding::failed(subject, found, "start it: walrelay run"),
        };
    }
    Finding::failed(
        "leader",
        format!("{} instances of {table} run, and none leads", others.len()),
        "wait a few seconds and ask again; if it stays so, look at their logs",
    )
}

fn instance(instance: &Instance) -> String {
    match instance.age {
        Some(age) => format!("{}, connected for {}", instance.session, span(age)),
        None => instance.session.to_string(),
    }
}

/// What the process itself says: each condition that does not hold.
fn process(config: &StatusConfig, facts: &Facts, somebody_leads: bool) -> Vec<Finding> {
    let subject = "process";
    let (address, health) = match &facts.relay {
        Relay::NotAsked => {
            return vec![Finding::unknown(subject, "not asked (--http off)")];
        }
        Relay::Silent {
            address,
            why: NoAnswer::Hangs(why),
        } => {
            return vec![Finding::failed(
                subject,
                format!("what listens at http://{address} hangs: {why}"),
                "if it is the relay, look whether its process is stopped or starved, and restart it \
                 if it does not come back: nothing is lost; else say with --http where the relay \
                 listens",
            )];
        }
        Relay::Silent {
            address,
            why: NoAnswer::Away(why),
        } => {
            let found = format!("no answer at http://{address}: {why}");
            let hint = if somebody_leads {
                " (--http says where the relay listens)"
            } else {
                ""
            };
            return vec![Finding::unknown(subject, format!("{found}{hint}"))];
        }
        Relay::Says { address, health } => (address, health),
    };
    let seen = facts.database.as_ref().ok().map(|base| &base.seen);
    if let Some(whose) = stranger(config, seen, health) {
        return vec![Finding::unknown(
            subject,
            format!(
                "at http://{address} answers {whose}: not this one (--http says where it listens)"
            ),
        )];
    }
    if health.leader == "standby" {
        return vec![Finding::ok(
            subject,
            format!("the instance at http://{address} stands by"),
        )];
    }
    let mut findings: Vec<Finding> = health.conditions.iter().filter_map(condition).collect();
    if health.ready {
        findings.insert(
            0,
            Finding::ok(
                subject,
                format!("ready since {} (http://{address})", health.since),
            ),
        );
    } else if !findings.iter().any(|f| f.state == State::Failed) {
        findings.push(Finding::failed(
            subject,
            format!(
                "the relay at http://{address} has not been ready since {}",
                health.since
            ),
            "ask again in a few seconds: what it does not know yet is named above",
        ));
    }
    findings
}

/// `None` where it holds.
fn condition(condition: &Condition) -> Option<Finding> {
    let subject = format!("condition {}", condition.name);
    match condition.ok {
        Some(true) => None,
        None => Some(Finding::unknown(subject, condition.what.clone())),
        Some(false) => {
            let found = format!("{} (since {})", condition.what, condition.since);
            let remedy = condition.remedy.clone().unwrap_or_default();
            let finding = Finding::failed(subject, found, remedy);
            // An event that nobody takes waits for a decision.
            Some(if condition.name == "event" {
                finding.halted()
            } else {
                finding
            })
        }
    }
}

// ---- how far -------------------------------------------------------------------------------

/// Commit time and position of the last transaction that is known to be delivered.
fn last_delivered(config: &StatusConfig, facts: &Facts) -> Option<(String, Option<String>)> {
    if let Some(health) = ours(config, facts)
        && let Some(time) = &health.progress.delivered_commit_time
    {
        return Some((time.clone(), health.progress.delivered_lsn.clone()));
    }
    let base = facts.database.as_ref().ok()?;
    let row = registered(&base.seen, &config.source.slot)?;
    let last = row.stop.as_ref()?.last?;
    Some((rfc3339(last.commit_time), Some(last.commit_lsn.to_string())))
}

fn delivered(config: &StatusConfig, facts: &Facts) -> Finding {
    let subject = "last delivered";
    match last_delivered(config, facts) {
        Some((time, Some(lsn))) => Finding::ok(subject, format!("commit {lsn} of {time}")),
        Some((time, None)) => Finding::ok(subject, format!("commit of {time}")),
        None if ours(config, facts).is_some() => {
            Finding::ok(subject, "nothing yet since this relay started")
        }
        None => Finding::unknown(subject, "only the relay knows, and it left no stop behind"),
    }
}

fn told_by_relay(config: &StatusConfig, facts: &Facts) -> Vec<Finding> {
    let Some(health) = ours(config, facts) else {
        return Vec::new();
    };
    let numbers = &health.progress;
    let mut findings = vec![Finding::ok(
        "in the relay",
        format!(
            "{} events in flight, {} held, {} delivered since it started",
            numbers.in_flight_events, numbers.held_events, numbers.delivered_events
        ),
    )];
    findings.push(match numbers.oldest_undelivered_age_seconds {
        Some(age) if age > 0.0 => {
            let age = span(Duration::from_secs_f64(age));
            Finding::ok("oldest in the relay", format!("not delivered for {age}"))
        }
        Some(_) => Finding::ok("oldest in the relay", "all that it took is delivered"),
        None => Finding::unknown("oldest in the relay", "the relay does not tell"),
    });
    findings
}

fn progress(config: &StatusConfig, facts: &Facts, base: &Base) -> Vec<Finding> {
    let mut findings = vec![delivered(config, facts)];
    findings.extend(told_by_relay(config, facts));
    let subject = "confirmed_flush lag";
    findings.push(match base.seen.slot(&config.source.slot) {
        Some(slot) => match (slot.lag_bytes, slot.state.confirmed_flush) {
            (Some(bytes), Some(lsn)) => {
                Finding::ok(subject, format!("{} behind, at {lsn}", size(bytes)))
            }
            _ => Finding::unknown(subject, "the slot has no position"),
        },
        None => Finding::unknown(subject, "there is no slot"),
    });
    findings.extend(waiting(base));
    findings
}

fn waiting(base: &Base) -> Vec<Finding> {
    let subject = "undelivered rows";
    let waiting = match &base.waiting {
        Ok(Some(waiting)) => waiting,
        Ok(None) if base.table.is_none() => {
            let why = "the table was dropped: what the slot still has of it cannot be counted";
            return vec![Finding::unknown(subject, why)];
        }
        Ok(None) => {
            let why = "the table has no column xid or created_at to tell them by";
            return vec![Finding::unknown(subject, why)];
        }
        Err(error) if error.sqlstate() == "57014" => {
            return vec![Finding::unknown(subject, "counting them took too long")];
        }
        Err(error) => return vec![Finding::unknown(subject, error.to_string())],
    };
    if waiting.is_empty() {
        return vec![Finding::ok(subject, "none")];
    }
    let rows: i64 = waiting.iter().map(|w| w.rows).sum();
    let at_most = if base.is_at_most { "at most " } else { "" };
    let waits = |age: Option<Duration>| match age {
        Some(age) => format!(", the oldest {} old", span(age)),
        None => String::new(),
    };
    let found = format!("{at_most}{}{}", count(rows), waits(oldest(waiting)));
    let mut findings = vec![Finding::ok(subject, found)];
    findings.extend(waiting.iter().map(|w| {
        let event_type = w.event_type.as_deref().unwrap_or("(none)");
        let found = format!("{at_most}{}{}", count(w.rows), waits(w.oldest));
        Finding::ok(format!("  {event_type}"), found)
    }));
    findings
}

fn count(rows: i64) -> String {
    if rows == 1 {
        "1 row".to_owned()
    } else {
        format!("{rows} rows")
    }
}

fn oldest(waiting: &[Waiting]) -> Option<Duration> {
    waiting.iter().filter_map(|w| w.oldest).max()
}

// ---- the slot ------------------------------------------------------------------------------

fn slot(config: &StatusConfig, base: &Base) -> Vec<Finding> {
    let seen = &base.seen;
    // A slot that is not there is told as trouble.
    let Some(slot) = seen.slot(&config.source.slot) else {
        return Vec::new();
    };
    let mut findings = vec![reader(slot, seen)];
    if let Some(dead) = preflight::dead_standbys(seen, &config.source) {
        findings.push(Finding::failed(
            "standby",
            format!(
                "the server holds the stream back (WaitForStandbyConfirmation) for each of \
                 synchronized_standby_slots, of which {dead}"
            ),
            "start that standby again, or, if it is gone for good, take it out of \
             synchronized_standby_slots (alter system set …; select pg_reload_conf()): the stream \
             then goes on by itself",
        ));
    }
    findings.push(retained(slot, base));
    let subject = "held back by";
    findings.push(match &seen.transactions {
        Err(error) => Finding::unknown(subject, error.to_string()),
        Ok(old) => match old.iter().find(|t| t.has_xid).or_else(|| old.first()) {
            Some(oldest) => Finding::warning(
                subject,
                described(oldest),
                "restart_lsn and vacuum wait for it: let it end, or end it",
            ),
            None if seen.session.as_ref().is_ok_and(|s| s.sees_others) => {
                Finding::ok(subject, "no transaction older than a minute")
            }
            None => Finding::unknown(
                subject,
                "no prepared transaction; sessions of other roles do not show (grant \
                 pg_read_all_stats shows them)",
            ),
        },
    });
    findings
}

fn reader(slot: &SlotLine, seen: &Seen) -> Finding {
    let subject = "slot";
    let leads = match &seen.instances {
        Ok(instances) => instances.iter().any(|i| i.is_leader),
        Err(error) => return Finding::unknown(subject, error.to_string()),
    };
    match (&slot.holder, leads) {
        (Some(holder), true) => Finding::ok(subject, format!("{}, read by {holder}", slot.name)),
        // A walrelay's own reader is nobody to be ended: only the registry tells whose slot it is.
        (Some(holder), false) if registered(seen, &slot.name).is_none() => {
            Finding::ok(subject, format!("{}, read by {holder}", slot.name))
        }
        (Some(holder), false) => Finding::failed(
            subject,
            format!(
                "slot {} is held by {holder}, which is no walrelay",
                slot.name
            ),
            format!("end it: select pg_terminate_backend({})", holder.pid),
        ),
        (None, true) => Finding::failed(
            subject,
            format!("a relay leads, but nobody reads slot {}", slot.name),
            "look at the relay's log or its /readyz: it closes the stream while Kafka does not answer",
        ),
        (None, false) => Finding::ok(subject, format!("{}, nobody reads it", slot.name)),
    }
}

fn retained(slot: &SlotLine, base: &Base) -> Finding {
    let subject = "retained WAL";
    let Some(bytes) = slot.retained_bytes else {
        return Finding::unknown(subject, "the slot has no restart_lsn");
    };
    let status = slot.state.wal_status.as_deref().unwrap_or("unknown");
    let mut found = format!("{}, wal_status {status}", size(bytes));
    let limit = base
        .seen
        .settings
        .as_ref()
        .map(|s| s.shown("max_slot_wal_keep_size"));
    match (slot.safe_wal_size, limit) {
        (Some(safe), _) => {
            found.push_str(&format!(", {} more until it is lost", size(safe.max(0))));
            if let Some(seconds) = until_lost(slot, base.wal_bytes_per_second) {
                let left = Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX);
                found.push_str(&if left > Duration::from_secs(86_400 * 365) {
                    ": more than a year at the present rate".to_owned()
                } else {
                    format!(": {} at the present rate", span(left))
                });
            }
        }
        (None, Ok("-1")) => found.push_str(", no limit is set (max_slot_wal_keep_size)"),
        (None, _) => {}
    }
    if status == "unreserved" {
        return Finding::failed(
            subject,
            format!("{found}: the next checkpoint may take it away"),
            "raise max_slot_wal_keep_size now and reload (select pg_reload_conf()), and start the \
             relay",
        );
    }
    Finding::ok(subject, found)
}

/// `None` where no limit is set, the rate is not known, or nothing is written.
fn until_lost(slot: &SlotLine, bytes_per_second: Option<f64>) -> Option<f64> {
    let safe = slot.safe_wal_size?;
    let rate = bytes_per_second.filter(|rate| *rate >= 1.0)?;
    // Megabytes are exact enough, and fit.
    let megabytes = u32::try_from(safe.max(0) >> 20).unwrap_or(u32::MAX);
    Some(f64::from(megabytes) * 1_048_576.0 / rate)
}

/// In UTC, for people and for `timestamptz`.
pub fn rfc3339(time: PgTimestamp) -> String {
    let micros = u64::try_from(time.unix_micros()).unwrap_or_default();
    let time = SystemTime::UNIX_EPOCH + Duration::from_micros(micros);
    humantime::format_rfc3339_micros(time).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Exit;
    use crate::io::slot_view::SlotState;

    fn said(name: &str, ok: Option<bool>) -> Condition {
        Condition {
            name: name.to_owned(),
            ok,
            since: "2030-01-01T00:00:00Z".to_owned(),
            what: "what it is".to_owned(),
            remedy: Some("do it".to_owned()),
        }
    }

    #[test]
    fn a_condition_that_is_not_known_is_no_failure_and_an_event_is_a_decision() {
        assert_eq!(condition(&said("kafka", Some(true))), None);
        let unknown = condition(&said("kafka", None)).expect("it is said");
        assert_eq!(unknown.state, State::Unknown);
        let failed = condition(&said("kafka", Some(false))).expect("it is said");
        assert_eq!((failed.state, failed.exit), (State::Failed, Exit::Refused));
        assert!(failed.found.contains("since 2030"), "{failed:?}");
        let event = condition(&said("event", Some(false))).expect("it is said");
        assert_eq!(event.exit, Exit::Halted);
    }

    #[test]
    fn rows_that_wait_for_long_are_a_failure_where_it_is_known_that_they_wait() {
        let waiting = |seconds: &[u64]| -> Vec<Waiting> {
            let ages = seconds.iter().map(|age| Waiting {
                event_type: None,
                rows: 1,
                oldest: Some(Duration::from_secs(*age)),
            });
            ages.collect()
        };
        let state = |seconds: &[u64], is_at_most| {
            overdue(&waiting(seconds), is_at_most).map(|finding| finding.state)
        };
        assert_eq!(state(&[], false), None);
        assert_eq!(state(&[3, 29], false), None);
        assert_eq!(state(&[3, 31], false), Some(State::Failed));
        assert_eq!(state(&[3, 31], true), Some(State::Warning));
    }

    #[test]
    fn the_time_left_is_the_room_over_the_rate_where_both_are_known() {
        let slot = |safe_wal_size| SlotLine {
            name: "s".to_owned(),
            state: SlotState {
                plugin: None,
                slot_type: "logical".to_owned(),
                database: None,
                temporary: false,
                two_phase: false,
                active_pid: None,
                confirmed_flush: None,
                restart_lsn: None,
                wal_status: None,
                failover: None,
                synced: None,
            },
            holder: None,
            retained_bytes: None,
            lag_bytes: None,
            safe_wal_size,
        };
        let rate = Some(1_048_576.0);
        let left = until_lost(&slot(Some(100 << 20)), rate).expect("both are known");
        assert!((left - 100.0).abs() < 0.01, "{left}");
        assert_eq!(until_lost(&slot(Some(-5)), rate), Some(0.0));
        assert_eq!(until_lost(&slot(None), rate), None);
        assert_eq!(until_lost(&slot(Some(1 << 20)), Some(0.0)), None);
        assert_eq!(until_lost(&slot(Some(1 << 20)), None), None);
    }
}
