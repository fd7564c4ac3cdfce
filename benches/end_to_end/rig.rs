//! The servers, and what stands between them in one measurement: a database, a topic, a relay.

use std::time::Duration;

use crate::kafka::{Broker, Jvm};
use crate::postgres::{Cluster, Database, Pg, Sql};
use crate::proc::{self, eventually};
use crate::relay::{Relay, run_to_end};

pub const MINUTE: Duration = Duration::from_secs(60);
pub const PARTITIONS: i32 = 12;

pub struct Servers {
    pub cluster: Cluster,
    pub broker: Broker,
}

impl Servers {
    pub fn start() -> Servers {
        Servers {
            cluster: Cluster::with(
                Pg::V15,
                &[
                    // As a small server has it; a backlog is not cut by checkpoints.
                    "shared_buffers = 512MB",
                    "max_wal_size = 16GB",
                    "wal_compression = off",
                ],
            ),
            broker: Broker::on(Jvm::Fast, &[]),
        }
    }
}

/// How Postgres is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Socket {
    Tcp,
    Unix,
}

/// A database with an outbox, a slot, and a topic `<name>.t`.
pub struct Rig<'a> {
    pub db: Database<'a>,
    pub broker: &'a Broker,
    pub socket: Socket,
}

impl<'a> Rig<'a> {
    pub fn new(servers: &'a Servers, socket: Socket) -> Rig<'a> {
        let rig = Rig {
            db: servers.cluster.database(),
            broker: &servers.broker,
            socket,
        };
        let (url, slot) = (rig.url(), rig.db.slot());
        let args = ["init", "--database-url", &url, "--slot", &slot];
        run_to_end(&args, &[], MINUTE).expect_code(0);
        rig.broker.create_topic(&rig.topic(), PARTITIONS);
        rig
    }

    pub fn topic(&self) -> String {
        format!("{}.t", self.db.name)
    }

    /// The host for `pg_recvlogical` and the relay: an address or the socket's directory.
    pub fn host(&self) -> String {
        match self.socket {
            Socket::Tcp => "127.0.0.1".to_owned(),
            Socket::Unix => self.db.cluster.socket_dir().display().to_string(),
        }
    }

    fn url(&self) -> String {
        format!(
            "host={} port={} user=postgres dbname={}",
            self.host(),
            self.db.cluster.port,
            self.db.name
        )
    }

    pub fn relay(&self) -> Relay {
        let (url, slot) = (self.url(), self.db.slot());
        let (brokers, topic) = (self.broker.bootstrap(), self.topic());
        let mut args = vec!["run", "--database-url", &url, "--slot", &slot];
        args.extend(["--brokers", &brokers, "--topic", &topic]);
        // For trials: more arguments, separated by blanks.
        let more = std::env::var("BENCH_RUN_ARGS").unwrap_or_default();
        args.extend(more.split_whitespace());
        Relay::start(&args, &[])
    }

    /// A relay that has the stream.
    pub fn relay_streaming(&self) -> Relay {
        let mut relay = self.relay();
        relay.wait_for_text("streaming from", MINUTE);
        relay
    }

    /// A second slot on the same log, for a raw reader.
    pub fn raw_slot(&self) -> String {
        let name = format!("raw_{}_{}", self.db.name, proc::unique());
        self.db.connect().run(&format!(
            "select pg_create_logical_replication_slot('{name}', 'pgoutput')"
        ));
        name
    }

    /// Until this position of a slot is confirmed; `look` is called at every look.
    pub fn wait_confirmed(&self, sql: &Sql, end: &str, relay: &mut Relay, mut look: impl FnMut()) {
        let slot = self.db.slot();
        let query = format!(
            "select confirmed_flush_lsn >= '{end}' from pg_replication_slots
             where slot_name = '{slot}'"
        );
        eventually(10 * MINUTE, "the backlog is drained", || {
            relay.assert_alive();
            look();
            (sql.one(&query) == "t").then_some(())
        });
    }

    /// The process that serves a slot.
    pub fn walsender(&self, sql: &Sql, slot: &str) -> Option<u32> {
        sql.one(&format!(
            "select active_pid from pg_replication_slots where slot_name = '{slot}'"
        ))
        .parse()
        .ok()
    }
}
