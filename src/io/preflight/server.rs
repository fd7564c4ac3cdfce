//! The server, its settings and what holds its WAL back. Pure.

use std::time::Duration;

use super::look::{Answer, OldTransaction, Seen, Senders, Session, Settings};
use crate::config::Source;
use crate::finding::{Finding, State};
use crate::io::catalog::Role;
use crate::io::registry::Server;
use crate::io::slot_view::SlotLine;
use crate::io::sql::quote_ident;

/// The oldest and the newest major version that this was tried on.
const VERSIONS: (i32, i32) = (15, 18);

/// What every command needs of the server itself.
#[must_use]
pub fn server_findings(server: &Server) -> Vec<Finding> {
    let mut findings = vec![version(server)];
    if server.in_recovery {
        findings.push(Finding::failed(
            "recovery",
            "this server is in recovery (a standby): nothing can be written here",
            "connect to the primary: --database-url, or PGHOST and PGPORT",
        ));
    } else {
        findings.push(Finding::ok("recovery", "this is a primary"));
    }
    findings.push(wal_level(server));
    findings.push(if server.fsync {
        Finding::ok("fsync", "on")
    } else {
        Finding::failed(
            "fsync",
            "fsync is off on this server: an event may be in Kafka whose row a crash has undone, and \
             the slot may then pass over others",
            "alter system set fsync = on; select pg_reload_conf()",
        )
    });
    findings.push(if server.encoding == "SQL_ASCII" {
        Finding::warning(
            "server_encoding",
            "this database is SQL_ASCII: its bytes pass as they are, whatever they mean",
            "see to it that writers store UTF-8, or move to a database with an encoding",
        )
    } else {
        Finding::ok("server_encoding", server.encoding.clone())
    });
    findings
}

fn version(server: &Server) -> Finding {
    let major = server.version_num / 10_000;
    let subject = "server version";
    if major < VERSIONS.0 {
        return Finding::failed(
            subject,
            format!(
                "this server is Postgres {major}; walrelay needs {} or newer",
                VERSIONS.0
            ),
            format!("upgrade the server to Postgres {} or newer", VERSIONS.0),
        );
    }
    if major > VERSIONS.1 {
        return Finding::warning(
            subject,
            format!(
                "this server is Postgres {major}, newer than the {} to {} that walrelay was tried on",
                VERSIONS.0, VERSIONS.1
            ),
            "look for a newer walrelay",
        );
    }
    let found = format!("Postgres {major}.{}", server.version_num % 10_000);
    Finding::ok(subject, found)
}

fn wal_level(server: &Server) -> Finding {
    if server.wal_level == "logical" {
        return Finding::ok("wal_level", "logical");
    }
    Finding::failed(
        "wal_level",
        format!(
            "wal_level is {}; logical decoding requires wal_level >= logical (55000)",
            server.wal_level
        ),
        "alter system set wal_level = 'logical', and restart the server (RDS, Aurora: \
         rds.logical_replication = 1; Cloud SQL, AlloyDB: the flag \
         cloudsql.logical_decoding / alloydb.logical_decoding = on; Azure: the server \
         parameter wal_level)",
    )
}

#[must_use]
pub fn role_finding(role: &Role) -> Finding {
    if role.may_replicate {
        return Finding::ok(
            "REPLICATION",
            format!("role {} may replicate", quote_ident(&role.name)),
        );
    }
    Finding::failed(
        "REPLICATION",
        format!(
            "role {} lacks the attribute REPLICATION (42501: must be superuser or replication role \
             to start walsender)",
            quote_ident(&role.name)
        ),
        replication_remedy(&role.name),
    )
}

#[must_use]
pub fn replication_remedy(role: &str) -> String {
    format!(
        "alter role {0} replication (Amazon RDS: grant rds_replication to {0})",
        quote_ident(role)
    )
}

/// Slots and walsenders that are left. A slot that is there needs no other.
#[must_use]
pub fn room(seen: &Seen, source: &Source) -> Vec<Finding> {
    let settings = match &seen.settings {
        Ok(settings) => settings,
        Err(error) => {
            return vec![Finding::unknown("max_replication_slots", error.to_string())];
        }
    };
    let slots = match &seen.slots {
        Ok(slots) => slots_left(slots, settings, &source.slot),
        Err(error) => Finding::unknown("max_replication_slots", error.to_string()),
    };
    let senders = match &seen.senders {
        Ok(senders) => senders_left(*senders, settings),
        Err(error) => Finding::unknown("max_wal_senders", error.to_string()),
    };
    vec![slots, senders]
}

fn slots_left(slots: &[SlotLine], settings: &Settings, ours: &str) -> Finding {
    let subject = "max_replication_slots";
    let max = settings.number(subject).unwrap_or(i64::MAX);
    let used = i64::try_from(slots.len()).unwrap_or(i64::MAX);
    if used < max || slots.iter().any(|slot| slot.name == ours) {
        return Finding::ok(subject, format!("{used} of {max} in use"));
    }
    no_slot_left(&idle_slots(slots), max)
}

/// Slots that nobody reads, the one that keeps most first, with what it keeps.
#[must_use]
pub fn idle_slots(slots: &[SlotLine]) -> Vec<(String, String)> {
    let mut idle: Vec<&SlotLine> = slots
        .iter()
        .filter(|slot| slot.state.active_pid.is_none())
        .collect();
    idle.sort_by_key(|slot| std::cmp::Reverse(slot.retained_bytes));
    let retained = |slot: &SlotLine| slot.retained_bytes.map_or("nothing".to_owned(), size);
    idle.into_iter()
        .map(|slot| (slot.name.clone(), retained(slot)))
        .collect()
}

#[must_use]
pub fn no_slot_left(idle: &[(String, String)], max: i64) -> Finding {
    let candidates = if idle.is_empty() {
        "all of them are in use".to_owned()
    } else {
        let list: Vec<String> = idle
            .iter()
            .map(|(name, retained)| format!("{name} (retains {retained})"))
            .collect();
        format!("not in use: {}", list.join(", "))
    };
    Finding::failed(
        "max_replication_slots",
        format!("all {max} replication slots are in use (53400); {candidates}"),
        "drop one that nobody needs with select pg_drop_replication_slot('…'), or raise \
         max_replication_slots and restart the server",
    )
}

fn senders_left(senders: Senders, settings: &Settings) -> Finding {
    let subject = "max_wal_senders";
    let max = settings.number(subject).unwrap_or(i64::MAX);
    if max == 0 {
        return no_wal_senders();
    }
    let found = format!("{} of {max} in use", senders.used);
    if senders.used < max {
        return Finding::ok(subject, found);
    }
    Finding::warning(
        subject,
        format!("{found}: whoever comes next waits"),
        "raise max_wal_senders and restart the server",
    )
}

#[must_use]
pub fn no_wal_senders() -> Finding {
    Finding::failed(
        "max_wal_senders",
        "max_wal_senders is 0: nothing can be streamed",
        "alter system set max_wal_senders = 10, and restart the server",
    )
}

/// What a commit is worth on this server.
#[must_use]
pub fn durability(seen: &Seen) -> Vec<Finding> {
    let mut findings = Vec::new();
    match &seen.settings {
        Err(error) => findings.push(Finding::unknown("full_page_writes", error.to_string())),
        Ok(settings) if settings.value("full_page_writes") == "off" => {
            findings.push(Finding::warning(
                "full_page_writes",
                "full_page_writes is off: a crash in the middle of a write can ruin pages, the \
                 outbox's among them",
                "alter system set full_page_writes = on; select pg_reload_conf() (unless the file \
                 system writes pages whole)",
            ));
        }
        Ok(_) => findings.push(Finding::ok("full_page_writes", "on")),
    }
    findings.push(synchronous_commit(&seen.settings, &seen.commits_off));
    findings
}

fn synchronous_commit(settings: &Answer<Settings>, off: &Answer<Vec<String>>) -> Finding {
    let subject = "synchronous_commit";
    let (settings, off) = match (settings, off) {
        (Ok(settings), Ok(off)) => (settings, off),
        (Err(error), _) | (_, Err(error)) => return Finding::unknown(subject, error.to_string()),
    };
    let mut whose = off.clone();
    if whose.is_empty() && settings.value(subject) == "off" {
        whose.push("the server".to_owned());
    }
    if whose.is_empty() {
        return Finding::ok(subject, "off for no role and no database here");
    }
    Finding::warning(
        subject,
        format!(
            "synchronous_commit is off for {}: a crash takes back commits that writers were told of, \
             and their events with them; others arrive up to 0.6 s late",
            whose.join(", ")
        ),
        "switch it on for those who write the outbox: alter role … (or: alter database …, alter \
         system) set synchronous_commit = on",
    )
}

/// What may take the WAL from under the slot, or fill the disk with it.
#[must_use]
pub fn wal_keeping(seen: &Seen, source: &Source) -> Vec<Finding> {
    let mut findings = match &seen.settings {
        Ok(settings) => {
            let retained = seen.slot(&source.slot).and_then(|s| s.retained_bytes);
            let mut findings = vec![keep_size(settings, retained)];
            findings.extend(idle_timeout(settings));
            findings
        }
        Err(error) => vec![Finding::unknown(
            "max_slot_wal_keep_size",
            error.to_string(),
        )],
    };
    findings.push(long_transactions(&seen.transactions, &seen.session));
    findings
}

fn keep_size(settings: &Settings, retained: Option<i64>) -> Finding {
    let subject = "max_slot_wal_keep_size";
    let retains = retained.map_or(String::new(), |bytes| {
        format!(" (the slot retains {})", size(bytes))
    });
    if settings.value(subject) != "-1" {
        return Finding::ok(subject, format!("{}{retains}", settings.shown(subject)));
    }
    Finding::warning(
        subject,
        format!(
            "max_slot_wal_keep_size is -1: while the relay is down or Kafka is away, the slot keeps \
             all WAL until the disk is full, and then the server stops{retains}"
        ),
        "alter system set max_slot_wal_keep_size = '…' (what the disk can spare: a slot that falls \
         further behind is given up, and the server lives); select pg_reload_conf()",
    )
}

fn idle_timeout(settings: &Settings) -> Option<Finding> {
    let subject = "idle_replication_slot_timeout";
    match settings.value(subject) {
        "" => None,
        "0" => Some(Finding::ok(subject, "off")),
        _ => Some(Finding::warning(
            subject,
            format!(
                "idle_replication_slot_timeout is {}: a relay that is down for longer loses its slot",
                settings.shown(subject)
            ),
            "alter system set idle_replication_slot_timeout = 0; select pg_reload_conf(); or make it \
             longer than any time that the relay may be down",
        )),
    }
}

/// A transaction that is open for longer is worth a word before there is any trouble.
const LONG_TRANSACTION: Duration = Duration::from_secs(600);

fn long_transactions(old: &Answer<Vec<OldTransaction>>, session: &Answer<Session>) -> Finding {
    let subject = "long transactions";
    let old = match old {
        Ok(old) => old,
        Err(error) => return Finding::unknown(subject, error.to_string()),
    };
    let mut long = old.iter().filter(|t| t.age > LONG_TRANSACTION);
    let Some(oldest) = long.clone().find(|t| t.has_xid).or_else(|| long.next()) else {
        let sees_others = session.as_ref().is_ok_and(|s| s.sees_others);
        return if sees_others {
            Finding::ok(subject, "none is older than 10 minutes")
        } else {
            Finding::unknown(
                subject,
                "sessions of other roles do not show (grant pg_read_all_stats shows them); no \
                 prepared transaction is older than 10 minutes",
            )
        };
    };
    let held = if oldest.has_xid {
        "the slot's restart_lsn, and with it WAL, waits for it"
    } else {
        "vacuum waits for it"
    };
    let remedy = match (&oldest.gid, oldest.pid) {
        (Some(gid), _) => format!(
            "commit prepared '{0}' or rollback prepared '{0}' (in its database), once you know \
             which it should be",
            gid.replace('\'', "''")
        ),
        (None, Some(pid)) => {
            format!("let it end, or end it: select pg_terminate_backend({pid})")
        }
        (None, None) => "look in pg_stat_activity".to_owned(),
    };
    Finding::warning(subject, format!("{}: {held}", described(oldest)), remedy)
}

/// A transaction for a person: who, where, since when.
#[must_use]
pub fn described(old: &OldTransaction) -> String {
    let mut text = match (&old.gid, old.pid) {
        (Some(gid), _) => format!("prepared transaction '{gid}'"),
        (None, Some(pid)) => format!("the transaction of pid {pid}"),
        (None, None) => "a transaction".to_owned(),
    };
    if let Some(user) = &old.user {
        text.push_str(&format!(", user {}", quote_ident(user)));
    }
    let name = old.application_name.as_deref().unwrap_or_default();
    if !name.is_empty() {
        text.push_str(&format!(", application_name \"{name}\""));
    }
    if let Some(database) = &old.database {
        text.push_str(&format!(", database {}", quote_ident(database)));
    }
    text.push_str(&format!(" is open for {}", span(old.age)));
    text
}

/// Whether the slot outlives the loss of this server. Nothing to say where nothing follows it.
#[must_use]
pub fn failover(seen: &Seen, source: &Source) -> Vec<Finding> {
    let subject = "failover";
    let slots = match &seen.slots {
        Ok(slots) => slots,
        Err(error) => return vec![Finding::unknown(subject, error.to_string())],
    };
    let has_physical_slot = slots.iter().any(|s| s.state.slot_type == "physical");
    let standbys = seen.senders.as_ref().map_or(0, |s| s.physical);
    if !has_physical_slot && standbys == 0 {
        return vec![Finding::ok(subject, "no standby follows this server")];
    }
    if seen.server.version_num < 170_000 {
        return vec![Finding::warning(
            subject,
            "a standby follows this server, and on Postgres 16 and older a slot does not survive a \
             failover: what it had not sent is then only in the table",
            "plan for it: after a failover make the slot anew (`walrelay init` says how), or \
             upgrade to Postgres 17, where a slot can be kept on the standby",
        )];
    }
    let ours = seen.slot(&source.slot);
    let mut findings = Vec::new();
    if ours.is_some_and(|slot| slot.state.failover == Some(false)) {
        findings.push(Finding::warning(
            subject,
            format!(
                "slot {} is no failover slot: after a failover it is gone",
                source.slot
            ),
            format!(
                "over a replication connection, while the relay is down: ALTER_REPLICATION_SLOT {} \
                 (FAILOVER true); and on the standby: sync_replication_slots = on",
                source.slot
            ),
        ));
    }
    let named = match &seen.settings {
        Ok(settings) => settings.value("synchronized_standby_slots").to_owned(),
        Err(error) => return vec![Finding::unknown(subject, error.to_string())],
    };
    if named.is_empty() {
        findings.push(Finding::warning(
            "synchronized_standby_slots",
            "synchronized_standby_slots is empty: Kafka may have events that a promoted standby \
             never got, and the standby's copy of the slot may be behind",
            "alter system set synchronized_standby_slots = '…' (the physical slots of the standbys \
             that may be promoted); select pg_reload_conf()",
        ));
    }
    if findings.is_empty() {
        findings.push(Finding::ok(
            subject,
            format!("a failover slot; it waits for {named}"),
        ));
    }
    findings
}

/// Slots that `synchronized_standby_slots` names and nobody follows: the server holds a failover
/// slot's stream back for each. `None`: there is none, or it is not known.
#[must_use]
pub fn dead_standbys(seen: &Seen, source: &Source) -> Option<String> {
    let is_failover = seen.slot(&source.slot)?.state.failover == Some(true);
    let slots = seen.slots.as_ref().ok().filter(|_| is_failover)?;
    let named = seen.settings.as_ref().ok()?;
    let named = named.value("synchronized_standby_slots").split(',');
    let dead: Vec<String> = named
        .map(|name| name.trim().trim_matches('"'))
        .filter(|name| !name.is_empty())
        .filter_map(|name| match slots.iter().find(|s| s.name == name) {
            None => Some(format!("{name} (there is no such slot)")),
            Some(slot) if slot.state.active_pid.is_none() => {
                Some(format!("{name} (nobody follows it)"))
            }
            Some(_) => None,
        })
        .collect();
    (!dead.is_empty()).then(|| dead.join(", "))
}

/// Bytes for a person.
#[must_use]
pub fn size(bytes: i64) -> String {
    const UNITS: [&str; 5] = ["kB", "MB", "GB", "TB", "PB"];
    if bytes < 10 * 1024 {
        return format!("{bytes} bytes");
    }
    let mut amount = bytes / 1024;
    let mut unit = 0;
    while amount >= 10 * 1024 && unit + 1 < UNITS.len() {
        amount /= 1024;
        unit += 1;
    }
    format!("{amount} {}", UNITS[unit])
}

/// A span for a person: two units at most.
#[must_use]
pub fn span(age: Duration) -> String {
    let seconds = age.as_secs();
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3_600 => format!("{} min {} s", seconds / 60, seconds % 60),
        3_600..86_400 => format!("{} h {} min", seconds / 3_600, seconds % 3_600 / 60),
        _ => format!("{} d {} h", seconds / 86_400, seconds % 86_400 / 3_600),
    }
}

/// Of these, what is in the way.
#[must_use]
pub fn only_failed(findings: Vec<Finding>) -> Vec<Finding> {
    let mut findings = findings;
    findings.retain(|finding| finding.state == State::Failed);
    findings
}

#[cfg(test)]
mod tests;
