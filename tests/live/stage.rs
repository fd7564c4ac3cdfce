//! What most tests need: a database, a broker, topics of their own, and the relay between them.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use crate::kafka::{Broker, Rec};
use crate::postgres::{Cluster, Database, Pg, Sql};
use crate::proc::{self, eventually_says};
use crate::refusals::says;
use crate::relay::{Ended, Relay, run_to_end};

pub const MINUTE: Duration = Duration::from_secs(60);

pub struct Stage<'a> {
    pub db: Database<'a>,
    pub broker: &'a Broker,
    /// Topics are `<prefix>.<aggregate_type>`: tests share the broker.
    pub prefix: String,
    /// The topic template; `None` is `<prefix>.{aggregate_type}`.
    pub template: Option<String>,
    /// Who the relay is in the database.
    pub user: String,
    /// Where the relay finds the database, if not at its server's own address: a proxy in front.
    pub database_url: Option<String>,
    /// Where the relay finds the broker, if not at its open listener.
    pub brokers: Option<String>,
    /// A program that starts the relay, with what it is told before the relay's command line.
    pub wrapper: Vec<String>,
    /// More arguments of `init` and `run`.
    pub source_args: Vec<String>,
    /// More arguments of `run` alone.
    pub run_args: Vec<String>,
    /// The relay that was started last.
    last_relay: Cell<Option<u32>>,
}

/// For a test of what is said where nothing is healed.
pub const ON_GAP_HALT: [&str; 2] = ["--on-gap", "halt"];

impl Stage<'static> {
    /// On the shared servers.
    pub fn shared(pg: Pg) -> Stage<'static> {
        Stage::on(Cluster::shared(pg), Broker::shared())
    }
}

impl<'a> Stage<'a> {
    pub fn on(cluster: &'a Cluster, broker: &'a Broker) -> Stage<'a> {
        Stage::of(cluster.database(), broker)
    }

    pub fn of(db: Database<'a>, broker: &'a Broker) -> Stage<'a> {
        let prefix = db.name.clone();
        Stage {
            db,
            broker,
            prefix,
            template: None,
            user: "postgres".to_owned(),
            database_url: None,
            brokers: None,
            wrapper: Vec::new(),
            source_args: Vec::new(),
            run_args: Vec::new(),
            last_relay: Cell::new(None),
        }
    }

    /// The topic of an aggregate type.
    pub fn topic(&self, aggregate_type: &str) -> String {
        format!("{}.{aggregate_type}", self.prefix)
    }

    fn source(&self) -> Vec<String> {
        let mut args = vec![
            "--database-url".to_owned(),
            self.database_url
                .clone()
                .unwrap_or_else(|| self.db.url_as(&self.user)),
            "--slot".to_owned(),
            self.db.slot(),
        ];
        args.extend(self.source_args.iter().cloned());
        args
    }

    pub fn try_init(&self) -> Ended {
        let mut args = vec!["init".to_owned()];
        args.extend(self.source());
        // A slot waits for every transaction of the cluster, and other tests write huge ones.
        args.extend(["--lock-timeout".to_owned(), "50s".to_owned()]);
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        run_to_end(&args, &[], MINUTE)
    }

    /// `walrelay init`, and topic `t` with six partitions.
    #[track_caller]
    pub fn init(&self) -> Sql {
        self.try_init().expect_code(0);
        self.broker.create_topic(&self.topic("t"), 6);
        self.db.connect()
    }

    fn run_line(&self) -> Vec<String> {
        let mut args = vec!["run".to_owned()];
        args.extend(self.source());
        args.extend([
            "--brokers".to_owned(),
            self.brokers
                .clone()
                .unwrap_or_else(|| self.broker.bootstrap()),
            "--topic".to_owned(),
            self.template
                .clone()
                .unwrap_or_else(|| format!("{}.{{aggregate_type}}", self.prefix)),
        ]);
        // Relays of other tests run beside this one, and an address can be had but once.
        if !self.run_args.iter().any(|arg| arg == "--http") {
            args.extend(["--http".to_owned(), "off".to_owned()]);
        }
        args.extend(self.run_args.iter().cloned());
        args
    }

    /// A one-shot command on the same database, slot, topics and broker.
    fn report(&self, command: &str, more: &[&str]) -> Ended {
        let mut args = self.run_line();
        args[0] = command.to_owned();
        let of_run = args.iter().position(|arg| arg == "--http");
        args.truncate(
            of_run
                .expect("run says so")
                .min(args.len() - self.run_args.len()),
        );
        if command == "status" {
            // It looks at what is there, not at Kafka.
            let brokers = args.iter().position(|arg| arg == "--brokers");
            let at = brokers.expect("run has them");
            args.drain(at..at + 2);
        }
        let args: Vec<&str> = args
            .iter()
            .map(String::as_str)
            .chain(more.iter().copied())
            .collect();
        run_to_end(&args, &[], MINUTE)
    }

    /// `walrelay check`.
    pub fn check(&self, more: &[&str]) -> Ended {
        self.report("check", more)
    }

    /// `walrelay status`.
    pub fn status(&self, more: &[&str]) -> Ended {
        self.report("status", more)
    }

    /// What both `check` and `run` must refuse, in these words.
    #[track_caller]
    pub fn refused_by_both(&self, code: i32, words: &[&str]) {
        says(&self.check(&[]), code, words);
        says(&self.run_to_end(), code, words);
    }

    /// `walrelay drop`.
    pub fn drop_slot(&self, more: &[&str]) -> Ended {
        let source = self.source();
        let args = ["drop"]
            .into_iter()
            .chain(source.iter().map(String::as_str));
        let args: Vec<&str> = args.chain(more.iter().copied()).collect();
        run_to_end(&args, &[], MINUTE)
    }

    fn drain_line(&self, more: &[&str]) -> Vec<String> {
        let mut args = self.run_line();
        args[0] = "drain".to_owned();
        args.extend(more.iter().map(|arg| (*arg).to_owned()));
        args
    }

    /// `walrelay drain` that ends by itself.
    pub fn drain(&self, more: &[&str]) -> Ended {
        let args = self.drain_line(more);
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        run_to_end(&args, &[], 2 * MINUTE)
    }

    /// `walrelay drain` in the background.
    pub fn draining(&self, more: &[&str]) -> Relay {
        let args = self.drain_line(more);
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        Relay::start(&args, &[])
    }

    /// `walrelay run` in the background.
    pub fn run(&self) -> Relay {
        let args = self.run_line();
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let relay = Relay::start_under(&self.wrapper, &args, &[]);
        self.last_relay.set(Some(relay.pid()));
        relay
    }

    /// `walrelay run` that must end by itself.
    pub fn run_to_end(&self) -> Ended {
        let args = self.run_line();
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        run_to_end(&args, &[], MINUTE)
    }

    /// Waits until a topic holds at least `n` records; gives up at once when the relay has ended.
    #[track_caller]
    pub fn wait_count(&self, aggregate_type: &str, n: usize, deadline: Duration) {
        self.broker
            .wait_count_while(&self.topic(aggregate_type), n, deadline, || {
                self.expect_relay();
            });
    }

    /// Fails when the relay that was started last has ended by itself.
    #[track_caller]
    pub fn expect_relay(&self) {
        if let Some(pid) = self.last_relay.get() {
            assert!(!proc::ended_unnoticed(pid), "the relay ended by itself");
        }
    }

    /// Waits until everything that is committed by now is confirmed to Postgres.
    #[track_caller]
    pub fn wait_confirmed(&self, deadline: Duration) {
        let sql = self.db.connect();
        let target = sql.one("select pg_current_wal_flush_lsn()");
        let slot = self.db.slot();
        let confirmed = RefCell::new(String::new());
        let what = || format!("the slot stands at {}, not {target}", confirmed.borrow());
        eventually_says(deadline, what, || {
            self.expect_relay();
            let mut rows = sql.rows(&format!(
                "select confirmed_flush_lsn, confirmed_flush_lsn >= '{target}'
                 from pg_replication_slots where slot_name = '{slot}'"
            ));
            let row = rows.pop()?;
            *confirmed.borrow_mut() = row[0].clone().unwrap_or_default();
            (row[1].as_deref() == Some("t")).then_some(())
        });
    }

    /// `walrelay run` in the background, with a fault that is planned: see `src/fault.rs`.
    pub fn run_with_fault(&self, fault: &str) -> Relay {
        let args = self.run_line();
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let relay = Relay::start(&args, &[("WALRELAY_FAULT", fault)]);
        self.last_relay.set(Some(relay.pid()));
        relay
    }

    /// `walrelay dead-letters`.
    pub fn dead_letters(&self, task: &[&str]) -> Ended {
        let source = self.source();
        let args = ["dead-letters"].into_iter().chain(task.iter().copied());
        let args: Vec<&str> = args.chain(source.iter().map(String::as_str)).collect();
        run_to_end(&args, &[], MINUTE)
    }

    /// All records of topic `t`, once there are at least `n`.
    #[track_caller]
    pub fn records(&self, n: usize) -> Vec<Rec> {
        self.wait_count("t", n, MINUTE);
        self.broker.read_all(&self.topic("t"))
    }
}
