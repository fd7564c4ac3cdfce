//! Parking: what is returned from here is on the server's disk.

use tokio_postgres::Client;
use tokio_postgres::types::PgLsn;

use super::{ENCODING, Timestamptz};
use crate::dead_letter::DeadLetter;
use crate::error::DbError;
use crate::io::side::db_error;

/// What one statement takes: its parameters are a second copy, here and on the server.
const STATEMENT_LETTERS: usize = 5_000;
const STATEMENT_BYTES: usize = 16 << 20;

/// Characters that are kept of a message.
const MESSAGE_CHARS: usize = 2_000;

/// Stores dead letters, in their order: what an interruption leaves is a beginning of them. An event
/// that has a row already, parked or settled, keeps that one. Another event of the same id is stored
/// as well, its position behind the id.
///
/// # Errors
/// 42501 where the role may not insert, the 53 class where the disk is full, or the conversation's:
/// then nothing may be taken as parked.
pub async fn park(client: &Client, table_oid: u32, letters: &[DeadLetter]) -> Result<(), DbError> {
    let statement = client.prepare(&insert()).await.map_err(|e| db_error(&e))?;
    let mut rest = letters;
    while !rest.is_empty() {
        let (now, later) = rest.split_at(portion(rest));
        rest = later;
        let c = Columns::of(now);
        client
            .execute(
                &statement,
                &[
                    &table_oid,
                    &c.event_ids,
                    &c.aggregate_types,
                    &c.aggregate_ids,
                    &c.generations,
                    &c.commit_lsns,
                    &c.ordinals,
                    &c.xids,
                    &c.commit_times,
                    &c.topics,
                    &c.partitions,
                    &c.keys,
                    &c.values,
                    &c.timestamps,
                    &c.reasons,
                    &c.codes,
                    &c.messages,
                    &c.retried,
                    &c.header_letters,
                    &c.header_names,
                    &c.header_values,
                ],
            )
            .await
            .map_err(|e| db_error(&e))?;
    }
    Ok(())
}

/// How many letters of the head one statement takes: one at least.
fn portion(letters: &[DeadLetter]) -> usize {
    let mut bytes = 0;
    let fit = letters.iter().take(STATEMENT_LETTERS).take_while(|letter| {
        bytes += letter.record.footprint();
        bytes <= STATEMENT_BYTES
    });
    fit.count().max(1)
}

/// Another event has the id of this one: in the table (in this generation at another position, or
/// written by another transaction), or among those that are written with it.
const SAME_ID: &str = "exists (select from walrelay.dead_letter d where d.table_oid = $1 \
    and case when pg_catalog.octet_length(d.event_id) <= 2000 then d.event_id \
      else pg_catalog.md5(d.event_id) end \
    = case when pg_catalog.octet_length(l.id) <= 2000 then l.id else pg_catalog.md5(l.id) end \
    and (d.xid is distinct from l.xid or d.slot_generation = l.generation \
      and (d.commit_lsn, d.ordinal) <> (l.commit_lsn, l.ordinal))) \
    or l.n <> l.first";

fn insert() -> String {
    format!(
        "insert into walrelay.dead_letter (table_oid, event_id, aggregate_type, aggregate_id, \
           slot_generation, commit_lsn, ordinal, xid, commit_time, topic, partition, key, value, \
           timestamp_ms, reason, error_code, error_message, retry_requested_at, \
           header_names, header_values) \
         select $1, case when {SAME_ID} then l.id || pg_catalog.format(' (%s %s#%s)', \
             l.generation, l.commit_lsn, l.ordinal) else l.id end, \
           pg_catalog.convert_from(l.aggregate_type, {ENCODING}), \
           pg_catalog.convert_from(l.aggregate_id, {ENCODING}), \
           l.generation, l.commit_lsn, l.ordinal, l.xid, l.commit_time, l.topic, l.partition, \
           l.key, l.value, l.timestamp_ms, l.reason, l.code, l.message, \
           case when l.retried then pg_catalog.now() end, \
           coalesce(h.names, '{{}}'), coalesce(h.contents, '{{}}') \
         from (select l.*, pg_catalog.convert_from(l.event_id, {ENCODING}) as id, \
           pg_catalog.first_value(l.n) over (partition by l.event_id order by l.n) as first \
         from rows from (pg_catalog.unnest($2::bytea[]), pg_catalog.unnest($3::bytea[]), \
           pg_catalog.unnest($4::bytea[]), pg_catalog.unnest($5::bigint[]), \
           pg_catalog.unnest($6::pg_lsn[]), pg_catalog.unnest($7::bigint[]), \
           pg_catalog.unnest($8::bigint[]), pg_catalog.unnest($9::timestamptz[]), \
           pg_catalog.unnest($10::text[]), pg_catalog.unnest($11::integer[]), \
           pg_catalog.unnest($12::bytea[]), pg_catalog.unnest($13::bytea[]), \
           pg_catalog.unnest($14::bigint[]), pg_catalog.unnest($15::text[]), \
           pg_catalog.unnest($16::integer[]), pg_catalog.unnest($17::text[]), \
           pg_catalog.unnest($18::boolean[])) with ordinality \
           as l (event_id, aggregate_type, aggregate_id, generation, commit_lsn, ordinal, xid, \
             commit_time, topic, partition, key, value, timestamp_ms, reason, code, message, \
             retried, n)) l \
         left join (select h.n, pg_catalog.array_agg(h.name order by h.at) as names, \
             pg_catalog.array_agg(h.content order by h.at) as contents \
             from rows from (pg_catalog.unnest($19::bigint[]), pg_catalog.unnest($20::text[]), \
               pg_catalog.unnest($21::bytea[])) with ordinality as h (n, name, content, at) \
             group by h.n) h on h.n = l.n \
         order by l.n on conflict do nothing"
    )
}

/// The letters by column, as the statement takes them; nothing large is copied.
#[derive(Default)]
struct Columns<'a> {
    event_ids: Vec<&'a [u8]>,
    aggregate_types: Vec<Option<&'a [u8]>>,
    aggregate_ids: Vec<Option<&'a [u8]>>,
    generations: Vec<i64>,
    commit_lsns: Vec<PgLsn>,
    ordinals: Vec<i64>,
    xids: Vec<i64>,
    commit_times: Vec<Timestamptz>,
    topics: Vec<String>,
    partitions: Vec<Option<i32>>,
    keys: Vec<&'a [u8]>,
    values: Vec<Option<&'a [u8]>>,
    timestamps: Vec<Option<i64>>,
    reasons: Vec<&'static str>,
    codes: Vec<Option<i32>>,
    messages: Vec<String>,
    retried: Vec<bool>,
    /// Whose header it is: the letter's number, from 1.
    header_letters: Vec<i64>,
    header_names: Vec<&'a str>,
    header_values: Vec<Option<&'a [u8]>>,
}

impl<'a> Columns<'a> {
    fn of(letters: &'a [DeadLetter]) -> Self {
        let mut columns = Columns::default();
        for (n, letter) in (1..).zip(letters) {
            columns.push(n, letter);
        }
        columns
    }

    fn push(&mut self, n: i64, letter: &'a DeadLetter) {
        let record = &letter.record;
        let key = letter.key.as_ref();
        let aggregate_type = match key {
            Some(key) => key.aggregate_type.as_deref(),
            None => letter.aggregate_type.as_deref(),
        };
        self.event_ids.push(&letter.event_id);
        self.aggregate_types.push(aggregate_type);
        self.aggregate_ids.push(key.map(|key| &*key.aggregate_id));
        self.generations.push(letter.position.generation);
        self.commit_lsns
            .push(PgLsn::from(letter.position.commit_lsn.0));
        self.ordinals
            .push(i64::try_from(letter.position.ordinal).unwrap_or(i64::MAX));
        self.xids.push(i64::from(letter.xid.0));
        self.commit_times.push(Timestamptz(letter.commit_time));
        // A text cannot have it, and no topic may.
        self.topics.push(record.topic.replace('\0', "\u{fffd}"));
        self.partitions
            .push((record.partition >= 0).then_some(record.partition));
        self.keys.push(&record.key);
        self.values.push(record.value.as_deref());
        self.timestamps.push(record.timestamp_ms);
        self.reasons.push(letter.why.reason.as_str());
        self.codes.push(letter.why.code.map(|code| code.0));
        self.messages.push(plain(&letter.why.message));
        self.retried.push(letter.is_retried);
        for header in &record.headers {
            self.header_letters.push(n);
            self.header_names.push(&header.name);
            self.header_values.push(header.value.as_deref());
        }
    }
}

/// A message that every encoding has, and that does nothing to a terminal: printable ASCII, the rest
/// escaped. It must not be the reason that an event cannot be parked.
pub(super) fn plain(message: &str) -> String {
    let mut out = String::with_capacity(message.len());
    for c in message.chars().take(MESSAGE_CHARS) {
        if c == ' ' || c.is_ascii_graphic() {
            out.push(c);
        } else {
            out.extend(c.escape_default());
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_bounded_and_of_printable_ascii() {
        assert_eq!(
            plain("a\"b' \0\u{1b}[31mé\n"),
            "a\"b' \\u{0}\\u{1b}[31m\\u{e9}\\n"
        );
        assert_eq!(plain(&"x".repeat(1_000_000)).len(), MESSAGE_CHARS);
    }
}
