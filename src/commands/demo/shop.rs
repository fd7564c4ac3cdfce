//! The shop: payments as an application would write them. Each is one transaction of a business row
//! and an outbox row; some are declined and rolled back.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio_postgres::{Client, Statement};

use super::verdict::Written;
use crate::config::Database;
use crate::error::{DbError, Exit, Failure};
use crate::io::connect;
use crate::io::side::{Side, db_error};

pub const AGGREGATE_TYPE: &str = "payment";

/// Each customer belongs to one till, so that the shop knows the order of its payments.
const CUSTOMERS: [&str; 16] = [
    "ada", "bela", "carl", "dora", "emil", "faye", "gus", "hana", "ivo", "june", "kofi", "lena",
    "milo", "nora", "otto", "pia",
];
const TILLS: usize = 4;
/// One in so many payments is declined after its event was written.
pub const DECLINED_EACH: u64 = 20;
const REFUNDED_EACH: u64 = 8;
/// A till that fell behind for longer does not try to make up for it.
const BEHIND_MAX: Duration = Duration::from_millis(500);

pub const TABLE: &str = "create table public.payment (
  id       bigint generated always as identity primary key,
  customer text   not null,
  kind     text   not null,
  cents    bigint not null
)";
const PAYMENT: &str =
    "insert into public.payment (customer, kind, cents) values ($1, $2, $3) returning id";
const EVENT: &str = "select public.outbox_emit('payment', $1, 'payment.' || $2::text, \
    jsonb_build_object('payment', $3::bigint, 'cents', $4::bigint, 'seq', $5::bigint))::text";

#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub rate: u32,
    pub events: Option<u64>,
    pub length: Option<Duration>,
}

/// What the shop shares while it is open.
#[derive(Default)]
pub struct Doors {
    shut: AtomicBool,
    begun: AtomicU64,
    /// When the commit of an event had returned.
    committed: Mutex<HashMap<u128, Instant>>,
}

impl Doors {
    /// No further payment is begun.
    pub fn shut(&self) {
        self.shut.store(true, Ordering::Relaxed);
    }

    /// When the commit of this event had returned; `None`: it has not yet, or never will.
    pub fn committed(&self, event_id: u128) -> Option<Instant> {
        let committed = self.committed.lock();
        committed
            .unwrap_or_else(PoisonError::into_inner)
            .get(&event_id)
            .copied()
    }

    fn note(&self, event_id: u128, at: Instant) {
        let committed = self.committed.lock();
        committed
            .unwrap_or_else(PoisonError::into_inner)
            .insert(event_id, at);
    }

    /// May another payment be begun?
    fn admits(&self, plan: &Plan) -> bool {
        if self.shut.load(Ordering::Relaxed) {
            return false;
        }
        let nth = self.begun.fetch_add(1, Ordering::Relaxed);
        plan.events.is_none_or(|events| nth < events)
    }
}

/// What the shop knows at the end of the day.
#[derive(Debug, Default)]
pub struct Takings {
    pub written: Vec<Written>,
    pub declined: usize,
    pub time: Duration,
}

/// Trades until the plan is fulfilled or the doors are shut. Blocks: its own thread and runtime,
/// for the relay's latency is not to be disturbed by those who measure it.
///
/// # Errors
/// A transaction failed.
pub fn trade(database: &Database, plan: &Plan, doors: &Arc<Doors>) -> Result<Takings, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| {
            Failure::new(
                Exit::Unexpected,
                format!("the shop cannot open: {error}"),
                "raise this process's limits (ulimit -n)",
            )
        })?;
    runtime.block_on(async {
        let mut opened = Vec::new();
        for number in 0..TILLS {
            opened.push(Till::open(database, number).await?);
        }
        let opening = Instant::now();
        let mut tills = Vec::new();
        for till in opened {
            let doors = Arc::clone(doors);
            let plan = *plan;
            tills.push(tokio::spawn(till.trade(plan, doors, opening)));
        }
        let mut takings = Takings::default();
        for till in tills {
            let taken = till.await.map_err(|error| {
                Failure::new(
                    Exit::Unexpected,
                    format!("a writer of the demo broke: {error}"),
                    "report this as a bug",
                )
            })?;
            let taken = taken.map_err(|error| failed(&error))?;
            takings.written.extend(taken.written);
            takings.declined += taken.declined;
        }
        takings.time = opening.elapsed();
        Ok(takings)
    })
}

fn failed(error: &DbError) -> Failure {
    Failure::new(
        Exit::Unexpected,
        format!("a payment could not be written: {error}"),
        "run the demo again; nobody but the demo should touch its Postgres",
    )
}

struct Till {
    number: usize,
    side: Side,
    payment: Statement,
    event: Statement,
    /// Payments begun, the declined ones among them.
    begun: u64,
    seqs: HashMap<&'static str, u64>,
    takings: Takings,
}

impl Till {
    async fn open(database: &Database, number: usize) -> Result<Till, Failure> {
        let side = Side::connect(database, None)
            .await
            .map_err(|error| connect::failure(&error, database))?;
        let prepare = async |sql| {
            let prepared = side.client.prepare(sql).await;
            prepared.map_err(|error| failed(&db_error(&error)))
        };
        Ok(Till {
            number,
            payment: prepare(PAYMENT).await?,
            event: prepare(EVENT).await?,
            side,
            begun: 0,
            seqs: HashMap::new(),
            takings: Takings::default(),
        })
    }

    async fn trade(
        mut self,
        plan: Plan,
        doors: Arc<Doors>,
        opening: Instant,
    ) -> Result<Takings, DbError> {
        let between = Duration::from_secs(1) / plan.rate * u32::try_from(TILLS).unwrap_or(1);
        // The tills take turns.
        let mut due = opening
            + between * u32::try_from(self.number).unwrap_or(0) / u32::try_from(TILLS).unwrap_or(1);
        let closing = plan.length.map(|length| opening + length);
        loop {
            if closing.is_some_and(|closing| due >= closing || Instant::now() >= closing) {
                break;
            }
            while Instant::now() < due && !doors.shut.load(Ordering::Relaxed) {
                let nap = Duration::from_millis(50);
                tokio::time::sleep(due.saturating_duration_since(Instant::now()).min(nap)).await;
            }
            if !doors.admits(&plan) {
                break;
            }
            self.serve(&doors).await?;
            due += between;
            if due.elapsed() > BEHIND_MAX {
                due = Instant::now();
            }
        }
        Ok(self.takings)
    }

    /// One payment that goes through, and perhaps one before it that does not.
    async fn serve(&mut self, doors: &Doors) -> Result<(), DbError> {
        let own = CUSTOMERS.len() / TILLS;
        loop {
            self.begun += 1;
            let nth = self.begun;
            let place = usize::try_from(nth).unwrap_or_default() % own;
            let customer = CUSTOMERS[place * TILLS + self.number];
            let seq = self.seqs.get(customer).map_or(1, |last| last + 1);
            let is_declined = nth.is_multiple_of(DECLINED_EACH);
            let end = if is_declined { "rollback" } else { "commit" };
            let event_id = self.write(customer, nth, seq, end).await?;
            let at = Instant::now();
            if is_declined {
                self.takings.declined += 1;
                continue;
            }
            doors.note(event_id, at);
            self.seqs.insert(customer, seq);
            self.takings.written.push(Written {
                event_id,
                key: customer.to_owned(),
                seq,
                at,
            });
            return Ok(());
        }
    }

    async fn write(&self, customer: &str, nth: u64, seq: u64, end: &str) -> Result<u128, DbError> {
        let client: &Client = &self.side.client;
        let or_db = |error: tokio_postgres::Error| db_error(&error);
        let kind = if nth.is_multiple_of(REFUNDED_EACH) {
            "refunded"
        } else {
            "received"
        };
        let cents = i64::try_from(nth * 7919 % 19_900 + 100).unwrap_or(100);
        let seq = i64::try_from(seq).unwrap_or(i64::MAX);
        self.side.run("begin").await?;
        let row = client
            .query_one(&self.payment, &[&customer, &kind, &cents])
            .await
            .map_err(or_db)?;
        let payment: i64 = row.get(0);
        let row = client
            .query_one(&self.event, &[&customer, &kind, &payment, &cents, &seq])
            .await
            .map_err(or_db)?;
        self.side.run(end).await?;
        let event_id: &str = row.get(0);
        parse_uuid(event_id).ok_or_else(|| DbError::Protocol(format!("{event_id} is not a uuid")))
    }
}

/// As Postgres prints it.
pub fn parse_uuid(text: &str) -> Option<u128> {
    let digits: String = text.chars().filter(|c| *c != '-').collect();
    (digits.len() == 32)
        .then(|| u128::from_str_radix(&digits, 16).ok())
        .flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_read_as_a_number() {
        let number = parse_uuid("00000000-0000-0000-0000-0000000000ff");
        assert_eq!(number, Some(255));
        assert_eq!(parse_uuid("ff"), None);
        assert_eq!(parse_uuid("no"), None);
    }

    #[test]
    fn doors_admit_as_many_as_were_asked_for() {
        let plan = Plan {
            rate: 1,
            events: Some(2),
            length: None,
        };
        let doors = Doors::default();
        assert!(doors.admits(&plan) && doors.admits(&plan));
        assert!(!doors.admits(&plan));
        let doors = Doors::default();
        doors.shut();
        assert!(!doors.admits(&plan));
    }
}
