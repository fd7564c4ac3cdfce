//! Writers, as applications are: each commits transactions of many shapes, survives the server's
//! restarts, and knows in the end what was committed and in which order.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::check::Committed;
use crate::postgres::{Database, Sql};

const KEYS_A_WRITER: usize = 5;
/// How long a writer tries to come back to a server that is away.
const PATIENCE: Duration = Duration::from_secs(180);

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// One row a transaction.
    Single,
    /// Rows a transaction, of one statement.
    Rows(usize),
    /// In turn: single rows, savepoints, rollbacks, COPY, two-phase commits.
    Mixed,
}

#[derive(Clone)]
pub struct Plan {
    pub writers: usize,
    pub shape: Shape,
    /// Transactions a writer; without it, until `stop`.
    pub transactions: Option<usize>,
    /// The pause between two transactions of a writer.
    pub pause: Duration,
}

impl Plan {
    pub fn new(writers: usize, shape: Shape) -> Plan {
        Plan {
            writers,
            shape,
            transactions: None,
            pause: Duration::ZERO,
        }
    }

    pub fn transactions(mut self, each: usize) -> Plan {
        self.transactions = Some(each);
        self
    }

    /// So many transactions a second, all writers together, at most.
    pub fn a_second(mut self, all: u32) -> Plan {
        let writers = u32::try_from(self.writers).expect("a few");
        self.pause = Duration::from_secs(1) * writers / all;
        self
    }
}

/// Writers at work.
pub struct Load {
    stop: Arc<AtomicBool>,
    committed: Arc<AtomicUsize>,
    writers: Vec<JoinHandle<Committed>>,
}

impl Load {
    pub fn start(db: &Database<'_>, plan: &Plan) -> Load {
        let stop = Arc::new(AtomicBool::new(false));
        let committed = Arc::new(AtomicUsize::new(0));
        let writers = (0..plan.writers)
            .map(|number| {
                let mut writer = Writer {
                    // Two loads of one test do not share keys or ids.
                    name: format!("{}-{number}", crate::proc::unique()),
                    port: db.cluster.port,
                    dbname: db.name.clone(),
                    sql: None,
                    serial: 0,
                    turn: number,
                    committed: Committed::new(),
                };
                let (stop, count, plan) = (stop.clone(), committed.clone(), plan.clone());
                thread::spawn(move || {
                    writer.work(&plan, &stop, &count);
                    writer.committed
                })
            })
            .collect();
        Load {
            stop,
            committed,
            writers,
        }
    }

    /// Events that are committed for certain by now.
    pub fn committed(&self) -> usize {
        self.committed.load(Ordering::Relaxed)
    }

    /// Waits until the writers have done their number of transactions.
    pub fn finish(mut self) -> Committed {
        self.join()
    }

    /// Lets each writer end its transaction.
    pub fn stop(mut self) -> Committed {
        self.stop.store(true, Ordering::Relaxed);
        self.join()
    }

    fn join(&mut self) -> Committed {
        let mut all = Committed::new();
        for writer in self.writers.drain(..) {
            all.merge(writer.join().expect("a writer does not panic"));
        }
        all
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        // After a failed test the writers must not write on.
        self.stop.store(true, Ordering::Relaxed);
    }
}

struct Writer {
    name: String,
    port: u16,
    dbname: String,
    sql: Option<Sql>,
    serial: usize,
    turn: usize,
    committed: Committed,
}

/// One transaction: the events that it commits, and its SQL.
struct Transaction {
    events: Vec<(String, String)>,
    work: Work,
}

enum Work {
    Sql(String),
    Copy(String),
    TwoPhase { sql: String, gid: String },
}

impl Writer {
    fn work(&mut self, plan: &Plan, stop: &AtomicBool, count: &AtomicUsize) {
        let mut next = Instant::now();
        let mut done = 0;
        while !stop.load(Ordering::Relaxed) && plan.transactions.is_none_or(|n| done < n) {
            let transaction = self.transaction(plan.shape);
            if self.commit(&transaction, stop) {
                count.fetch_add(transaction.events.len(), Ordering::Relaxed);
                for (key, event) in transaction.events {
                    self.committed.push(key, event);
                }
            }
            done += 1;
            next += plan.pause;
            // Pacing, not waiting for something: an application that commits now and then.
            thread::sleep(next.saturating_duration_since(Instant::now()));
        }
    }

    fn event(&mut self) -> (String, String) {
        self.serial += 1;
        let key = format!("k{}-{}", self.name, self.serial % KEYS_A_WRITER);
        let (load, writer) = self.name.split_once('-').expect("made with a dash");
        let id = format!("{load:0>8}-{writer:0>4}-4000-8000-{:012}", self.serial);
        (key, id)
    }

    fn transaction(&mut self, shape: Shape) -> Transaction {
        self.turn += 1;
        match shape {
            Shape::Single => self.rows(1),
            Shape::Rows(n) => self.rows(n),
            Shape::Mixed => match self.turn % 8 {
                0 => self.savepoints(),
                1 => self.rolled_back(),
                2 => self.copy(),
                3 => self.two_phase(),
                _ => self.rows(1),
            },
        }
    }

    fn rows(&mut self, n: usize) -> Transaction {
        let events: Vec<_> = (0..n).map(|_| self.event()).collect();
        Transaction {
            work: Work::Sql(insert(&events)),
            events,
        }
    }

    fn savepoints(&mut self) -> Transaction {
        let (kept, lost, last) = (self.event(), self.event(), self.event());
        let one = |event: &(String, String)| insert(std::slice::from_ref(event));
        let sql = format!(
            "begin; {}; savepoint a; {}; rollback to a; savepoint b; {}; release b; commit",
            one(&kept),
            one(&lost),
            one(&last)
        );
        Transaction {
            events: vec![kept, last],
            work: Work::Sql(sql),
        }
    }

    fn rolled_back(&mut self) -> Transaction {
        let event = self.event();
        Transaction {
            work: Work::Sql(format!("begin; {}; rollback", insert(&[event]))),
            events: Vec::new(),
        }
    }

    fn copy(&mut self) -> Transaction {
        let events: Vec<_> = (0..4).map(|_| self.event()).collect();
        let text = events
            .iter()
            .map(|(key, id)| format!("{id}\tt\t{key}\te\t{}\n", payload(id)))
            .collect();
        Transaction {
            events,
            work: Work::Copy(text),
        }
    }

    fn two_phase(&mut self) -> Transaction {
        let event = self.event();
        let gid = format!("{}-{}", self.dbname, event.1);
        let sql = insert(std::slice::from_ref(&event));
        Transaction {
            events: vec![event],
            work: Work::TwoPhase { sql, gid },
        }
    }

    /// True when the transaction is committed; false when it is not and never will be.
    fn commit(&mut self, transaction: &Transaction, stop: &AtomicBool) -> bool {
        let until = Instant::now() + PATIENCE;
        loop {
            if self
                .session()
                .is_some_and(|sql| attempt(sql, &transaction.work))
            {
                return true;
            }
            // Whether a broken connection's commit took place only the server knows.
            self.sql = None;
            match self.settle(transaction, until) {
                Some(true) => return true,
                // Nobody is behind an event that was not written: let it go.
                Some(false) if stop.load(Ordering::Relaxed) => return false,
                Some(false) => {}
                None => panic!("the server has been away for {PATIENCE:?}"),
            }
        }
    }

    fn session(&mut self) -> Option<&Sql> {
        if self.sql.is_none() {
            let sql = Sql::try_connect(self.port, &self.dbname, "postgres").ok()?;
            self.sql = Some(sql);
        }
        self.sql.as_ref()
    }

    /// Was it committed? Prepared halves are committed on the way. `None`: nobody answered.
    fn settle(&mut self, transaction: &Transaction, until: Instant) -> Option<bool> {
        while Instant::now() < until {
            if let Some(sql) = self.session() {
                match ask(sql, transaction) {
                    Ok(answer) => return Some(answer),
                    Err(_) => self.sql = None,
                }
            }
            // A server that is away refuses at once.
            thread::sleep(Duration::from_millis(20));
        }
        None
    }
}

fn ask(sql: &Sql, transaction: &Transaction) -> Result<bool, tokio_postgres::Error> {
    if let Work::TwoPhase { gid, .. } = &transaction.work {
        let found = sql.try_rows(&format!(
            "select 1 from pg_prepared_xacts where gid = '{gid}'"
        ))?;
        if !found.is_empty() {
            sql.try_run(&format!("commit prepared '{gid}'"))?;
        }
    }
    let Some((_, id)) = transaction.events.first() else {
        return Ok(true);
    };
    // A backend of ours that lost its client may still be at it: its lock on the id tells.
    let insert_would_wait = sql.try_rows(&format!(
        "select 1 from pg_stat_activity
         where datname = current_database() and pid <> pg_backend_pid()
           and application_name = 'test' and state = 'active' and query like '%{id}%'"
    ))?;
    if !insert_would_wait.is_empty() {
        thread::sleep(Duration::from_millis(20));
        return ask(sql, transaction);
    }
    let rows = sql.try_rows(&format!("select 1 from outbox where event_id = '{id}'"))?;
    Ok(!rows.is_empty())
}

fn attempt(sql: &Sql, work: &Work) -> bool {
    match work {
        Work::Sql(text) => sql.try_run(text).is_ok(),
        Work::Copy(text) => sql
            .copy_in(
                "copy outbox (event_id, aggregate_type, aggregate_id, event_type, payload) from stdin",
                text,
            )
            .is_ok(),
        Work::TwoPhase { sql: text, gid } => sql
            .try_run(&format!("begin; {text}; prepare transaction '{gid}'"))
            .and_then(|()| sql.try_run(&format!("commit prepared '{gid}'")))
            .is_ok(),
    }
}

fn insert(events: &[(String, String)]) -> String {
    let values: Vec<String> = events
        .iter()
        .map(|(key, id)| format!("('{id}', 't', '{key}', 'e', '{}')", payload(id)))
        .collect();
    format!(
        "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload) values {}",
        values.join(", ")
    )
}

fn payload(id: &str) -> String {
    format!("{{\"id\": \"{id}\", \"note\": \"{}\"}}", "x".repeat(150))
}
