//! A real Apache Kafka, one node. Tests share one broker, each with topics of its own; a test that
//! stops or kills it starts its own.

use std::cell::Cell;
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use rdkafka::admin::{
    AdminClient, AdminOptions, NewPartitions, NewTopic, ResourceSpecifier, TopicReplication,
};
use rdkafka::client::DefaultClientContext;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::message::{BorrowedMessage, Headers, Message};
use rdkafka::{Offset, TopicPartitionList};
use rustix::process::Signal;

use crate::postgres::runtime;
use crate::proc::{self, AtParentDeath, Proc, RunAs, eventually, eventually_says};

const PATIENCE: Duration = Duration::from_secs(30);

/// What a consumer sees of one record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rec {
    pub partition: i32,
    pub offset: i64,
    pub key: Option<Vec<u8>>,
    pub value: Option<Vec<u8>>,
    pub headers: Vec<(String, Option<Vec<u8>>)>,
    pub timestamp_ms: Option<i64>,
}

impl Rec {
    fn of(message: &BorrowedMessage<'_>) -> Rec {
        Rec {
            partition: message.partition(),
            offset: message.offset(),
            key: message.key().map(<[u8]>::to_vec),
            value: message.payload().map(<[u8]>::to_vec),
            headers: message.headers().map_or_else(Vec::new, |headers| {
                headers
                    .iter()
                    .map(|h| (h.key.to_owned(), h.value.map(<[u8]>::to_vec)))
                    .collect()
            }),
            timestamp_ms: message.timestamp().to_millis(),
        }
    }

    /// The value of the only header of that name, as text.
    pub fn header(&self, name: &str) -> Option<String> {
        let mut all = self.headers.iter().filter(|(n, _)| n == name);
        let found = all.next()?;
        assert!(all.next().is_none(), "two headers {name}");
        found.1.as_deref().map(lossy)
    }

    pub fn event_id(&self) -> String {
        self.header("event_id")
            .expect("every record carries event_id")
    }

    pub fn key_text(&self) -> String {
        self.key.as_deref().map_or_else(String::new, lossy)
    }

    pub fn value_text(&self) -> String {
        self.value.as_deref().map_or_else(String::new, lossy)
    }
}

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// How the broker's JVM is set up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Jvm {
    /// Starts fast and stays small: for tests.
    Small,
    /// Compiles what is hot as well as it can, as a broker in production would: for measuring.
    Fast,
}

impl Jvm {
    fn args(self) -> &'static [&'static str] {
        match self {
            Jvm::Small => &["-Xms128m", "-Xmx384m", "-XX:TieredStopAtLevel=1"],
            Jvm::Fast => &["-Xms512m", "-Xmx512m"],
        }
    }
}

pub struct Broker {
    /// Its own address, and those of the other nodes of its cluster.
    bootstrap: String,
    dir: PathBuf,
    jvm: Jvm,
    server: Mutex<Option<Proc>>,
}

impl Broker {
    /// The broker that tests share. Never stop it.
    pub fn shared() -> &'static Broker {
        static SHARED: OnceLock<Broker> = OnceLock::new();
        SHARED.get_or_init(Broker::start)
    }

    pub fn start() -> Broker {
        Broker::with(&[])
    }

    /// A broker of one's own with more lines in `server.properties`.
    pub fn with(properties: &[&str]) -> Broker {
        Broker::on(Jvm::Small, properties)
    }

    /// A broker of one's own that will be frozen, and not killed: it is not taken for dead
    /// meanwhile. With the short session that lets a killed one back in soon, a machine that is
    /// slow enough fences it again and again after the thaw, and its topics have no leader.
    pub fn to_be_frozen() -> Broker {
        Broker::with(&["broker.session.timeout.ms=120000"])
    }

    pub fn on(jvm: Jvm, properties: &[&str]) -> Broker {
        Broker::made(jvm, properties, &[], proc::free_port())
    }

    /// With SCRAM users, each as `SCRAM-SHA-256=[name=…,password=…]`: they are made with the
    /// storage. `port`: where the listener PLAINTEXT is, if the properties have listeners of their
    /// own.
    pub fn with_users(properties: &[&str], scram: &[&str], port: u16) -> Broker {
        Broker::made(Jvm::Small, properties, scram, port)
    }

    /// With all of that.
    pub fn made(jvm: Jvm, properties: &[&str], scram: &[&str], port: u16) -> Broker {
        let broker = Broker::prepared(jvm, properties, scram, port);
        broker.up();
        broker
    }

    /// One of several nodes, not started: they start together.
    pub fn node(id: usize, properties: &[&str], port: u16, bootstrap: &str) -> Broker {
        let mut broker = Broker::prepared(Jvm::Small, properties, &[], port);
        bootstrap.clone_into(&mut broker.bootstrap);
        // The storage was formatted as node 1's.
        let path = broker.dir.join("data/meta.properties");
        let meta = fs::read_to_string(&path).expect("a formatted storage");
        let lines = meta.lines().map(|line| match line.split_once('=') {
            Some(("node.id", _)) => format!("node.id={id}\n"),
            // Each directory of a cluster has its own id, 16 bytes in Base64.
            Some(("directory.id", all)) => format!("directory.id={id}{}\n", &all[1..]),
            Some(_) | None => format!("{line}\n"),
        });
        fs::write(&path, lines.collect::<String>()).expect("the directory is ours");
        broker
    }

    fn prepared(jvm: Jvm, properties: &[&str], scram: &[&str], port: u16) -> Broker {
        let servers = proc::servers();
        let recipe = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/servers");
        let dir = proc::dir("kafka");
        if scram.is_empty() {
            copy_storage(&servers.join("kafka-storage"), &dir.join("data"));
        }
        let template = fs::read_to_string(recipe.join("server.properties")).expect("is committed");
        let mut text = template
            .replace("@PORT@", &port.to_string())
            .replace("@CONTROLLER_PORT@", &proc::free_port().to_string())
            .replace("@DIR@", &dir.to_string_lossy());
        for line in properties {
            text.push_str(line);
            text.push('\n');
        }
        fs::write(dir.join("server.properties"), text).expect("the directory is ours");
        if !scram.is_empty() {
            format_storage(&dir.join("server.properties"), scram);
        }
        Broker {
            bootstrap: format!("127.0.0.1:{port}"),
            dir,
            jvm,
            server: Mutex::new(None),
        }
    }

    pub fn bootstrap(&self) -> String {
        self.bootstrap.clone()
    }

    /// Starts the broker and waits until it serves.
    pub fn up(&self) {
        let said = self.log().len();
        self.launch();
        self.wait_until_it_serves(said);
    }

    /// Starts it without waiting for anything.
    pub fn launch(&self) {
        let jars = proc::servers().join("kafka");
        let archive = proc::servers().join("kafka.jsa");
        let mut server = self.server();
        assert!(server.is_none(), "it runs already");
        let mut command = proc::command("java", RunAs::Me, AtParentDeath::Kill);
        command.args(self.jvm.args()).arg("-XX:+UseSerialGC");
        if archive.exists() {
            command.arg(format!("-XX:SharedArchiveFile={}", archive.display()));
        }
        command
            .arg(log4j())
            .arg("-cp")
            .arg(format!("{}/*", jars.display()))
            .arg("kafka.Kafka")
            .arg(self.dir.join("server.properties"));
        *server = Some(Proc::start(command, &self.dir.join("log")));
    }

    /// Waits for its word, behind so many bytes of its log.
    pub fn wait_until_it_serves(&self, said: usize) {
        let mut server = self.server();
        let running = server.as_mut().expect("it was launched");
        eventually(Duration::from_secs(240), "Kafka starts", || {
            assert!(
                running.ended().is_none(),
                "Kafka ended while starting:\n{}",
                self.log()
            );
            self.log()[said..]
                .contains("Kafka Server started")
                .then_some(())
        });
    }

    pub fn is_up(&self) -> bool {
        self.server().is_some()
    }

    /// Changes a text in `server.properties`; it counts from the next `up`.
    pub fn reconfigure(&self, from: &str, to: &str) {
        let path = self.dir.join("server.properties");
        let text = fs::read_to_string(&path).expect("we wrote it");
        assert!(text.contains(from), "{from} is not in server.properties");
        fs::write(&path, text.replace(from, to)).expect("the directory is ours");
    }

    pub fn pid(&self) -> u32 {
        self.server().as_ref().expect("it runs").pid()
    }

    pub fn log(&self) -> String {
        lossy(&fs::read(self.dir.join("log")).unwrap_or_default())
    }

    pub fn kill9(&self) {
        let mut server = self.server();
        server.take().expect("it runs").kill9();
    }

    /// SIGTERM: what it leads is handed to others first.
    pub fn stop(&self) {
        let mut server = self.server();
        let mut running = server.take().expect("it runs");
        running.signal(Signal::TERM);
        if running.wait(PATIENCE).is_none() {
            running.kill9();
        }
    }

    /// Freezes it: connections stay open and nobody answers.
    pub fn freeze(&self) {
        self.signal(Signal::STOP);
    }

    pub fn thaw(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        self.server().as_ref().expect("it runs").signal(signal);
    }

    fn server(&self) -> MutexGuard<'_, Option<Proc>> {
        self.server
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn client(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        config
            .set("bootstrap.servers", self.bootstrap())
            .set("allow.auto.create.topics", "false")
            .set("log_level", "2");
        config
    }

    fn admin(&self) -> AdminClient<DefaultClientContext> {
        self.client().create().expect("an admin client")
    }

    pub fn create_topic(&self, name: &str, partitions: i32) {
        self.create_topic_with(name, partitions, &[]);
    }

    /// Makes a topic and waits until every partition has a leader.
    pub fn create_topic_with(&self, name: &str, partitions: i32, config: &[(&str, &str)]) {
        self.create_replicated(name, partitions, 1, config);
    }

    /// The same with so many replicas of each partition.
    pub fn create_replicated(
        &self,
        name: &str,
        partitions: i32,
        replicas: i32,
        config: &[(&str, &str)],
    ) {
        let mut topic = NewTopic::new(name, partitions, TopicReplication::Fixed(replicas));
        for (key, value) in config {
            topic = topic.set(key, value);
        }
        let made = runtime().block_on(self.admin().create_topics([&topic], &AdminOptions::new()));
        for result in made.expect("the broker answers") {
            result.unwrap_or_else(|(name, code)| panic!("cannot create {name}: {code}"));
        }
        let consumer = self.consumer();
        eventually(PATIENCE, format!("{name} has leaders"), || {
            (partition_count(&consumer, name) == Some(partitions)).then_some(())
        });
    }

    /// Deletes a topic and waits until the cluster knows nothing of it.
    pub fn delete_topic(&self, name: &str) {
        let gone = runtime().block_on(self.admin().delete_topics(&[name], &AdminOptions::new()));
        for result in gone.expect("the broker answers") {
            result.unwrap_or_else(|(name, code)| panic!("cannot delete {name}: {code}"));
        }
        let consumer = self.consumer();
        eventually(PATIENCE, format!("{name} is gone"), || {
            partition_count(&consumer, name).is_none().then_some(())
        });
    }

    /// Adds partitions until there are so many, and waits until each has a leader.
    pub fn add_partitions(&self, name: &str, partitions: i32) {
        let total = usize::try_from(partitions).expect("more than none");
        let more = NewPartitions::new(name, total);
        let made = runtime().block_on(
            self.admin()
                .create_partitions([&more], &AdminOptions::new()),
        );
        for result in made.expect("the broker answers") {
            result.unwrap_or_else(|(name, code)| panic!("cannot add to {name}: {code}"));
        }
        let consumer = self.consumer();
        eventually(PATIENCE, format!("{name} has more leaders"), || {
            (partition_count(&consumer, name) == Some(partitions)).then_some(())
        });
    }

    /// The leader and the in-sync replicas of each partition, as node numbers.
    pub fn replicas(&self, topic: &str) -> Vec<(i32, Vec<i32>)> {
        let consumer = self.consumer();
        let Ok(metadata) = consumer.fetch_metadata(Some(topic), Duration::from_secs(5)) else {
            return Vec::new();
        };
        let topics = metadata.topics().iter().filter(|t| t.name() == topic);
        topics
            .flat_map(rdkafka::metadata::MetadataTopic::partitions)
            .map(|p| (p.leader(), p.isr().to_vec()))
            .collect()
    }

    /// Changes a topic's settings.
    pub fn alter_topic(&self, name: &str, config: &[(&str, &str)]) {
        let mut change = rdkafka::admin::AlterConfig::new(ResourceSpecifier::Topic(name));
        for (key, value) in config {
            change = change.set(key, value);
        }
        let done = runtime().block_on(self.admin().alter_configs([&change], &AdminOptions::new()));
        for result in done.expect("the broker answers") {
            result.unwrap_or_else(|(_, code)| panic!("cannot alter {name}: {code}"));
        }
    }

    pub fn topic_exists(&self, name: &str) -> bool {
        partition_count(&self.consumer(), name).is_some()
    }

    pub fn partitions(&self, name: &str) -> Option<i32> {
        partition_count(&self.consumer(), name)
    }

    fn consumer(&self) -> BaseConsumer {
        self.client()
            .set("group.id", "reader")
            .set("enable.auto.commit", "false")
            .set("auto.offset.reset", "earliest")
            .set("fetch.wait.max.ms", "50")
            .set("check.crcs", "true")
            .create()
            .expect("a consumer")
    }

    /// How many records a topic holds, from the offsets alone.
    pub fn count(&self, topic: &str) -> usize {
        let consumer = self.consumer();
        let highs = watermarks(&consumer, topic);
        let total: i64 = highs.iter().map(|(_, low, high)| high - low).sum();
        usize::try_from(total).expect("low is never above high")
    }

    /// Waits until a topic holds at least `n` records.
    #[track_caller]
    pub fn wait_count(&self, topic: &str, n: usize, deadline: Duration) {
        self.wait_count_while(topic, n, deadline, || {});
    }

    /// The same; `check` panics when there is nothing to wait for any more.
    #[track_caller]
    pub fn wait_count_while(&self, topic: &str, n: usize, deadline: Duration, check: impl Fn()) {
        let consumer = self.consumer();
        let seen = Cell::new(0);
        let what = || {
            let replicas = self.replicas(topic);
            format!(
                "{topic} holds {} records of {n}; leader and replicas in sync: {replicas:?}",
                seen.get()
            )
        };
        eventually_says(deadline, what, || {
            check();
            let now: i64 = watermarks(&consumer, topic)
                .iter()
                .map(|(_, low, high)| high - low)
                .sum();
            seen.set(usize::try_from(now).expect("low is below high"));
            (seen.get() >= n).then_some(())
        });
    }

    /// Every record from the beginning to the high watermarks of now, each partition in order.
    pub fn read_all(&self, topic: &str) -> Vec<Rec> {
        let consumer = self.consumer();
        let mut open: HashMap<i32, i64> = HashMap::new();
        let mut from = TopicPartitionList::new();
        for (partition, low, high) in watermarks(&consumer, topic) {
            if high > low {
                open.insert(partition, high);
                from.add_partition_offset(topic, partition, Offset::Beginning)
                    .expect("a beginning");
            }
        }
        consumer.assign(&from).expect("an assignment");
        let mut records = Vec::new();
        let until = std::time::Instant::now() + Duration::from_secs(120);
        while !open.is_empty() {
            assert!(
                std::time::Instant::now() < until,
                "{topic}: {open:?} not reached"
            );
            let Some(message) = consumer.poll(Duration::from_millis(200)) else {
                continue;
            };
            // An error here is a passing one: the deadline above judges.
            let Ok(message) = message else { continue };
            let record = Rec::of(&message);
            if let Some(high) = open.get(&record.partition) {
                if record.offset + 1 >= *high {
                    open.remove(&record.partition);
                }
                records.push(record);
            }
        }
        records.sort_by_key(|r| (r.partition, r.offset));
        records
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        *self.server() = None;
        if std::env::var_os("WALRELAY_KEEP").is_none() {
            let _ = fs::remove_dir_all(&self.dir);
        }
    }
}

fn log4j() -> String {
    let recipe = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/servers");
    format!(
        "-Dlog4j2.configurationFile={}",
        recipe.join("log4j2.properties").display()
    )
}

fn format_storage(properties: &Path, scram: &[&str]) {
    let mut command = proc::command("java", RunAs::Me, AtParentDeath::Kill);
    command
        .args([
            "-XX:TieredStopAtLevel=1",
            "-XX:+UseSerialGC",
            &log4j(),
            "-cp",
        ])
        .arg(format!("{}/*", proc::servers().join("kafka").display()))
        .args(["kafka.tools.StorageTool", "format"])
        .args(["-t", "MkU3OEVBNTcwNTJENDM2Qg", "-c"])
        .arg(properties);
    for user in scram {
        command.args(["--add-scram", user]);
    }
    proc::output(command);
}

fn copy_storage(from: &Path, to: &Path) {
    fs::create_dir(to).expect("a new directory");
    let entries = fs::read_dir(from).unwrap_or_else(|_| {
        panic!(
            "no formatted storage in {}: run tests/servers/fetch.sh",
            from.display()
        )
    });
    for entry in entries {
        let entry = entry.expect("a readable directory");
        fs::copy(entry.path(), to.join(entry.file_name())).expect("a small file");
    }
}

/// The number of partitions once all have leaders; `None` where there is no such topic.
fn partition_count(consumer: &BaseConsumer, topic: &str) -> Option<i32> {
    let metadata = consumer
        .fetch_metadata(Some(topic), Duration::from_secs(5))
        .ok()?;
    let topic = metadata.topics().iter().find(|t| t.name() == topic)?;
    if topic.error().is_some() || topic.partitions().iter().any(|p| p.leader() < 0) {
        return None;
    }
    i32::try_from(topic.partitions().len())
        .ok()
        .filter(|n| *n > 0)
}

/// (partition, low, high) of each partition; a topic that is not there has none.
fn watermarks(consumer: &BaseConsumer, topic: &str) -> Vec<(i32, i64, i64)> {
    let Some(partitions) = partition_count(consumer, topic) else {
        return Vec::new();
    };
    (0..partitions)
        .filter_map(|partition| {
            let (low, high) = consumer
                .fetch_watermarks(topic, partition, Duration::from_secs(10))
                .ok()?;
            Some((partition, low, high))
        })
        .collect()
}
