//! What tests of parked events share: rows of every kind, and what stands in the dead-letter table.

use std::collections::HashSet;

use crate::check::Committed;
use crate::kafka::Rec;
use crate::postgres::Sql;
use crate::proc::eventually_says;
use crate::stage::{MINUTE, Stage};

/// The event of that number, as `poison::ins` numbers them.
pub fn id(n: usize) -> String {
    format!("00000000-0000-4000-8000-{n:012}")
}

/// A row; key, payload and headers in SQL.
pub fn put(sql: &Sql, n: usize, kind: &str, key: &str, payload: &str, headers: &str) {
    let done = sql.exec(
        &format!(
            "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload, headers)
             values ($1::text::uuid, $2, {key}, 'e', {payload}, {headers})"
        ),
        &[&id(n), &kind],
    );
    done.expect("a row");
}

/// A good row of type `t`.
pub fn good(sql: &Sql, committed: &mut Committed, n: usize, key: &str) {
    put(sql, n, "t", &format!("'{key}'"), "'{}'", "'{}'");
    committed.push(key, id(n));
}

/// A row of type `t` that can be no record.
pub fn malformed(sql: &Sql, n: usize, key: &str) {
    put(sql, n, "t", &format!("'{key}'"), "'{}'", "'[1]'");
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Letter {
    pub id: String,
    pub key: String,
    pub reason: String,
    pub message: String,
}

/// Dead letters of that status, as they stand in their keys' order.
pub fn letters(sql: &Sql, status: &str) -> Vec<Letter> {
    let rows = sql.rows(&format!(
        "select event_id, aggregate_id, reason, error_message from walrelay.dead_letter
         where status = '{status}' order by slot_generation, commit_lsn, ordinal"
    ));
    rows.into_iter()
        .map(|row| {
            let mut row = row.into_iter().map(Option::unwrap_or_default);
            let mut next = || row.next().expect("four columns");
            Letter {
                id: next(),
                key: next(),
                reason: next(),
                message: next(),
            }
        })
        .collect()
}

pub fn parked(sql: &Sql) -> Vec<Letter> {
    letters(sql, "parked")
}

/// The ids of what is parked, sorted.
pub fn parked_ids(sql: &Sql) -> Vec<String> {
    let mut ids: Vec<String> = parked(sql).into_iter().map(|letter| letter.id).collect();
    ids.sort();
    ids
}

pub fn count(sql: &Sql, status: &str) -> usize {
    let n = sql.one(&format!(
        "select count(*) from walrelay.dead_letter where status = '{status}'"
    ));
    n.parse().expect("a number")
}

/// Waits until so many events are parked.
#[track_caller]
pub fn wait_parked(stage: &Stage<'_>, sql: &Sql, n: usize) {
    wait_until(stage, sql, "parked", n);
}

/// Waits until so many letters have this status.
#[track_caller]
pub fn wait_until(stage: &Stage<'_>, sql: &Sql, status: &str, n: usize) {
    let what = || {
        let now = count(sql, status);
        format!("{now} events are {status}, not {n}")
    };
    eventually_says(2 * MINUTE, what, || {
        stage.expect_relay();
        (count(sql, status) == n).then_some(())
    });
}

/// Asks for a retry, and waits until nothing is parked.
#[track_caller]
pub fn retry_all(stage: &Stage<'_>, sql: &Sql) {
    stage.dead_letters(&["retry", "--all"]).expect_code(0);
    wait_until(stage, sql, "parked", 0);
}

/// How often each event came beyond the first time, added up, of these events alone.
pub fn repeats(records: &[Rec], of: &HashSet<String>) -> usize {
    let ids: Vec<String> = records.iter().map(Rec::event_id).collect();
    let ours = ids.iter().filter(|id| of.contains(*id));
    let distinct: HashSet<&String> = ours.clone().collect();
    ours.count() - distinct.len()
}
