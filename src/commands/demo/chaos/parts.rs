//! The processes that the chaos kills: each is this binary again, told by a hidden flag which part it
//! plays.

use std::fs::{self, File, OpenOptions};
use std::io::Read as _;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::super::{PARTITIONS, Setting, relay_config, source};
use crate::config::{Database, Kafka, Property};
use crate::error::{DbError, Exit, Failure};
use crate::io::kafka::{self, Got, Reader};
use crate::io::side::{Side, db_error};
use crate::service;

pub const READ_TO_THE_END: &str = "read to the end";
/// One that cannot run is not started all the time.
const RESTART_AFTER: Duration = Duration::from_millis(300);
const POLL: Duration = Duration::from_millis(20);
const ACCOUNTS: i64 = 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Role {
    Relay,
    Shop,
    Ledger,
}

/// What a part is told on its command line.
#[derive(Clone, Serialize, Deserialize)]
struct Script {
    role: Role,
    dir: String,
    brokers: String,
    prefix: String,
    topic: String,
    /// The broker is the simulated one of the process that directs.
    is_mock: bool,
    rate: u32,
}

impl Script {
    /// What the simulated broker needs, which is known here by its address alone: it checks no
    /// sequence numbers, and holds an empty answer back for as long as it may.
    fn properties(&self) -> Vec<Property> {
        match (self.is_mock, self.role) {
            (true, Role::Relay) => vec![Property::plain("max.in.flight", "1")],
            (true, Role::Ledger) => vec![Property::plain("fetch.wait.max.ms", "1")],
            (true, Role::Shop) | (false, _) => Vec::new(),
        }
    }
}

/// A part that is played. Dropping it ends it.
pub struct Part {
    script: Script,
    child: Child,
    started: Instant,
    log: PathBuf,
}

impl Part {
    pub fn start(role: Role, setting: &Setting, prefix: &str, rate: u32) -> Result<Self, Failure> {
        let script = Script {
            role,
            dir: setting.dir.clone(),
            brokers: setting.bootstrap.clone(),
            prefix: prefix.to_owned(),
            topic: setting.topic.clone(),
            is_mock: setting.is_mock,
            rate,
        };
        let (child, log) = spawn(&script).map_err(|error| no_part(&error))?;
        Ok(Part {
            script,
            child,
            started: Instant::now(),
            log,
        })
    }

    /// Starts it again where it has ended.
    pub fn revive(&mut self) -> Result<(), Failure> {
        let has_ended = self.child.try_wait().is_ok_and(|status| status.is_some());
        if !has_ended || self.started.elapsed() < RESTART_AFTER {
            return Ok(());
        }
        let (child, log) = spawn(&self.script).map_err(|error| no_part(&error))?;
        self.child = child;
        self.log = log;
        self.started = Instant::now();
        Ok(())
    }

    /// SIGKILL; who it was.
    pub fn kill9(&mut self) -> String {
        let pid = self.child.id();
        let _ = self.child.kill();
        let _ = self.child.wait();
        format!("pid {pid}")
    }

    /// Does its log hold this?
    pub fn has_said(&self, words: &str) -> bool {
        fs::read_to_string(&self.log).is_ok_and(|log| log.contains(words))
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        self.kill9();
    }
}

fn no_part(error: &std::io::Error) -> Failure {
    Failure::new(
        Exit::Unexpected,
        format!("a part of the demo cannot be started: {error}"),
        "raise this process's limits (ulimit -u, ulimit -n)",
    )
}

/// Its log is new with each process, beside the server's: it goes with the directory.
fn spawn(script: &Script) -> std::io::Result<(Child, PathBuf)> {
    let text = serde_json::to_string(script).map_err(std::io::Error::other)?;
    let mut number = 0;
    let (log, out): (PathBuf, File) = loop {
        let name = format!("{:?}-{number}.log", script.role).to_lowercase();
        let path = PathBuf::from(&script.dir).join(name);
        match OpenOptions::new().write(true).create_new(true).open(&path) {
            Ok(file) => break (path, file),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => number += 1,
            Err(error) => return Err(error),
        }
    };
    let child = Command::new(std::env::current_exe()?)
        .args(["demo", "--log", "json", "--part", &text])
        .env("RUST_LOG", "info")
        // Ctrl-C at the terminal is for the one who directs.
        .process_group(0)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(out)
        .spawn()?;
    Ok((child, log))
}

/// The other side: plays the part until it is killed, or who started it is gone.
///
/// # Errors
/// What ended it; it is started again.
pub async fn play(script: &str) -> Result<(), Failure> {
    let script: Script = serde_json::from_str(script)
        .map_err(|error| Failure::usage(format!("--part: {error}"), "leave it out"))?;
    thread::spawn(|| {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(1);
    });
    let to_kafka = Kafka {
        brokers: script.brokers.clone(),
        properties: script.properties(),
        token_command: None,
        create_topics: None,
    };
    let database = Database::plain(&script.dir, 5432, "postgres", "postgres");
    let ended = match script.role {
        Role::Relay => {
            return service::run(relay_config(source(database), to_kafka, &script.prefix)).await;
        }
        Role::Shop => trade(&database, script.rate).await,
        Role::Ledger => {
            let settings = kafka::Settings::new(&to_kafka, "walrelay-demo")?;
            keep_books(&database, &settings, &script.topic).await
        }
    };
    ended.map_err(|error| Failure::new(Exit::Unexpected, error, "it is started again"))
}

fn words(error: &DbError) -> String {
    error.to_string()
}

/// Payments until Postgres goes; which of them are committed, the table knows.
async fn trade(database: &Database, rate: u32) -> Result<(), String> {
    let side = Side::connect(database, None)
        .await
        .map_err(|error| words(&error))?;
    let mut due = Instant::now();
    for turn in 0_i64.. {
        let account = turn % ACCOUNTS;
        let cents = 100 + turn * 7919 % 9900;
        // Business row and event in one transaction. The number within the account is the ledger's
        // way to see the order.
        side.run(&format!(
            "with paid as (
               insert into public.payment (account, seq, cents)
               select 'account-{account}', count(*) + 1, {cents}
               from public.payment where account = 'account-{account}'
               returning *)
             select public.outbox_emit('payment', account, 'payment.captured',
               jsonb_build_object('payment', id, 'account', account, 'seq', seq, 'cents', cents),
               event_id => public.outbox_event_id('payment-' || id, 'captured'))
             from paid"
        ))
        .await
        .map_err(|error| words(&error))?;
        due += Duration::from_secs(1) / rate;
        tokio::time::sleep(due.saturating_duration_since(Instant::now())).await;
    }
    Ok(())
}

/// Enters every record of the topic once. It keeps no offset at all: each time it begins at the
/// beginning, the worst that can happen to a consumer.
async fn keep_books(
    database: &Database,
    settings: &kafka::Settings,
    topic: &str,
) -> Result<(), String> {
    let reader = Reader::new(settings, topic, PARTITIONS)?;
    let extents = reader.extents()?;
    let mut unread: i64 = extents.iter().map(|extent| extent.end - extent.first).sum();
    let side = Side::connect(database, None)
        .await
        .map_err(|error| words(&error))?;
    let mut has_said = false;
    loop {
        if unread <= 0 && !has_said {
            tracing::info!("{READ_TO_THE_END}");
            has_said = true;
        }
        match reader.poll(POLL) {
            Ok(Some(got)) => {
                enter(&side, &got).await?;
                unread -= 1;
            }
            Ok(None) => {}
            // It goes on by itself.
            Err(error) => tracing::info!(%error, "the topic"),
        }
    }
}

async fn enter(side: &Side, got: &Got) -> Result<(), String> {
    let event_id = got.header("event_id").ok_or("a record without event_id")?;
    let body: Value = serde_json::from_slice(&got.value).map_err(|error| error.to_string())?;
    let number = |name: &str| body[name].as_i64().ok_or(format!("no {name}"));
    let account = body["account"].as_str().ok_or("no account")?;
    let db = |error: DbError| words(&error);
    side.run("begin").await.map_err(db)?;
    let claimed = side
        .client
        .query_one(
            "select public.claim_event('ledger', $1::text::uuid)",
            &[&event_id],
        )
        .await
        .map_err(|error| words(&db_error(&error)))?;
    if claimed.get(0) {
        side.client
            .execute(
                "insert into public.ledger (payment, account, seq, cents) values ($1, $2, $3, $4)",
                &[
                    &number("payment")?,
                    &account,
                    &number("seq")?,
                    &number("cents")?,
                ],
            )
            .await
            .map_err(|error| words(&db_error(&error)))?;
    }
    side.run("commit").await.map_err(db)
}
