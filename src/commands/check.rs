//! `walrelay check`: every requirement of `run` and how it stands, before anything is changed.
//!
//! # Invariants
//! Nothing is written, and nothing is waited for without an end.

use std::collections::BTreeSet;
use std::time::Duration;

use serde::Serialize;

use super::dead_letters::Standing;
use super::init;
use super::report::{self, Entry, Screen};
use crate::config::{CheckConfig, Database, Source};
use crate::error::{DbError, Failure};
use crate::finding::{self, Finding, Group, State};
use crate::io::preflight::{self, Registry, Seen};
use crate::io::side::Side;
use crate::io::slot::{IdentifySystem, Slot, WAL_SENDER_TIMEOUT};
use crate::io::{connect, kafka, topics};

/// All questions to the database together: ten round trips and some work on small catalogs.
const LOOK_WITHIN: Duration = Duration::from_secs(10);
/// No single one of them may take long: a lock on a catalog would be one to wait for.
const STATEMENT_TIMEOUT: &str = "set statement_timeout = '2s'; set lock_timeout = '1s'";
const KAFKA_WITHIN: Duration = Duration::from_secs(5);

/// # Errors
/// Every requirement that is not met, the remedies as the last line.
pub async fn run(config: CheckConfig) -> Result<(), Failure> {
    let kafka = match &config.kafka {
        Some(kafka) => Some(kafka::Settings::new(kafka, "walrelay-check")?),
        None => None,
    };
    let (mut groups, topics) = postgres(&config).await;
    groups.push(look_at_kafka(&config, kafka.as_ref(), topics).await);
    let failure = finding::failure(groups.iter().flat_map(|group| &group.findings));
    let text = if config.json {
        report::json(&Report {
            ok: failure.is_none(),
            findings: report::entries(&groups),
        })?
    } else {
        let verdict = verdict(&groups);
        format!("{}{verdict}\n", report::table(&groups, Screen::of_stdout()))
    };
    report::write_out(&text)?;
    failure.map_or(Ok(()), Err)
}

#[derive(Serialize)]
struct Report<'a> {
    ok: bool,
    findings: Vec<Entry<'a>>,
}

fn verdict(groups: &[Group]) -> String {
    let count = |state| {
        let all = groups.iter().flat_map(|group| &group.findings);
        all.filter(|finding| finding.state == state).count()
    };
    let mut text = format!("{} ok", count(State::Ok));
    for (state, one, many) in [
        (State::Unknown, "unknown", "unknown"),
        (State::Warning, "warning", "warnings"),
        (State::Failed, "failed", "failed"),
    ] {
        match count(state) {
            0 => {}
            1 => text.push_str(&format!(", 1 {one}")),
            n => text.push_str(&format!(", {n} {many}")),
        }
    }
    text
}

/// Topics that events will go to, or why they are not known.
type Topics = Result<BTreeSet<String>, String>;

async fn postgres(config: &CheckConfig) -> (Vec<Group>, Topics) {
    let source = &config.source;
    let (side, replication) = tokio::join!(ordinary(&source.database), replication(source));
    let mut connection = Vec::new();
    let (seen, topics) = match &side {
        Ok(side) => {
            let (seen, topics) = tokio::join!(
                look(side, source),
                topics::of_table(&side.client, &source.table, &config.mapping)
            );
            (Some(seen), topics)
        }
        Err(error) => {
            connection.push(no_connection("connection", error, &source.database));
            (None, Err("the database was not reached".to_owned()))
        }
    };
    let seen = match seen {
        Some(Ok(seen)) => {
            connection.push(connected(&seen, &source.database));
            Some(seen)
        }
        Some(Err(error)) => {
            connection.push(Finding::failed(
                "connection",
                format!("looking at the database: {error}"),
                connect::failure(&error, &source.database).remedy,
            ));
            None
        }
        None => None,
    };
    let side_error = side.as_ref().err();
    connection.extend(stream_connection(
        &replication,
        side_error,
        seen.as_ref(),
        source,
    ));
    let mut groups = vec![Group::new("connection", connection)];
    match (seen, &side) {
        (Some(seen), Ok(side)) => {
            let mut judged = preflight::judge(&seen, source, &config.mapping);
            if is_before_init(&seen) {
                before_init(config, side, &mut judged).await;
            }
            dead_letters(config, side, &seen, &mut judged).await;
            groups.extend(judged);
        }
        _ => groups.push(Group::new(
            "server",
            vec![Finding::unknown(
                "everything else",
                "not looked at, for want of a connection",
            )],
        )),
    }
    (groups, topics)
}

fn is_before_init(seen: &Seen) -> bool {
    let is_new = |registry: &Registry| registry.row.is_none() && registry.rival.is_none();
    !seen.server.in_recovery && seen.registry.as_ref().is_ok_and(is_new)
}

/// "Run `walrelay init`" is not all that there is to do where `init` would be refused.
async fn before_init(config: &CheckConfig, side: &Side, judged: &mut Vec<Group>) {
    let subject = "init";
    let obstacles = init::obstacles(&side.client, &config.source, &config.mapping).await;
    let finding = match obstacles {
        Ok(obstacles) => {
            let told: Vec<&Finding> = judged.iter().flat_map(|group| &group.findings).collect();
            let is_new = |found: &Finding| !told.iter().any(|told| told.found == found.found);
            let new: Vec<Finding> = obstacles.into_iter().filter(is_new).collect();
            let Some(failure) = finding::failure(&new) else {
                return;
            };
            let causes = failure.causes.join("; ");
            Finding::failed(
                subject,
                format!("`walrelay init` would be refused: {causes}"),
                failure.remedy,
            )
        }
        Err(error) => Finding::unknown(subject, format!("what it would lack: {error}")),
    };
    // Whoever follows the remedies in their order runs `init` after this.
    let role = judged.iter().position(|group| group.name == "role");
    let at = role.map_or(judged.len(), |role| role + 1);
    judged.insert(at, Group::new(subject, vec![finding]));
}

/// May they be written, and what waits there for a person? A topic that is held keeps no relay from
/// starting.
async fn dead_letters(config: &CheckConfig, side: &Side, seen: &Seen, judged: &mut Vec<Group>) {
    let mut findings = Vec::new();
    if let (Ok(rights), Ok(role)) = (&seen.rights, &seen.role) {
        findings.extend(preflight::parking(*rights, role, config.on_poison));
    }
    let row = seen.registry.as_ref().ok().and_then(|r| r.row.as_ref());
    if let Some(row) = row.filter(|_| !seen.server.in_recovery) {
        match Standing::of(&side.client, row.table_oid).await {
            Ok(standing) => findings.extend(standing.findings()),
            Err(error) => findings.push(Finding::unknown("parked", error.to_string())),
        }
    }
    for finding in &mut findings {
        if finding.state == State::Failed && finding.subject.starts_with("topic ") {
            finding.state = State::Warning;
        }
    }
    if !findings.is_empty() {
        judged.push(Group::new("dead letters", findings));
    }
}

async fn ordinary(database: &Database) -> Result<Side, DbError> {
    let side = Side::connect(database, None).await?;
    side.run(STATEMENT_TIMEOUT).await?;
    Ok(side)
}

/// Opens the connection that the stream will need, and asks it who it reached.
async fn replication(source: &Source) -> Result<IdentifySystem, DbError> {
    let mut slot = Slot::connect(&source.database, "UTF8", WAL_SENDER_TIMEOUT).await?;
    let identity = slot.identify_system().await?;
    slot.say_goodbye().await;
    Ok(identity)
}

async fn look(side: &Side, source: &Source) -> Result<Seen, DbError> {
    let seen = tokio::time::timeout(LOOK_WITHIN, preflight::look(&side.client, source)).await;
    let seen = seen.map_err(|_| {
        DbError::Unreachable(format!(
            "the server did not answer within {} s",
            LOOK_WITHIN.as_secs()
        ))
    })??;
    match seen.broken() {
        Some(error) => Err(error.clone()),
        None => Ok(seen),
    }
}

fn no_connection(subject: &str, error: &DbError, database: &Database) -> Finding {
    let failure = connect::failure(error, database);
    Finding {
        exit: failure.exit,
        ..Finding::failed(subject, failure.causes.join("; "), failure.remedy)
    }
}

fn connected(seen: &Seen, database: &Database) -> Finding {
    let who = format!(
        "user \"{}\", database \"{}\"",
        database.user, database.dbname
    );
    let found = match &seen.session {
        Ok(session) => format!("{}, {who}, {}", session.server, session.secrecy()),
        Err(_) => who,
    };
    Finding::ok("connection", found)
}

/// The connection for the stream. What stands in the way of both connections is said once.
fn stream_connection(
    replication: &Result<IdentifySystem, DbError>,
    side_error: Option<&DbError>,
    seen: Option<&Seen>,
    source: &Source,
) -> Option<Finding> {
    let subject = "replication connection";
    let identity = match replication {
        Ok(identity) => identity,
        Err(error) if side_error == Some(error) => return None,
        Err(error) => {
            let mut finding = no_connection(subject, error, &source.database);
            finding.found = format!("for replication: {}", finding.found);
            let told = seen.and_then(|seen| told_elsewhere(error, seen));
            finding.remedy = told.or(finding.remedy);
            return Some(finding);
        }
    };
    let Some(seen) = seen else {
        return Some(Finding::ok(subject, "open"));
    };
    let known = seen.server.system_identifier.as_ref();
    let is_other_system = known.is_some_and(|known| *known != identity.system_identifier);
    let is_other_timeline = seen
        .server
        .timeline
        .is_some_and(|known| known != identity.timeline);
    if is_other_system || is_other_timeline {
        return Some(Finding::failed(
            subject,
            "the replication connection reached another server than the ordinary one",
            "connect to one server, not through a balancer (--database-url, PGHOST)",
        ));
    }
    let proof = if known.is_some() {
        "the same server"
    } else {
        "whether it is the same server may not be asked"
    };
    let found = format!(
        "{proof} (system identifier {}, timeline {})",
        identity.system_identifier, identity.timeline
    );
    Some(if known.is_some() {
        Finding::ok(subject, found)
    } else {
        Finding::unknown(subject, found)
    })
}

/// The remedy of the finding that is this refusal's cause: then it is said once.
fn told_elsewhere(error: &DbError, seen: &Seen) -> Option<String> {
    match error.sqlstate() {
        "42501" => {
            let role = seen.role.as_ref().ok().filter(|role| !role.may_replicate)?;
            Some(preflight::replication_remedy(&role.name))
        }
        "53300" => {
            let settings = seen.settings.as_ref().ok();
            let max = settings.and_then(|settings| settings.number("max_wal_senders"));
            (max == Some(0)).then(preflight::no_wal_senders)?.remedy
        }
        _ => None,
    }
}

async fn look_at_kafka(
    config: &CheckConfig,
    settings: Option<&kafka::Settings>,
    topics: Topics,
) -> Group {
    let (Some(settings), Some(kafka)) = (settings, &config.kafka) else {
        let why = "no --brokers: Kafka was not looked at";
        return Group::new("kafka", vec![Finding::unknown("brokers", why)]);
    };
    let (names, unknown) = match topics {
        Ok(names) => (names.into_iter().collect(), None),
        Err(why) => (Vec::new(), Some(Finding::unknown("topics", why))),
    };
    let create = kafka.create_topics;
    let mut findings = kafka::look(settings, &names, create, KAFKA_WITHIN).await;
    findings.extend(unknown);
    Group::new("kafka", findings)
}
