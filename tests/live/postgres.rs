//! Real Postgres clusters. Tests share one a version, each with a database of its own; a test that
//! stops or kills the server starts its own.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use futures_util::SinkExt;
use rustix::process::Signal;
use tokio::runtime::{Builder, Handle};
use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, NoTls, SimpleQueryMessage};

use crate::proc::{self, AtParentDeath, Proc, RunAs, eventually};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Pg {
    V15,
    V16,
    V17,
    V18,
}

impl Pg {
    pub const ALL: [Pg; 4] = [Pg::V15, Pg::V16, Pg::V17, Pg::V18];

    pub fn number(self) -> &'static str {
        match self {
            Pg::V15 => "15",
            Pg::V16 => "16",
            Pg::V17 => "17",
            Pg::V18 => "18",
        }
    }

    pub fn bin(self, name: &str) -> PathBuf {
        let bin = proc::servers().join("postgres").join(self.number());
        let bin = bin.canonicalize().unwrap_or_else(|_| {
            panic!("no Postgres {} : run tests/servers/fetch.sh", self.number())
        });
        bin.join("bin").join(name)
    }
}

/// `pg_ctl stop -m`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    Fast,
    Immediate,
}

pub struct Cluster {
    pub pg: Pg,
    pub port: u16,
    dir: PathBuf,
    server: Mutex<Option<Proc>>,
}

impl Cluster {
    /// The cluster of that version which tests share. Never stop it.
    pub fn shared(pg: Pg) -> &'static Cluster {
        static SHARED: [OnceLock<Cluster>; 4] = [const { OnceLock::new() }; 4];
        SHARED[pg as usize].get_or_init(|| Cluster::start(pg))
    }

    /// A cluster of one's own.
    pub fn start(pg: Pg) -> Cluster {
        Cluster::with(pg, &[])
    }

    /// A cluster of one's own with more lines in `postgresql.conf`.
    pub fn with(pg: Pg, conf: &[&str]) -> Cluster {
        Cluster::within(pg, proc::dir(&format!("pg{}", pg.number())), conf)
    }

    /// In this directory, which is empty.
    pub fn within(pg: Pg, dir: PathBuf, conf: &[&str]) -> Cluster {
        if proc::unprivileged().is_some() {
            own(&dir);
        }
        let cluster = Cluster {
            pg,
            port: proc::free_port(),
            dir,
            server: Mutex::new(None),
        };
        // Not a copy of a template: two clusters must not have one system identifier.
        let mut initdb = proc::command(pg.bin("initdb"), RunAs::Unprivileged, AtParentDeath::Kill);
        initdb
            .args(["--no-sync", "-A", "trust", "-U", "postgres", "-E", "UTF8"])
            .args(["--locale=C", "-D"])
            .arg(cluster.data())
            .current_dir(&cluster.dir);
        proc::output(initdb);
        cluster.configure(&[
            "wal_level = logical",
            "listen_addresses = '127.0.0.1'",
            "max_wal_senders = 40",
            "max_replication_slots = 40",
            "max_slot_wal_keep_size = '50GB'",
            "max_prepared_transactions = 20",
            "max_connections = 100",
            "shared_buffers = 32MB",
            "checkpoint_timeout = 30min",
            "log_min_messages = warning",
            "log_replication_commands = on",
            "log_line_prefix = '%m [%p] %q%u@%d/%a '",
            "autovacuum = off",
        ]);
        cluster.configure(conf);
        cluster.up();
        cluster
    }

    /// A standby of `primary`, which is stopped for a moment: it answers, and waits for WAL that
    /// does not come.
    pub fn standby(primary: &Cluster) -> Cluster {
        let cluster = Cluster::standing_by(primary);
        cluster.up();
        cluster
    }

    /// A copy of `primary`, not started yet, that will be a standby.
    fn standing_by(primary: &Cluster) -> Cluster {
        primary.stop(Stop::Fast);
        let copy = primary.copy_data();
        primary.up();
        let dir = proc::dir(&format!("pg{}", primary.pg.number()));
        if proc::unprivileged().is_some() {
            own(&dir);
        }
        let cluster = Cluster {
            pg: primary.pg,
            port: proc::free_port(),
            dir,
            server: Mutex::new(None),
        };
        fs::rename(&copy, cluster.data()).expect("both are in one directory");
        cluster.put("standby.signal", b"");
        cluster
    }

    /// A standby of `primary` that follows it through physical slot `sb`, which it makes there, and
    /// copies its failover slots. `primary` is stopped for a moment.
    pub fn replica(primary: &Cluster) -> Cluster {
        let replicates = format!(
            "host=127.0.0.1 port={} user=postgres dbname=postgres application_name=sb",
            primary.port
        );
        primary
            .connect("postgres")
            .run("select pg_create_physical_replication_slot('sb', true)");
        let cluster = Cluster::standing_by(primary);
        // Slots of the primary that came with the copy are not the standby's.
        let slots = cluster.data().join("pg_replslot");
        let _ = fs::remove_dir_all(slots.join("sb"));
        cluster.configure(&[
            &format!("primary_conninfo = '{replicates}'"),
            "primary_slot_name = 'sb'",
            "hot_standby_feedback = on",
            "sync_replication_slots = on",
            "synchronized_standby_slots = ''",
        ]);
        cluster.up();
        cluster
    }

    /// Starts the server as `pg_upgrade` does, to ask it what `pg_upgrade` asks.
    pub fn up_for_upgrade(&self) {
        let started = self.try_up(&["-b", "-c", "max_slot_wal_keep_size=-1"]);
        started.unwrap_or_else(|log| panic!("it does not start for an upgrade:\n{log}"));
    }

    pub fn data(&self) -> PathBuf {
        self.dir.join("data")
    }

    /// The directory of the Unix socket.
    pub fn socket_dir(&self) -> &Path {
        &self.dir
    }

    /// Lines at the end of `postgresql.conf`; they count from the next (re)start or `reload`.
    pub fn configure(&self, lines: &[&str]) {
        append(&self.data().join("postgresql.conf"), lines);
    }

    /// Replaces `pg_hba.conf`.
    pub fn hba(&self, lines: &[&str]) {
        let path = self.data().join("pg_hba.conf");
        fs::write(&path, "").expect("the data directory is ours to change");
        append(&path, lines);
        self.reload();
    }

    /// Puts a file into the data directory, readable by the server alone.
    pub fn put(&self, name: &str, content: &[u8]) {
        let path = self.data().join(name);
        fs::write(&path, content).expect("the data directory is ours to change");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("it is ours");
        if proc::unprivileged().is_some() {
            own(&path);
        }
    }

    pub fn reload(&self) {
        if let Some(server) = self.server().as_ref() {
            server.signal(Signal::HUP);
        }
    }

    pub fn pid(&self) -> u32 {
        self.server().as_ref().expect("it runs").pid()
    }

    /// Starts the server and waits until it answers.
    pub fn up(&self) {
        // Also retried: the port was free when it was picked, and a killed server's shared memory
        // is in use until its last backend has gone.
        let mut last = String::new();
        for _ in 0..5 {
            match self.try_up(&[]) {
                Ok(()) => return,
                Err(log) => last = log,
            }
        }
        panic!("Postgres {} does not start:\n{last}", self.pg.number());
    }

    fn try_up(&self, more: &[&str]) -> Result<(), String> {
        let mut server = self.server();
        assert!(server.is_none(), "it runs already");
        let mut command = proc::command(
            self.pg.bin("postgres"),
            RunAs::Unprivileged,
            AtParentDeath::Quit,
        );
        command
            .arg("-D")
            .arg(self.data())
            .args(["-p", &self.port.to_string(), "-k"])
            .arg(&self.dir)
            .args(more)
            .current_dir(&self.dir);
        let mut running = Proc::start(command, &self.log_path());
        let answers = eventually(Duration::from_secs(60), "Postgres answers", || {
            if running.ended().is_some() {
                return Some(false);
            }
            Sql::try_connect(self.port, "postgres", "postgres")
                .is_ok()
                .then_some(true)
        });
        if !answers {
            return Err(self.log());
        }
        *server = Some(running);
        Ok(())
    }

    fn log_path(&self) -> PathBuf {
        self.dir.join("log")
    }

    /// All that the server logged.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.log_path()).unwrap_or_default()).into_owned()
    }

    /// Asks for a shutdown without waiting for it.
    pub fn ask_to_stop(&self, how: Stop) {
        let server = self.server();
        let server = server.as_ref().expect("it runs");
        server.signal(match how {
            Stop::Fast => Signal::INT,
            Stop::Immediate => Signal::QUIT,
        });
    }

    /// True when the server has ended within `deadline`.
    pub fn stopped_within(&self, deadline: Duration) -> bool {
        let mut server = self.server();
        let ended = server.as_mut().is_none_or(|s| s.wait(deadline).is_some());
        if ended {
            *server = None;
        }
        ended
    }

    pub fn stop(&self, how: Stop) {
        self.ask_to_stop(how);
        assert!(
            self.stopped_within(Duration::from_secs(60)),
            "a {how:?} shutdown hangs:\n{}",
            self.log()
        );
    }

    pub fn restart(&self, how: Stop) {
        self.stop(how);
        self.up();
    }

    /// Kills the postmaster and all its children at one blow.
    pub fn kill9(&self) {
        let mut server = self.server();
        let mut running = server.take().expect("it runs");
        let children = proc::children(running.pid());
        running.kill9();
        for child in children {
            proc::send(child, Signal::KILL);
        }
    }

    /// A copy of the data directory. Take it while the server is stopped, or bracket it with
    /// `pg_backup_start` and accept a crash recovery.
    pub fn copy_data(&self) -> PathBuf {
        let copy = self.dir.join(format!("copy-{}", proc::unique()));
        copy_tree(&self.data(), &copy);
        copy
    }

    /// Puts a copy in the place of the data directory of the stopped server.
    pub fn roll_back_to(&self, copy: &Path) {
        assert!(self.server().is_none(), "stop it first");
        fs::remove_dir_all(self.data()).expect("the old data can be removed");
        copy_tree(copy, &self.data());
        let _ = fs::remove_file(self.data().join("postmaster.pid"));
    }

    /// A superuser's session in a database of this cluster.
    pub fn connect(&self, dbname: &str) -> Sql {
        Sql::connect(self.port, dbname, "postgres")
    }

    /// An empty database for one test.
    pub fn database(&self) -> Database<'_> {
        self.database_with("")
    }

    /// The same with options of CREATE DATABASE (encoding, template).
    pub fn database_with(&self, options: &str) -> Database<'_> {
        let name = format!("t{}_{}", std::process::id(), proc::unique());
        self.connect("postgres")
            .run(&format!("create database {name} {options}"));
        Database {
            cluster: self,
            name,
        }
    }

    fn server(&self) -> MutexGuard<'_, Option<Proc>> {
        self.server
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let mut server = self.server();
        if let Some(running) = server.as_mut() {
            // Immediate, so that its shared memory is given back; then without mercy.
            running.signal(Signal::QUIT);
            if running.wait(Duration::from_secs(10)).is_none() {
                let children = proc::children(running.pid());
                running.kill9();
                for child in children {
                    proc::send(child, Signal::KILL);
                }
            }
        }
        *server = None;
        if std::env::var_os("WALRELAY_KEEP").is_none() {
            let _ = fs::remove_dir_all(&self.dir);
        }
    }
}

fn append(path: &Path, lines: &[&str]) {
    let mut text = fs::read_to_string(path).expect("the file is there");
    for line in lines {
        text.push_str(line);
        text.push('\n');
    }
    fs::write(path, text).expect("the data directory is ours to change");
}

fn copy_tree(from: &Path, to: &Path) {
    let mut cp = std::process::Command::new("cp");
    cp.arg("-a").arg(from).arg(to);
    proc::output(cp);
}

fn own(path: &Path) {
    let mut id = std::process::Command::new("id");
    id.args(["-u", proc::unprivileged().expect("asked only as root")]);
    let uid: u32 = proc::output(id).trim().parse().expect("a user id");
    chown(path, Some(uid), None).expect("root may give a file away");
}

/// A database of one test; dropped with it, its slots too.
pub struct Database<'a> {
    pub cluster: &'a Cluster,
    pub name: String,
}

impl Database<'_> {
    /// How the relay reaches it, as the superuser.
    pub fn url(&self) -> String {
        self.url_as("postgres")
    }

    pub fn url_as(&self, user: &str) -> String {
        format!(
            "postgresql://{user}@127.0.0.1:{}/{}",
            self.cluster.port, self.name
        )
    }

    pub fn connect(&self) -> Sql {
        self.cluster.connect(&self.name)
    }

    /// Slots are the cluster's, so each test has a name of its own.
    pub fn slot(&self) -> String {
        format!("s_{}", self.name)
    }

    /// `confirmed_flush_lsn` as text.
    pub fn confirmed(&self) -> String {
        self.connect().one(&format!(
            "select confirmed_flush_lsn from pg_replication_slots where slot_name = '{}'",
            self.slot()
        ))
    }
}

impl Drop for Database<'_> {
    fn drop(&mut self) {
        let Ok(sql) = Sql::try_connect(self.cluster.port, "postgres", "postgres") else {
            return; // The server is gone: a cluster of its own, and the test is over.
        };
        // Best effort: a slot that is still held goes with the cluster.
        let _ = sql.try_run(&format!(
            "select pg_terminate_backend(active_pid) from pg_replication_slots
             where database = '{0}' and active_pid is not null",
            self.name
        ));
        for _ in 0..50 {
            let dropped = sql.try_run(&format!(
                "select pg_drop_replication_slot(slot_name) from pg_replication_slots
                 where database = '{0}'",
                self.name
            ));
            if dropped.is_ok() {
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let _ = sql.try_run(&format!("drop database {} with (force)", self.name));
    }
}

/// The runtime behind all sessions: one thread that drives their sockets.
pub fn runtime() -> &'static Handle {
    static RUNTIME: OnceLock<Handle> = OnceLock::new();
    RUNTIME.get_or_init(|| {
        let runtime = Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime can be built");
        let handle = runtime.handle().clone();
        std::thread::spawn(move || runtime.block_on(std::future::pending::<()>()));
        handle
    })
}

/// A session, for tests that just want to say SQL.
pub struct Sql {
    client: Client,
}

pub type Row = Vec<Option<String>>;

impl Sql {
    pub fn connect(port: u16, dbname: &str, user: &str) -> Sql {
        Sql::try_connect(port, dbname, user)
            .unwrap_or_else(|error| panic!("cannot connect to {dbname} as {user}: {error:?}"))
    }

    pub fn try_connect(port: u16, dbname: &str, user: &str) -> Result<Sql, tokio_postgres::Error> {
        let config = format!(
            "host=127.0.0.1 port={port} user={user} dbname={dbname} connect_timeout=5
             application_name=test"
        );
        runtime().block_on(async {
            let (client, connection) = tokio_postgres::connect(&config, NoTls).await?;
            tokio::spawn(connection);
            Ok(Sql { client })
        })
    }

    /// Any number of statements, separated by semicolons.
    pub fn run(&self, sql: &str) {
        self.try_run(sql)
            .unwrap_or_else(|error| panic!("{sql}: {error:?}"));
    }

    pub fn try_run(&self, sql: &str) -> Result<(), tokio_postgres::Error> {
        runtime().block_on(self.client.batch_execute(sql))
    }

    /// One statement with parameters; the number of rows it touched.
    pub fn exec(
        &self,
        sql: &str,
        params: &[&(dyn ToSql + Sync)],
    ) -> Result<u64, tokio_postgres::Error> {
        runtime().block_on(self.client.execute(sql, params))
    }

    /// All rows of all statements, each value as text.
    pub fn rows(&self, sql: &str) -> Vec<Row> {
        self.try_rows(sql)
            .unwrap_or_else(|error| panic!("{sql}: {error:?}"))
    }

    pub fn try_rows(&self, sql: &str) -> Result<Vec<Row>, tokio_postgres::Error> {
        let messages = runtime().block_on(self.client.simple_query(sql))?;
        Ok(messages
            .iter()
            .filter_map(|message| match message {
                SimpleQueryMessage::Row(row) => Some(
                    (0..row.len())
                        .map(|i| row.get(i).map(str::to_owned))
                        .collect(),
                ),
                _ => None,
            })
            .collect())
    }

    /// The one value of the one row, NULL as the empty string.
    pub fn one(&self, sql: &str) -> String {
        let mut rows = self.rows(sql);
        assert_eq!(rows.len(), 1, "{sql} gives {} rows", rows.len());
        rows.remove(0)
            .into_iter()
            .next()
            .expect("a column")
            .unwrap_or_default()
    }

    /// `copy … from stdin` with these bytes, in a transaction of its own.
    pub fn copy_in(&self, sql: &str, data: &str) -> Result<u64, tokio_postgres::Error> {
        runtime().block_on(async {
            // Of itself the client reports success at CommandComplete, which in the extended
            // protocol comes before the commit: a server that dies in between takes it back.
            self.client.batch_execute("begin").await?;
            let sink = self.client.copy_in(sql).await?;
            let mut sink = std::pin::pin!(sink);
            sink.send(bytes::Bytes::copy_from_slice(data.as_bytes()))
                .await?;
            let rows = sink.finish().await?;
            self.client.batch_execute("commit").await?;
            Ok(rows)
        })
    }

    pub fn backend_pid(&self) -> String {
        self.one("select pg_backend_pid()")
    }
}
