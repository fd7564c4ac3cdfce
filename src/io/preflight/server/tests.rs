use super::*;
use crate::io::catalog::Role;
use crate::io::preflight::look::{Registry, Rights};
use crate::lsn::PgTimestamp;

fn old(gid: Option<&str>, minutes: u64, has_xid: bool) -> OldTransaction {
    OldTransaction {
        gid: gid.map(str::to_owned),
        pid: gid.is_none().then_some(42),
        user: Some("app".into()),
        application_name: Some("report".into()),
        database: Some("shop".into()),
        age: Duration::from_secs(minutes * 60),
        has_xid,
    }
}

fn session(sees_others: bool) -> Answer<Session> {
    Ok(Session {
        server: "Unix socket port 5432".into(),
        tls: None,
        client_addr: None,
        sees_others,
    })
}

#[test]
fn of_long_transactions_the_one_that_holds_wal_is_named() {
    let read_only = old(None, 90, false);
    let prepared = old(Some("it's"), 30, true);
    let found = long_transactions(&Ok(vec![read_only.clone(), prepared]), &session(true));
    assert_eq!(found.state, State::Warning);
    assert!(
        found.found.contains("prepared transaction 'it's'"),
        "{found:?}"
    );
    assert!(found.found.contains("30 min 0 s"), "{found:?}");
    let remedy = found.remedy.expect("a warning has one");
    assert!(remedy.contains("rollback prepared 'it''s'"), "{remedy}");
    let found = long_transactions(&Ok(vec![read_only]), &session(true));
    assert!(found.found.contains("vacuum"), "{found:?}");
    assert!(
        found
            .remedy
            .expect("one")
            .contains("pg_terminate_backend(42)")
    );
}

#[test]
fn what_a_role_cannot_see_is_unknown_and_what_is_young_is_fine() {
    let young = || Ok(vec![old(None, 5, true)]);
    assert_eq!(long_transactions(&young(), &session(true)).state, State::Ok);
    assert_eq!(
        long_transactions(&young(), &session(false)).state,
        State::Unknown
    );
}

fn line(name: &str, retained: Option<i64>, active_pid: Option<i32>) -> SlotLine {
    SlotLine {
        name: name.into(),
        state: crate::io::registry::SlotState {
            plugin: Some("pgoutput".into()),
            slot_type: "logical".into(),
            database: Some("d".into()),
            temporary: false,
            two_phase: false,
            active_pid,
            confirmed_flush: None,
            restart_lsn: None,
            wal_status: None,
            failover: None,
            synced: None,
        },
        holder: None,
        retained_bytes: retained,
        lag_bytes: None,
        safe_wal_size: None,
    }
}

#[test]
fn a_full_server_fails_unless_our_slot_is_there() {
    let settings = Settings::of(&[("max_replication_slots", "2")]);
    let slots = [line("a", Some(1), Some(7)), line("b", Some(5 << 20), None)];
    let found = slots_left(&slots, &settings, "walrelay");
    assert_eq!(found.state, State::Failed);
    assert!(
        found.found.contains("not in use: b (retains 5120 kB)"),
        "{found:?}"
    );
    assert_eq!(slots_left(&slots, &settings, "a").state, State::Ok);
    assert_eq!(
        slots_left(&slots[..1], &settings, "walrelay").state,
        State::Ok
    );
}

fn source() -> Source {
    Source::sample("walrelay")
}

/// A server of that version with our slot and a standby's.
fn followed(version_num: i32, failover: Option<bool>, named: &str) -> Seen {
    let mut ours = line("walrelay", Some(0), None);
    ours.state.failover = failover;
    let mut physical = line("standby", Some(0), Some(8));
    physical.state.slot_type = "physical".into();
    Seen {
        server: Server {
            version_num,
            encoding: "UTF8".into(),
            in_recovery: false,
            wal_level: "logical".into(),
            fsync: true,
            system_identifier: None,
            timeline: None,
            started: PgTimestamp(0),
        },
        session: session(true),
        settings: Ok(Settings::of(&[("synchronized_standby_slots", named)])),
        role: Ok(Role {
            name: "u".into(),
            may_replicate: true,
            database: "d".into(),
        }),
        table: Ok(None),
        rights: Ok(Rights::default()),
        registry: Ok(Registry::default()),
        publication: Ok(None),
        slots: Ok(vec![ours, physical]),
        senders: Ok(Senders::default()),
        instances: Ok(Vec::new()),
        commits_off: Ok(Vec::new()),
        transactions: Ok(Vec::new()),
    }
}

#[test]
fn what_a_failover_costs_is_said_where_a_standby_follows() {
    let subjects = |seen: &Seen| -> Vec<(State, String)> {
        let findings = failover(seen, &source());
        findings.into_iter().map(|f| (f.state, f.subject)).collect()
    };
    let warning = |subject: &str| (State::Warning, subject.to_owned());
    assert_eq!(
        subjects(&followed(160_004, None, "")),
        [warning("failover")]
    );
    assert_eq!(
        subjects(&followed(170_002, Some(false), "")),
        [warning("failover"), warning("synchronized_standby_slots")]
    );
    let kept = followed(180_000, Some(true), "standby");
    assert_eq!(subjects(&kept), [(State::Ok, "failover".to_owned())]);
    let mut alone = followed(160_004, None, "");
    alone.slots = Ok(vec![line("walrelay", Some(0), None)]);
    assert_eq!(subjects(&alone), [(State::Ok, "failover".to_owned())]);
}

#[test]
fn a_question_without_an_answer_is_no_end_but_a_lost_connection_is() {
    let mut seen = followed(160_004, None, "");
    let said = |sqlstate: &str| crate::error::DbError::Server {
        sqlstate: sqlstate.into(),
        message: "no".into(),
        detail: None,
        hint: None,
    };
    for sqlstate in ["42501", "57014", "55P03"] {
        seen.transactions = Err(said(sqlstate));
        assert_eq!(seen.broken(), None, "{sqlstate}");
        assert_eq!(seen.unanswered(), None, "{sqlstate}");
    }
    seen.publication = Err(said("42501"));
    assert_eq!(seen.unanswered(), Some(&said("42501")));
    seen.slots = Err(said("57P01"));
    assert_eq!(seen.broken(), Some(&said("57P01")));
}

#[test]
fn every_server_setting_in_the_way_is_named_at_once() {
    let server = Server {
        version_num: 140_010,
        encoding: "SQL_ASCII".into(),
        in_recovery: false,
        wal_level: "replica".into(),
        fsync: false,
        system_identifier: None,
        timeline: None,
        started: PgTimestamp(0),
    };
    let findings = server_findings(&server);
    let of = |state| findings.iter().filter(|f| f.state == state).count();
    assert_eq!(of(State::Failed), 3, "{findings:#?}");
    assert_eq!(of(State::Warning), 1);
}

#[test]
fn durability_that_is_switched_off_for_somebody_is_named() {
    let on = Ok(Settings::of(&[("synchronous_commit", "on")]));
    assert_eq!(synchronous_commit(&on, &Ok(Vec::new())).state, State::Ok);
    let found = synchronous_commit(&on, &Ok(vec!["role app".into()]));
    assert!(found.found.contains("off for role app"), "{found:?}");
    let off = Ok(Settings::of(&[("synchronous_commit", "off")]));
    let found = synchronous_commit(&off, &Ok(Vec::new()));
    assert!(found.found.contains("off for the server"), "{found:?}");
}

#[test]
fn sizes_and_spans_are_for_people() {
    assert_eq!(size(900), "900 bytes");
    assert_eq!(size(20 << 10), "20 kB");
    assert_eq!(size(3 << 40), "3072 GB");
    assert_eq!(span(Duration::from_secs(59)), "59 s");
    assert_eq!(span(Duration::from_secs(3_661)), "1 h 1 min");
    assert_eq!(span(Duration::from_secs(200_000)), "2 d 7 h");
}
