//! The servers, and what stands between them in one measurement: a database, a topic, a relay.

use std::time::Duration;

use crate::certs::Authority;
use crate::kafka::{Broker, Jvm};
use crate::postgres::{Cluster, Database, Pg, Sql};
use crate::proc::{self, eventually};
use crate::relay::{self, Relay, run_program};

pub const MINUTE: Duration = Duration::from_secs(60);
pub const PARTITIONS: i32 = 12;

pub struct Servers {
    pub cluster: Cluster,
    pub broker: Broker,
    ca: Authority,
    tls_port: u16,
}

impl Servers {
    pub fn start() -> Servers {
        let cluster = Cluster::with(
            Pg::V15,
            &[
                // As a small server has it; a backlog is not cut by checkpoints.
                "shared_buffers = 512MB",
                "max_wal_size = 16GB",
                "wal_compression = off",
            ],
        );
        let ca = Authority::new("bench");
        let signed = ca.sign("localhost", &["127.0.0.1"]);
        cluster.put("server.crt", &signed.certificate());
        cluster.put("server.key", &signed.key());
        let (port, tls_port) = (proc::free_port(), proc::free_port());
        let pem = [signed.key(), signed.certificate()].concat();
        let keystore = ca.put("broker.pem", &pem);
        let open = format!("PLAINTEXT://127.0.0.1:{port},SSL://127.0.0.1:{tls_port}");
        let controller = proc::free_port();
        let lines = [
            format!("listeners={open},CONTROLLER://127.0.0.1:{controller}"),
            format!("advertised.listeners={open}"),
            format!("controller.quorum.voters=1@127.0.0.1:{controller}"),
            "listener.security.protocol.map=PLAINTEXT:PLAINTEXT,SSL:SSL,CONTROLLER:PLAINTEXT"
                .to_owned(),
            "ssl.keystore.type=PEM".to_owned(),
            format!("ssl.keystore.location={}", keystore.display()),
        ];
        let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
        Servers {
            cluster,
            broker: Broker::made(Jvm::Fast, &lines, &[], port),
            ca,
            tls_port,
        }
    }

    /// Whether Postgres offers TLS: whoever does not ask for it would get it.
    pub fn offer_tls(&self, switch: &str) {
        self.cluster.configure(&[&format!("ssl = {switch}")]);
        self.cluster.reload();
        let sql = self.cluster.connect("postgres");
        eventually(MINUTE, "TLS is switched", || {
            (sql.one("show ssl") == switch).then_some(())
        });
    }

    /// Arguments of `run` that lead to the broker's other listener.
    pub fn kafka_over_tls(&self) -> Vec<String> {
        vec![
            "--brokers".to_owned(),
            format!("127.0.0.1:{}", self.tls_port),
            "--kafka".to_owned(),
            "security.protocol=SSL".to_owned(),
            "--kafka".to_owned(),
            format!("ssl.ca.location={}", self.ca.file.display()),
        ]
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
    /// More words of the connection string.
    pub url_words: &'static str,
    /// More arguments of `init` and `run`.
    pub mapping: Vec<&'static str>,
    /// The relay, where it is of another build.
    pub program: Option<String>,
    /// How Kafka is reached, where it is not in the clear.
    pub kafka: Vec<String>,
}

impl<'a> Rig<'a> {
    pub fn new(servers: &'a Servers, socket: Socket) -> Rig<'a> {
        let rig = Rig::bare(servers, socket);
        rig.init();
        rig
    }

    /// A database with nothing in it.
    pub fn bare(servers: &'a Servers, socket: Socket) -> Rig<'a> {
        Rig {
            db: servers.cluster.database(),
            broker: &servers.broker,
            socket,
            url_words: "",
            mapping: Vec::new(),
            program: None,
            kafka: Vec::new(),
        }
    }

    pub fn init(&self) {
        let (url, slot) = (self.url(), self.db.slot());
        let mut args = vec!["init", "--database-url", &url, "--slot", &slot];
        args.extend(&self.mapping);
        run_program(self.program(), &args, &[], MINUTE).expect_code(0);
        self.broker.create_topic(&self.topic(), PARTITIONS);
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

    fn program(&self) -> &str {
        self.program.as_deref().unwrap_or(relay::OWN)
    }

    pub fn url(&self) -> String {
        format!(
            "host={} port={} user=postgres dbname={} {}",
            self.host(),
            self.db.cluster.port,
            self.db.name,
            self.url_words
        )
    }

    pub fn relay(&self) -> Relay {
        let (url, slot) = (self.url(), self.db.slot());
        let (brokers, topic) = (self.broker.bootstrap(), self.topic());
        let mut args = vec!["run", "--database-url", &url, "--slot", &slot];
        args.extend(["--topic", &topic]);
        if self.kafka.is_empty() {
            args.extend(["--brokers", &brokers]);
        }
        args.extend(self.kafka.iter().map(String::as_str));
        args.extend(&self.mapping);
        // For trials: more arguments, separated by blanks.
        let more = std::env::var("BENCH_RUN_ARGS").unwrap_or_default();
        args.extend(more.split_whitespace());
        Relay::start_program(self.program(), &args, &[])
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
