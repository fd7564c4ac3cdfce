//! A payments system as an adopter would write it: a shop that writes payments and their events in
//! one transaction, a ledger and a payout service that consume them with `migrations/consumer.sql`,
//! and the real relay between. Each is a process of its own, so that each can be killed.

mod actor;
mod judge;

use std::fmt;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::{Offset, TopicPartitionList};

pub use actor::{Job, Payment, Point, Role};
pub use judge::{Balance, judge};

use crate::kafka::Broker;
use crate::postgres::{Cluster, Database, Sql};
use crate::proc::{self, AtParentDeath, Proc, RunAs, eventually, eventually_says};
use crate::relay::{Relay, run_to_end};
use crate::stage::MINUTE;

pub const CONSUMER_KIT: &str = include_str!("../../migrations/consumer.sql");
pub const PARTITIONS: i32 = 6;
const RESTART_AFTER: Duration = Duration::from_millis(300);

const PAYMENT: &str = "create table payment (
  id      bigint primary key,
  account text   not null,
  seq     bigint not null,
  cents   bigint not null
)";
/// Nothing here is unique: an effect that is done twice is there twice.
const EFFECTS: &str = "
create table ledger_entry (
  n        bigint generated always as identity,
  payment  bigint not null,
  account  text   not null,
  seq      bigint not null,
  cents    bigint not null
);
create index on ledger_entry (payment);
create table ledger_balance (account text primary key, payments bigint not null, cents bigint not null);
create table payout (payment bigint not null, cents bigint not null);
create index on payout (payment)";

pub struct System<'a> {
    pub source: Database<'a>,
    pub effects: Database<'a>,
    pub broker: &'a Broker,
    /// Where the relay reaches the broker: it may be a proxy.
    relay_brokers: String,
    pub topic: String,
}

impl<'a> System<'a> {
    pub fn new(cluster: &'a Cluster, broker: &'a Broker, relay_brokers: String) -> System<'a> {
        let source = cluster.database();
        let effects = cluster.database();
        let (url, slot) = (source.url(), source.slot());
        let init = [
            "init",
            "--database-url",
            &url,
            "--slot",
            &slot,
            "--lock-timeout",
            "50s",
        ];
        run_to_end(&init, &[], MINUTE).expect_code(0);
        source.connect().run(PAYMENT);
        effects.connect().run(&format!("{CONSUMER_KIT};{EFFECTS}"));
        let topic = format!("{}.payment", source.name);
        broker.create_topic(&topic, PARTITIONS);
        System {
            source,
            effects,
            broker,
            relay_brokers,
            topic,
        }
    }

    /// `walrelay run`, with what the test wants of it in its environment.
    pub fn relay(&self, env: &[(&str, &str)]) -> Relay {
        let url = self.source.url();
        let slot = self.source.slot();
        let template = format!("{}.{{aggregate_type}}", self.source.name);
        let args = [
            "run",
            "--database-url",
            &url,
            "--slot",
            &slot,
            "--brokers",
            &self.relay_brokers,
            "--topic",
            &template,
            "--http",
            "off",
        ];
        Relay::start(&args, env)
    }

    /// Starts a process of the system.
    pub fn start(&self, role: Role, pause_at: Option<(Point, i64)>) -> Actor {
        Actor::start(&Job {
            port: self.source.cluster.port,
            source: self.source.name.clone(),
            effects: self.effects.name.clone(),
            brokers: self.broker.bootstrap(),
            topic: self.topic.clone(),
            role,
            pause_at,
        })
    }

    /// One of the two consumers, with its own group.
    pub fn consumer(&self, name: &str, instance: usize) -> Role {
        Role::Consumer {
            name: name.to_owned(),
            group: self.group(name),
            instance: format!("{}-{instance}", self.group(name)),
        }
    }

    pub fn group(&self, name: &str) -> String {
        format!("{}-{name}", self.source.name)
    }

    /// Makes one payment, to its end.
    #[track_caller]
    pub fn pay(&self, id: i64) {
        let mut payer = self.start(Role::Payer { id }, None);
        payer.ends_well();
    }

    pub fn event_id(&self, sql: &Sql, payment: i64) -> String {
        sql.one(&format!(
            "select outbox_event_id('payment-{payment}', 'captured')"
        ))
    }

    /// Waits until all that is committed is confirmed to Postgres.
    #[track_caller]
    pub fn wait_confirmed(&self, deadline: Duration) {
        let sql = self.source.connect();
        let target = sql.one("select pg_current_wal_flush_lsn()");
        eventually(deadline, format!("the slot reaches {target}"), || {
            (self.is_past(&sql, &target)).then_some(())
        });
    }

    pub fn is_past(&self, sql: &Sql, lsn: &str) -> bool {
        sql.one(&format!(
            "select confirmed_flush_lsn >= '{lsn}' from pg_replication_slots where slot_name = '{}'",
            self.source.slot()
        )) == "t"
    }

    /// Where a consumer has to come to.
    pub fn ends(&self, name: &str) -> Ends<'_> {
        Ends {
            offsets: Offsets::of(self.broker, &self.group(name)),
            topic: &self.topic,
        }
    }

    /// Waits until a consumer's committed offsets are at the ends of all partitions.
    #[track_caller]
    pub fn wait_caught_up(&self, name: &str, deadline: Duration) {
        let ends = self.ends(name);
        let what = || format!("{name} is at {ends}");
        eventually_says(deadline, what, || ends.is_reached().then_some(()));
    }
}

pub struct Ends<'a> {
    offsets: Offsets,
    topic: &'a str,
}

impl Ends<'_> {
    pub fn is_reached(&self) -> bool {
        self.offsets.is_caught_up(self.topic)
    }
}

/// How far it has come.
impl fmt::Display for Ends<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.offsets.committed(self.topic))
    }
}

/// What a consumer group has committed.
pub struct Offsets {
    consumer: BaseConsumer,
}

impl Offsets {
    pub fn of(broker: &Broker, group: &str) -> Offsets {
        let consumer = ClientConfig::new()
            .set("bootstrap.servers", broker.bootstrap())
            .set("group.id", group)
            .set("log_level", "2")
            .create()
            .expect("a consumer");
        Offsets { consumer }
    }

    fn partitions(&self, topic: &str) -> Option<i32> {
        let metadata = self
            .consumer
            .fetch_metadata(Some(topic), Duration::from_secs(5))
            .ok()?;
        i32::try_from(metadata.topics().first()?.partitions().len()).ok()
    }

    /// The next offset of each partition; 0 where nothing is committed. `None`: nobody answered.
    pub fn committed(&self, topic: &str) -> Option<Vec<i64>> {
        let partitions = self.partitions(topic)?;
        let mut asked = TopicPartitionList::new();
        asked.add_partition_range(topic, 0, partitions - 1);
        let answer = self
            .consumer
            .committed_offsets(asked, Duration::from_secs(5))
            .ok()?;
        let offset = |n| match answer.find_partition(topic, n)?.offset() {
            Offset::Offset(next) => Some(next),
            _ => Some(0),
        };
        (0..partitions).map(offset).collect()
    }

    pub fn is_caught_up(&self, topic: &str) -> bool {
        let Some(committed) = self.committed(topic) else {
            return false;
        };
        committed.iter().zip(0..).all(|(next, partition)| {
            let ends = self
                .consumer
                .fetch_watermarks(topic, partition, Duration::from_secs(5));
            ends.is_ok_and(|(_, high)| *next == high)
        })
    }
}

/// A running process of the system. Dropping it kills it.
pub struct Actor {
    process: Proc,
    log: PathBuf,
    started: Instant,
}

impl Actor {
    fn start(job: &Job) -> Actor {
        let log = proc::dir("actor").join("log");
        let own = std::env::current_exe().expect("this test's own binary");
        let mut command = proc::command(own, RunAs::Me, AtParentDeath::Kill);
        command
            .args(["payments::actor::actor", "--exact", "--ignored"])
            .args(["--nocapture", "--test-threads=1"])
            .env(
                actor::JOB,
                serde_json::to_string(job).expect("a plain struct"),
            );
        Actor {
            process: Proc::start(command, &log),
            log,
            started: Instant::now(),
        }
    }

    pub fn said(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Waits until it stands at the point where it was told to.
    #[track_caller]
    pub fn wait_paused(&mut self) {
        let log = self.log.clone();
        eventually(MINUTE, "the process comes to its point", || {
            let said = fs::read_to_string(&log).unwrap_or_default();
            assert!(self.process.ended().is_none(), "it ended:\n{said}");
            said.contains(actor::PAUSED).then_some(())
        });
    }

    #[track_caller]
    fn ends_well(&mut self) {
        let status = self.process.wait(MINUTE);
        let is_well = status.is_some_and(|status| status.success());
        assert!(is_well, "{status:?}:\n{}", self.said());
    }

    /// Has it ended, and is it time to start it again? One that cannot run is not started all the time.
    pub fn is_due(&mut self) -> bool {
        self.process.ended().is_some() && self.started.elapsed() > RESTART_AFTER
    }

    pub fn kill9(&mut self) {
        self.process.kill9();
    }
}
