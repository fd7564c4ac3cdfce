//! The processes of the payments system. They are this very test binary, started again with a job in
//! the environment.

use std::io::{self, Write as _};
use std::thread;
use std::time::{Duration, Instant};

use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer};
use rdkafka::message::{BorrowedMessage, Headers, Message};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::postgres::Sql;

pub const JOB: &str = "WALRELAY_TEST_JOB";
pub const PAUSED: &str = "paused at";

/// Payments of one till; ids of different tills do not meet.
const TILL: i64 = 1_000_000_000;
const ACCOUNTS: i64 = 40;
/// Records of one transaction of a consumer.
const BATCH: usize = 50;

type Failed = Box<dyn std::error::Error>;

#[derive(Serialize, Deserialize)]
pub struct Job {
    pub port: u16,
    pub source: String,
    pub effects: String,
    pub brokers: String,
    pub topic: String,
    pub role: Role,
    /// Where to stand still, and at which payment: there it is killed.
    pub pause_at: Option<(Point, i64)>,
}

#[derive(Clone, Serialize, Deserialize)]
pub enum Role {
    /// Makes one payment and ends.
    Payer { id: i64 },
    /// Makes payments at several tills until it is killed.
    Shop { tills: Vec<i64>, a_second: u32 },
    /// `ledger`, `payout`, or `wrong`: a ledger that commits its claim before the effect.
    Consumer {
        name: String,
        group: String,
        instance: String,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Point {
    /// Payment and event are written and not committed.
    BeforeCommit,
    AfterCommit,
    /// The event is claimed and its effect not committed.
    MidEffect,
    /// The effect is committed and the offset is not.
    BeforeOffset,
}

/// Not a test: the door through which a process of the system comes in.
#[test]
#[ignore = "started by the tests of the payments system"]
fn actor() {
    let Ok(job) = std::env::var(JOB) else { return };
    let job: Job = serde_json::from_str(&job).expect("we wrote it");
    let ended = match &job.role {
        Role::Payer { id } => job.pay_once(*id),
        Role::Shop { tills, a_second } => job.open_shop(tills, *a_second),
        Role::Consumer {
            name,
            group,
            instance,
        } => job.consume(name, group, instance),
    };
    // As any service: its supervisor starts it again.
    if let Err(error) = ended {
        say(&format!("ended: {error:?}"));
        std::process::exit(1);
    }
}

fn say(words: &str) {
    let _ = writeln!(io::stderr(), "{words}");
}

/// All of a payment follows from its number.
pub struct Payment {
    pub id: i64,
    pub account: String,
    /// From 1, without gaps, per account.
    pub seq: i64,
    pub cents: i64,
}

impl Payment {
    pub fn numbered(id: i64) -> Payment {
        let (till, n) = (id / TILL, id % TILL);
        Payment {
            id,
            account: format!("till{till}-account{}", n % ACCOUNTS),
            seq: n / ACCOUNTS + 1,
            cents: 100 + id * 7919 % 9900,
        }
    }
}

impl Job {
    fn reached(&self, point: Point, payment: i64) {
        if self.pause_at == Some((point, payment)) {
            say(&format!("{PAUSED} {point:?}"));
            loop {
                thread::park();
            }
        }
    }

    // --- The payments service.

    /// The same payment twice is one payment and one event.
    fn pay(&self, sql: &Sql, payment: &Payment) -> Result<(), Failed> {
        let Payment {
            id,
            account,
            seq,
            cents,
        } = payment;
        sql.try_run(&format!(
            "begin;
             insert into payment (id, account, seq, cents) values ({id}, '{account}', {seq}, {cents})
               on conflict (id) do nothing;
             select outbox_emit('payment', '{account}', 'payment.captured',
               '{{\"payment\": {id}, \"account\": \"{account}\", \"seq\": {seq}, \"cents\": {cents}}}',
               event_id => outbox_event_id('payment-{id}', 'captured'))"
        ))?;
        self.reached(Point::BeforeCommit, *id);
        sql.try_run("commit")?;
        self.reached(Point::AfterCommit, *id);
        Ok(())
    }

    fn pay_once(&self, id: i64) -> Result<(), Failed> {
        let sql = Sql::try_connect(self.port, &self.source, "postgres")?;
        self.pay(&sql, &Payment::numbered(id))
    }

    fn open_shop(&self, tills: &[i64], a_second: u32) -> Result<(), Failed> {
        let between = Duration::from_secs(1) * u32::try_from(tills.len())? / a_second;
        thread::scope(|scope| {
            for till in tills {
                scope.spawn(move || self.trade(*till, between));
            }
        });
        Ok(())
    }

    /// A server that dies is waited for; what was committed then, only the table knows.
    fn trade(&self, till: i64, between: Duration) {
        let (first, last) = (till * TILL, (till + 1) * TILL - 1);
        let highest = format!(
            "select coalesce(max(id), {first} - 1) from payment where id between {first} and {last}"
        );
        let mut due = Instant::now();
        loop {
            // A server that is away refuses at once.
            thread::sleep(Duration::from_millis(20));
            let Ok(sql) = Sql::try_connect(self.port, &self.source, "postgres") else {
                continue;
            };
            let Ok(rows) = sql.try_rows(&highest) else {
                continue;
            };
            let id = rows[0][0].as_deref().and_then(|id| id.parse::<i64>().ok());
            let mut id = id.expect("a number");
            while {
                id += 1;
                self.pay(&sql, &Payment::numbered(id)).is_ok()
            } {
                due = (due + between).max(Instant::now() - Duration::from_secs(1));
                // Pacing: customers do not come all at once.
                thread::sleep(due.saturating_duration_since(Instant::now()));
            }
        }
    }

    // --- The consumers.

    fn consume(&self, name: &str, group: &str, instance: &str) -> Result<(), Failed> {
        let consumer: BaseConsumer = ClientConfig::new()
            .set("bootstrap.servers", &self.brokers)
            .set("group.id", group)
            .set("group.instance.id", instance)
            .set("session.timeout.ms", "6000")
            .set("enable.auto.commit", "false")
            .set("enable.auto.offset.store", "false")
            .set("auto.offset.reset", "earliest")
            .set("fetch.wait.max.ms", "50")
            .set("reconnect.backoff.max.ms", "500")
            .set("log_level", "2")
            .create()?;
        consumer.subscribe(&[&self.topic])?;
        let sql = Sql::try_connect(self.port, &self.effects, "postgres")?;
        loop {
            let batch = poll_batch(&consumer);
            if batch.is_empty() {
                continue;
            }
            // One transaction for all that has come: at 500 a second a commit each would be dear.
            sql.try_run("begin")?;
            for message in &batch {
                self.process(&sql, name, message)?;
            }
            sql.try_run("commit")?;
            for message in &batch {
                self.reached(Point::BeforeOffset, payment_of(message)?);
                // A partition that another has by now is his to commit.
                let _ = consumer.store_offset_from_message(message);
            }
            // What is not committed comes again, and is skipped.
            if let Err(error) = consumer.commit_consumer_state(CommitMode::Sync) {
                say(&error.to_string());
            }
        }
    }

    fn process(&self, sql: &Sql, name: &str, message: &BorrowedMessage<'_>) -> Result<(), Failed> {
        let event_id = event_id(message).ok_or("a record without an event_id")?;
        let payment = payment_of(message)?;
        let claim = format!("select claim_event('{name}', '{event_id}')");
        let is_ours = sql.try_rows(&claim)?[0][0].as_deref() == Some("t");
        if name == "wrong" {
            sql.try_run("commit; begin")?;
            self.reached(Point::MidEffect, payment);
        }
        if is_ours {
            sql.try_run(&effect(name, payment, &body(message)?))?;
        }
        self.reached(Point::MidEffect, payment);
        Ok(())
    }
}

/// What has come by now, and at most so much; waits a little for the first.
fn poll_batch(consumer: &BaseConsumer) -> Vec<BorrowedMessage<'_>> {
    let mut batch = Vec::new();
    let mut patience = Duration::from_millis(50);
    while batch.len() < BATCH {
        match consumer.poll(patience) {
            Some(Ok(message)) => batch.push(message),
            // Passing ones: a broker that is away.
            Some(Err(error)) => say(&error.to_string()),
            None => break,
        }
        patience = Duration::ZERO;
    }
    batch
}

fn body(message: &BorrowedMessage<'_>) -> Result<Value, Failed> {
    let payload = message.payload().ok_or("no payload")?;
    Ok(serde_json::from_slice(payload)?)
}

fn payment_of(message: &BorrowedMessage<'_>) -> Result<i64, Failed> {
    let payment = body(message)?["payment"].as_i64();
    Ok(payment.ok_or("no payment")?)
}

fn event_id(message: &BorrowedMessage<'_>) -> Option<String> {
    let headers = message.headers()?;
    let mut found = headers.iter().filter(|header| header.key == "event_id");
    String::from_utf8(found.next()?.value?.to_vec()).ok()
}

fn effect(name: &str, payment: i64, body: &Value) -> String {
    let account = body["account"].as_str().unwrap_or_default();
    let (seq, cents) = (&body["seq"], &body["cents"]);
    if name == "payout" {
        return format!("insert into payout (payment, cents) values ({payment}, {cents})");
    }
    format!(
        "insert into ledger_entry (payment, account, seq, cents)
           values ({payment}, '{account}', {seq}, {cents}), ({payment}, 'customers', {seq}, -{cents});
         insert into ledger_balance as b values ('{account}', 1, {cents})
           on conflict (account) do update
           set payments = b.payments + 1, cents = b.cents + excluded.cents"
    )
}
