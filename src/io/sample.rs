//! What is asked every few seconds while the relay runs: how far behind the slot is and who holds
//! it back, whether the publication still covers the table, who leads. Two statements, sent
//! together.
//!
//! # Invariants
//! - It waits for no lock of anybody's: the leader proves its lead on the same session. So nothing
//!   here opens a table of the user's (`pg_publication_tables` and `pg_get_expr` do).
//! - Any role may ask; what it may not see is unknown, not absent.

use std::time::Duration;

use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, Row};

use super::preflight::Swap;
use super::registry::{get, lock_class_oid, lsn};
use super::side::db_error;
use super::sql::{quote_ident, quote_table, show_ident, show_table};
use crate::config::{Source, TableName};
use crate::error::DbError;
use crate::lsn::Lsn;

/// One answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    pub wal_end: Lsn,
    pub slot: Option<Slot>,
    /// What is wrong with the publication, and what to do.
    pub publication: Option<(String, String)>,
    /// Who has the table's lock, where it is not this session.
    pub leader: Option<String>,
    /// The standby slots that the server holds the stream back for, and that nobody follows.
    pub dead_standbys: Option<String>,
    pub oldest_transaction: Holding,
    pub prepared_transaction: Holding,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slot {
    pub active_pid: Option<i32>,
    pub confirmed_flush: Option<Lsn>,
    pub restart: Option<Lsn>,
    pub wal_status: Option<String>,
    pub safe_wal_size: Option<i64>,
    /// `None` where `max_slot_wal_keep_size` sets no limit.
    pub max_keep_bytes: Option<u64>,
}

/// A transaction that a slot's `restart_lsn` may have to wait for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Holding {
    None,
    /// There is one, and this role may not see since when.
    Hidden,
    By {
        who: String,
        age: Duration,
    },
}

const SAMPLE: &str = "\
    select w.lsn, s.slot_name is not null, s.active_pid, s.confirmed_flush_lsn, s.restart_lsn, \
      s.wal_status, s.safe_wal_size, \
      pg_catalog.pg_size_bytes(pg_catalog.current_setting('max_slot_wal_keep_size')), \
      x.pid, x.usename::text, x.application_name, x.datname::text, x.age, \
      p.gid, p.database::text, p.age, l.pid, l.application_name, l.addr, l.since, \
      case when k.wait_event = 'WaitForStandbyConfirmation' then d.names end \
    from (select case when pg_catalog.pg_is_in_recovery() \
        then pg_catalog.pg_last_wal_replay_lsn() else pg_catalog.pg_current_wal_lsn() end as lsn) w \
    left join pg_catalog.pg_replication_slots s on s.slot_name = $1::text \
    left join lateral (select a.pid, a.usename, a.application_name, a.datname, \
        extract(epoch from pg_catalog.clock_timestamp() - a.xact_start)::float8 as age \
      from pg_catalog.pg_stat_activity a \
      where a.backend_xid is not null and a.pid <> pg_catalog.pg_backend_pid() \
      order by pg_catalog.age(a.backend_xid) desc limit 1) x on true \
    left join lateral (select gid, database, \
        extract(epoch from pg_catalog.clock_timestamp() - prepared)::float8 as age \
      from pg_catalog.pg_prepared_xacts order by prepared limit 1) p on true \
    left join lateral (select l.pid, a.application_name, pg_catalog.host(a.client_addr) as addr, \
        pg_catalog.to_char(a.backend_start at time zone 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS\"Z\"') as since \
      from pg_catalog.pg_locks l left join pg_catalog.pg_stat_activity a on a.pid = l.pid \
      where l.locktype = 'advisory' and l.classid = $2 and l.objsubid = 2 and l.granted \
      and l.objid = $3 and l.pid <> pg_catalog.pg_backend_pid() \
      and l.database = (select oid from pg_catalog.pg_database \
        where datname = pg_catalog.current_database()) limit 1) l on true \
    left join lateral (select a.wait_event from pg_catalog.pg_stat_activity a \
      where a.pid = s.active_pid) k on true \
    left join lateral (select pg_catalog.string_agg(n.name || case when q.slot_name is null \
          then ' (there is no such slot)' else coalesce(' (nobody has followed it since ' \
            || pg_catalog.left(pg_catalog.to_jsonb(q)->>'inactive_since', 19) || ')', \
            ' (nobody follows it)') end, ', ') as names \
      from (select pg_catalog.btrim(u, ' \"') as name from pg_catalog.unnest(pg_catalog.string_to_array( \
        pg_catalog.current_setting('synchronized_standby_slots', true), ',')) u) n \
      left join pg_catalog.pg_replication_slots q on q.slot_name = n.name \
      where n.name <> '' and q.active is not true) d on true";

const COVERAGE: &str = "\
    select t.oid, t.relkind::text, p.oid is not null, p.pubinsert, p.pubviaroot, \
      p.puballtables or exists (select from pg_catalog.pg_publication_namespace n \
        where n.pnpubid = p.oid and n.pnnspid = t.relnamespace), \
      r.oid is not null, r.prqual is not null, r.prattrs is not null, \
      (select pg_catalog.string_agg(pg_catalog.format('%I.%I', n.nspname, c.relname), ', ') \
        from pg_catalog.pg_publication_rel o \
        join pg_catalog.pg_class c on c.oid = o.prrelid \
        join pg_catalog.pg_namespace n on n.oid = c.relnamespace where o.prpubid = p.oid), \
      led.nspname::text, led.relname::text \
    from (select 1) one \
    left join (select c.oid, c.relkind, c.relnamespace from pg_catalog.pg_class c \
      join pg_catalog.pg_namespace n on n.oid = c.relnamespace \
      where n.nspname = $1::text and c.relname = $2::text and c.relkind in ('r', 'p')) t on true \
    left join (select c.oid, n.nspname, c.relname from pg_catalog.pg_class c \
      join pg_catalog.pg_namespace n on n.oid = c.relnamespace) led on led.oid = $4 \
    left join pg_catalog.pg_publication p on p.pubname = $3::text \
    left join pg_catalog.pg_publication_rel r on r.prpubid = p.oid and r.prrelid = t.oid";

/// Asks. `led_oid` is the oid of the table whose lock this session has, or waits for; 0 while it
/// is not known.
///
/// # Errors
/// Only the conversation's.
pub async fn take(client: &Client, source: &Source, led_oid: u32) -> Result<Sample, DbError> {
    let class = lock_class_oid();
    let names = &source.table;
    let about_slot: [&(dyn ToSql + Sync); 3] = [&source.slot, &class, &led_oid];
    let about_table: [&(dyn ToSql + Sync); 4] =
        [&names.schema, &names.name, &source.publication, &led_oid];
    let sample = client.query_one(SAMPLE, &about_slot);
    let coverage = client.query_one(COVERAGE, &about_table);
    let (sample, coverage) = tokio::join!(sample, coverage);
    let sample = sample.map_err(|e| db_error(&e))?;
    let coverage = coverage.map_err(|e| db_error(&e))?;
    Ok(Sample {
        wal_end: lsn(&sample, 0)?.unwrap_or_default(),
        slot: slot(&sample)?,
        publication: Coverage::read(&coverage)?.trouble(source, led_oid),
        leader: leader(&sample)?,
        dead_standbys: get(&sample, 20)?,
        oldest_transaction: oldest_transaction(&sample)?,
        prepared_transaction: prepared_transaction(&sample)?,
    })
}

fn slot(row: &Row) -> Result<Option<Slot>, DbError> {
    if !get::<bool>(row, 1)? {
        return Ok(None);
    }
    Ok(Some(Slot {
        active_pid: get(row, 2)?,
        confirmed_flush: lsn(row, 3)?,
        restart: lsn(row, 4)?,
        wal_status: get(row, 5)?,
        safe_wal_size: get(row, 6)?,
        // -1 is no limit.
        max_keep_bytes: u64::try_from(get::<i64>(row, 7)?).ok(),
    }))
}

fn oldest_transaction(row: &Row) -> Result<Holding, DbError> {
    let Some(pid) = get::<Option<i32>>(row, 8)? else {
        return Ok(Holding::None);
    };
    let Some(age) = get::<Option<f64>>(row, 12)? else {
        return Ok(Holding::Hidden);
    };
    let mut who = format!("the transaction of pid {pid}");
    for (label, column) in [("user", 9), ("application_name", 10), ("database", 11)] {
        if let Some(name) = get::<Option<String>>(row, column)?.filter(|n| !n.is_empty()) {
            who.push_str(&format!(", {label} \"{name}\""));
        }
    }
    Ok(Holding::By {
        who,
        age: duration(age),
    })
}

fn prepared_transaction(row: &Row) -> Result<Holding, DbError> {
    let Some(gid) = get::<Option<String>>(row, 13)? else {
        return Ok(Holding::None);
    };
    let database: Option<String> = get(row, 14)?;
    let age: Option<f64> = get(row, 15)?;
    Ok(Holding::By {
        who: format!(
            "prepared transaction '{gid}' in database \"{}\"",
            database.unwrap_or_default()
        ),
        age: duration(age.unwrap_or_default()),
    })
}

fn duration(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or_default()
}

fn leader(row: &Row) -> Result<Option<String>, DbError> {
    let Some(pid) = get::<Option<i32>>(row, 16)? else {
        return Ok(None);
    };
    let mut who = format!("pid {pid}");
    for (label, column) in [
        ("application_name", 17),
        ("client", 18),
        ("connected since", 19),
    ] {
        if let Some(name) = get::<Option<String>>(row, column)?.filter(|n| !n.is_empty()) {
            who.push_str(&format!(", {label} {name}"));
        }
    }
    Ok(Some(who))
}

/// What the publication has of the table that bears the configured name now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Coverage {
    table_oid: Option<u32>,
    is_partitioned: bool,
    exists: bool,
    publishes_insert: bool,
    via_partition_root: bool,
    covers_all: bool,
    covers_table: bool,
    row_filter: bool,
    column_list: bool,
    /// The tables that it names, for a person.
    published: Option<String>,
    /// What the table that is led is called now.
    led: Option<TableName>,
}

impl Coverage {
    fn read(row: &Row) -> Result<Coverage, DbError> {
        let flag = |column| Ok(get::<Option<bool>>(row, column)?.unwrap_or(false));
        Ok(Coverage {
            table_oid: get(row, 0)?,
            is_partitioned: get::<Option<String>>(row, 1)?.as_deref() == Some("p"),
            exists: flag(2)?,
            publishes_insert: flag(3)?,
            via_partition_root: flag(4)?,
            covers_all: flag(5)?,
            covers_table: flag(6)?,
            row_filter: flag(7)?,
            column_list: flag(8)?,
            published: get(row, 9)?,
            led: match (get(row, 10)?, get(row, 11)?) {
                (Some(schema), Some(name)) => Some(TableName { schema, name }),
                _ => None,
            },
        })
    }

    /// The name that this relay was given leads to another table than the one it relays, or to none.
    fn swapped(&self, source: &Source, led_oid: u32) -> (String, String) {
        let name = show_table(&source.table);
        let publication = show_ident(&source.publication);
        let swap = Swap {
            table: &source.table,
            table_oid: self.table_oid,
            old_oid: led_oid,
            old: self.led.as_ref(),
            slot: &source.slot,
            publication: &source.publication,
            is_published: self.covers_table,
        };
        let what = match (self.table_oid, &self.led) {
            (None, Some(led)) => format!(
                "there is no table {name}; the table that was relayed is called {} now",
                show_table(led)
            ),
            (None, None) => format!("there is no table {name} any more"),
            (Some(oid), _) if self.covers_table || self.covers_all => format!(
                "{name} is a new table (oid {oid}), this relay is that of the old one (oid {led_oid})"
            ),
            (Some(oid), _) => {
                let published = match &self.published {
                    Some(published) => format!("the published one is {published}"),
                    None => "it publishes no table".to_owned(),
                };
                format!(
                    "{name} is a new table (oid {oid}), not in publication {publication}; {published}"
                )
            }
        };
        (what, swap.remedy())
    }

    /// What is wrong with what the publication has of the table.
    fn trouble(&self, source: &Source, led_oid: u32) -> Option<(String, String)> {
        const ONLY_IN_THE_TABLE: &str = "the rows written meanwhile are in no stream, only in the table: delete and insert them again, with the same event_id";
        let quoted = quote_ident(&source.publication);
        let publication = show_ident(&source.publication);
        let name = show_table(&source.table);
        let table = quote_table(&source.table);
        if led_oid != 0 && self.table_oid != Some(led_oid) {
            return Some(self.swapped(source, led_oid));
        }
        let published = match &self.published {
            Some(published) => format!("the published one is {published}"),
            None => "it publishes no table".to_owned(),
        };
        let Some(oid) = self.table_oid else {
            return Some((
                format!("there is no table {name}"),
                "name the outbox with --table, or run `walrelay init`, which makes it".to_owned(),
            ));
        };
        if !self.exists {
            return Some((
                format!("publication {publication} does not exist: the stream carries no row"),
                format!(
                    "create publication {quoted} for table only {table} with (publish = 'insert', publish_via_partition_root = true); {ONLY_IN_THE_TABLE}"
                ),
            ));
        }
        if !(self.covers_table || self.covers_all) {
            return Some((
                format!("{name} (oid {oid}) is not in publication {publication}; {published}"),
                format!("alter publication {quoted} set table only {table}; {ONLY_IN_THE_TABLE}"),
            ));
        }
        let narrow = match (self.row_filter, self.column_list) {
            (true, true) => Some("has a row filter and a column list"),
            (true, false) => Some("has a row filter"),
            (false, true) => Some("has a column list"),
            (false, false) if !self.publishes_insert => Some("does not publish inserts"),
            (false, false) if self.is_partitioned && !self.via_partition_root => {
                Some("does not publish via the partition root")
            }
            (false, false) => None,
        };
        narrow.map(|what| {
            (
                format!("publication {publication} {what}: rows or columns of {name} are left out"),
                format!(
                    "alter publication {quoted} set table only {table}; alter publication {quoted} set (publish = 'insert', publish_via_partition_root = true); {ONLY_IN_THE_TABLE}"
                ),
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Database;

    fn trouble(coverage: &Coverage, led_oid: u32) -> Option<(String, String)> {
        let source = Source {
            database: Database::plain("/tmp", 5432, "u", "d"),
            table: table("outbox"),
            slot: "walrelay".into(),
            publication: "walrelay".into(),
        };
        coverage.trouble(&source, led_oid)
    }

    fn table(name: &str) -> TableName {
        TableName {
            schema: "public".into(),
            name: name.into(),
        }
    }

    fn whole() -> Coverage {
        Coverage {
            table_oid: Some(7),
            exists: true,
            publishes_insert: true,
            via_partition_root: true,
            covers_table: true,
            published: Some("public.outbox".into()),
            led: Some(table("outbox")),
            ..Coverage::default()
        }
    }

    fn said(coverage: &Coverage) -> String {
        let (what, remedy) = trouble(coverage, 7).expect("trouble");
        assert!(!remedy.is_empty());
        what
    }

    #[test]
    fn a_table_that_is_covered_is_no_trouble() {
        assert_eq!(trouble(&whole(), 7), None);
        assert_eq!(trouble(&whole(), 0), None);
    }

    // Case D07.
    #[test]
    fn a_swapped_table_is_named_with_the_published_one() {
        let swapped = Coverage {
            table_oid: Some(9),
            covers_table: false,
            published: Some("public.outbox_old".into()),
            led: Some(table("outbox_old")),
            ..whole()
        };
        assert_eq!(
            said(&swapped),
            "public.outbox is a new table (oid 9), not in publication walrelay; the published one is public.outbox_old"
        );
        let added = Coverage {
            covers_table: true,
            ..swapped
        };
        assert!(said(&added).contains("this relay is that of the old one (oid 7)"));
        let gone = Coverage {
            table_oid: None,
            covers_table: false,
            led: None,
            ..whole()
        };
        assert_eq!(said(&gone), "there is no table public.outbox any more");
    }

    #[test]
    fn what_a_publication_leaves_out_is_said() {
        let narrow = |change: fn(&mut Coverage)| {
            let mut coverage = whole();
            change(&mut coverage);
            said(&coverage)
        };
        assert!(narrow(|c| c.exists = false).contains("does not exist"));
        assert!(narrow(|c| c.row_filter = true).contains("has a row filter:"));
        assert!(narrow(|c| c.column_list = true).contains("has a column list"));
        assert!(narrow(|c| c.publishes_insert = false).contains("does not publish inserts"));
        let taken_out = narrow(|c| {
            c.covers_table = false;
            c.published = None;
        });
        assert!(taken_out.contains("is not in publication walrelay; it publishes no table"));
        let root = narrow(|c| {
            c.is_partitioned = true;
            c.via_partition_root = false;
        });
        assert!(root.contains("partition root"));
    }
}
