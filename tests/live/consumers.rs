//! The consumer kit: `migrations/consumer.sql` by itself, and the recipes of `deploy/consumers` as
//! they stand there, killed where it hurts.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::thread;

use rdkafka::ClientConfig;
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{BaseProducer, BaseRecord, Producer};

use crate::kafka::Broker;
use crate::kills::proxy::{Proxy, Way, broker_behind_a_proxy};
use crate::payments::{CONSUMER_KIT, Offsets};
use crate::postgres::{Cluster, Database, Pg, Sql};
use crate::proc::{self, AtParentDeath, Proc, RunAs, eventually, eventually_says};
use crate::stage::{MINUTE, Stage};

const EVENT: &str = "0a0a0a0a-0000-4000-8000-000000000001";

fn kit(pg: Pg) -> Database<'static> {
    let db = Cluster::shared(pg).database();
    db.connect().run(CONSUMER_KIT);
    db
}

fn claim(sql: &Sql, consumer: &str, event: &str) -> bool {
    sql.one(&format!("select claim_event('{consumer}', '{event}')")) == "t"
}

/// Waits until a backend waits for another's transaction.
fn waits(watcher: &Sql, backend: &str) {
    eventually(MINUTE, "the second claim waits for the first", || {
        let blocked = format!("select cardinality(pg_blocking_pids({backend}))");
        (watcher.one(&blocked) != "0").then_some(())
    });
}

// --- The SQL.

#[test]
fn u01_who_loses_a_race_for_an_event_waits_and_is_told_what_came_of_it() {
    for pg in [Pg::V15, Pg::V18] {
        let db = kit(pg);
        let (first, second, watcher) = (db.connect(), db.connect(), db.connect());
        for (end, is_ours) in [("commit", false), ("rollback", true)] {
            watcher.run("truncate processed_events");
            first.run("begin");
            assert!(claim(&first, "ledger", EVENT));
            let backend = second.backend_pid();
            let second_is_told = thread::scope(|scope| {
                let told = scope.spawn(|| claim(&second, "ledger", EVENT));
                waits(&watcher, &backend);
                first.run(end);
                told.join().expect("no unique violation comes out of it")
            });
            assert_eq!(
                second_is_told, is_ours,
                "{pg:?}: the first ended with {end}"
            );
            assert!(claim(&first, "payout", EVENT), "consumers share nothing");
            assert!(!claim(&second, "payout", EVENT), "it is done");
        }
    }
}

#[test]
fn u01_many_consumers_at_once_have_each_event_once() {
    const EVENTS: usize = 200;
    let db = kit(Pg::V18);
    let winners: usize = thread::scope(|scope| {
        let racers: Vec<_> = (0..6)
            .map(|_| {
                scope.spawn(|| {
                    let sql = db.connect();
                    let events = (0..EVENTS).map(|n| format!("0b000000-0000-4000-8000-{n:012}"));
                    events.filter(|event| claim(&sql, "ledger", event)).count()
                })
            })
            .collect();
        let counts = racers.into_iter().map(|r| r.join().expect("no error"));
        counts.sum()
    });
    assert_eq!(winners, EVENTS);
}

#[test]
fn claims_are_pruned_in_batches_and_never_below_the_replay_window() {
    let db = kit(Pg::V15);
    let sql = db.connect();
    sql.run(
        "insert into processed_events
         select 'ledger', gen_random_uuid(), now() - n * interval '1 hour'
         from generate_series(1, 1000) n",
    );
    let left = || sql.one("select count(*) from processed_events");
    let refused = sql
        .try_run("call prune_processed_events('6 days')")
        .expect_err("a replay of the seventh day would repeat effects");
    let said = refused.as_db_error().expect("the server's");
    assert!(said.message().contains("7 days"), "{said}");
    assert!(said.message().contains("6 days"), "{said}");
    assert_eq!(left(), "1000");

    // 30 days are 720 hours: 720 to 1000 are older, the first by the moment that has passed.
    assert_eq!(
        sql.one("call prune_processed_events(batch => 50)"),
        "281",
        "three hundred in six batches"
    );
    assert_eq!(left(), "719");
    assert_eq!(sql.one("call prune_processed_events('8 days')"), "528");
    assert_eq!(left(), "191");

    let policy = |set: &str| sql.try_run(&format!("update processed_events_policy set {set}"));
    policy("replay_window = '40 days'").expect_err("longer than the retention");
    policy("retention = '5 days'").expect_err("shorter than the window");
    policy("replay_window = '1 day'").expect("nothing older can come again");
    sql.run("call prune_processed_events('2 days')");
    assert_eq!(left(), "47");
    sql.try_run(
        "insert into processed_events_policy (replay_window, retention) values ('1 day', '1 day')",
    )
    .expect_err("there is one policy");
}

// --- The recipes.

/// Effects of the recipes: unlike a ledger with unique payments, it shows what is done twice.
const LEDGER: &str =
    "create table ledger (event_id uuid not null, payment bigint not null, cents bigint not null)";

#[derive(Clone, Copy, Debug)]
enum Recipe {
    Python,
    Java,
}

fn recipes() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/consumers")
}

/// The first Python that has both libraries: Debian's packages are of Debian's own.
fn python() -> &'static str {
    let has_both = |python: &&str| {
        let imports = Command::new(python)
            .args(["-c", "import confluent_kafka, psycopg2"])
            .output();
        imports.is_ok_and(|output| output.status.success())
    };
    let found = ["/usr/bin/python3", "python3"].into_iter().find(has_both);
    found.expect("make deps installs python3-confluent-kafka and python3-psycopg2")
}

/// The class path of the compiled recipe.
fn java_class_path() -> &'static str {
    static BUILT: OnceLock<String> = OnceLock::new();
    BUILT.get_or_init(|| {
        let clients = proc::servers().join("clients");
        let out = proc::dir("recipe");
        let libraries = format!(
            "{}:{}/*",
            clients.join("postgresql.jar").display(),
            proc::servers().join("kafka").display()
        );
        // The compiler reads no wildcards.
        let kafka = fs::read_dir(proc::servers().join("kafka")).expect("fetched");
        let kafka = kafka
            .flatten()
            .map(|entry| entry.path())
            .find(|path| path.to_string_lossy().contains("kafka-clients"))
            .expect("the client is among the server's jars");
        // Not javac: a JRE is all that a test machine needs.
        let mut compile = proc::command("java", RunAs::Me, AtParentDeath::Kill);
        compile
            .args(["-XX:TieredStopAtLevel=1", "-jar"])
            .arg(clients.join("ecj.jar"))
            .args(["-17", "-d"])
            .arg(&out)
            .arg("-cp")
            .arg(kafka)
            .arg(recipes().join("Consumer.java"));
        proc::output(compile);
        format!("{}:{libraries}", out.display())
    })
}

struct Running {
    process: Proc,
    log: PathBuf,
}

impl Running {
    fn said(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }
}

/// One recipe with a database and a topic of its own.
struct Trial<'a> {
    recipe: Recipe,
    stage: Stage<'a>,
    effects: Database<'a>,
    topic: String,
    group: String,
    /// The recipe's way to the broker.
    proxy: &'a Proxy,
}

impl<'a> Trial<'a> {
    fn new(recipe: Recipe, broker: &'a Broker, proxy: &'a Proxy) -> Trial<'a> {
        let stage = Stage::on(Cluster::shared(Pg::V18), broker);
        stage.init();
        let effects = Cluster::shared(Pg::V18).database();
        effects.connect().run(&format!("{CONSUMER_KIT};{LEDGER}"));
        Trial {
            recipe,
            topic: stage.topic("t"),
            group: format!("{}-ledger", effects.name),
            stage,
            effects,
            proxy,
        }
    }

    fn start(&self) -> Running {
        let (mut command, url) = match self.recipe {
            Recipe::Python => {
                let mut python = proc::command(python(), RunAs::Me, AtParentDeath::Kill);
                python.arg(recipes().join("consumer.py"));
                (python, ("DATABASE_URL", self.effects.url()))
            }
            Recipe::Java => {
                let mut java = proc::command("java", RunAs::Me, AtParentDeath::Kill);
                java.args(["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx128m"])
                    .args(["-cp", java_class_path(), "Consumer"]);
                let url = format!(
                    "jdbc:postgresql://127.0.0.1:{}/{}?user=postgres",
                    self.effects.cluster.port, self.effects.name
                );
                (java, ("JDBC_URL", url))
            }
        };
        command
            .env("CONSUMER", &self.group)
            .env("TOPIC", &self.topic)
            .env("BROKERS", self.proxy.bootstrap())
            .env(url.0, url.1);
        let log = proc::dir("recipe").join("log");
        Running {
            process: Proc::start(command, &log),
            log,
        }
    }

    /// Waits until the recipe's committed offsets are at the ends of its topic.
    fn caught_up(&self, running: &mut Running) {
        let offsets = Offsets::of(self.stage.broker, &self.group);
        let log = running.log.clone();
        let what = || {
            let said = fs::read_to_string(&log).unwrap_or_default();
            format!("at {:?}:\n{said}", offsets.committed(&self.topic))
        };
        eventually_says(MINUTE, what, || {
            assert!(running.process.ended().is_none(), "{}", running.said());
            offsets.is_caught_up(&self.topic).then_some(())
        });
    }

    fn count(&self, from: &str) -> usize {
        let count = self.effects.connect();
        let count = count.one(&format!("select count(*) from {from}"));
        count.parse().expect("a count")
    }

    /// A record with these headers, besides the relay's own.
    fn produce(&self, partition: i32, headers: &[(&str, Option<&str>)], payload: &str) {
        let producer: BaseProducer = ClientConfig::new()
            .set("bootstrap.servers", self.stage.broker.bootstrap())
            .create()
            .expect("a producer");
        let mut all = OwnedHeaders::new();
        for (key, value) in headers {
            all = all.insert(Header { key, value: *value });
        }
        let record = BaseRecord::to(&self.topic)
            .partition(partition)
            .key("ada")
            .payload(payload)
            .headers(all);
        producer
            .send(record)
            .map_err(|(error, _)| error)
            .expect("there is room");
        producer.flush(MINUTE).expect("it is delivered");
    }

    /// The recipe's insert waits behind our lock: it has claimed the event and is mid-effect.
    fn is_mid_effect(&self, watcher: &Sql) {
        eventually(MINUTE, "the effect waits for the lock", || {
            let waiting = "select count(*) from pg_stat_activity
                 where datname = current_database() and wait_event_type = 'Lock'
                   and query like 'insert into ledger%'";
            (watcher.one(waiting) == "1").then_some(())
        });
    }
}

#[test]
fn the_python_recipe_has_one_effect_whatever_is_killed_or_repeated() {
    has_one_effect_whatever_is_killed_or_repeated(Recipe::Python);
}

#[test]
fn the_java_recipe_has_one_effect_whatever_is_killed_or_repeated() {
    has_one_effect_whatever_is_killed_or_repeated(Recipe::Java);
}

/// Cases U02 and U03.
fn has_one_effect_whatever_is_killed_or_repeated(recipe: Recipe) {
    let (broker, proxy) = broker_behind_a_proxy();
    let trial = Trial::new(recipe, &broker, &proxy);
    let mut relay = trial.stage.run();
    let mut consumer = trial.start();

    emitted_twice(&trial);
    trial.stage.wait_count("t", 1, MINUTE);
    trial.caught_up(&mut consumer);
    assert_eq!(trial.count("ledger"), 1, "{}", consumer.said());
    identity_is_the_event_id(&trial, &mut consumer);
    killed_before_the_commit(&trial, &mut consumer);
    killed_before_the_offset(&trial, &mut consumer);
    relay.stop();
}

const PAYLOAD: &str = r#"{"payment": 42, "cents": 1250}"#;

/// The same operation twice is one row, and so one record.
fn emitted_twice(trial: &Trial<'_>) {
    let source = trial.stage.db.connect();
    for _ in 0..2 {
        source.run(&format!(
            "select outbox_emit('t', 'ada', 'payment.captured', '{PAYLOAD}',
                                event_id => outbox_event_id('payment-42', 'captured'))"
        ));
    }
    assert_eq!(source.one("select count(*) from outbox"), "1");
}

fn identity_is_the_event_id(trial: &Trial<'_>, consumer: &mut Running) {
    let source = trial.stage.db.connect();
    let event = source.one("select event_id from outbox");
    fn id(id: &str) -> [(&str, Option<&str>); 2] {
        [("event_id", Some(id)), ("replayed", Some("true"))]
    }
    // The very event again: elsewhere, and marked, and with another content.
    for partition in 0..3 {
        trial.produce(partition, &id(&event), PAYLOAD);
    }
    trial.produce(
        0,
        &id(&event.to_uppercase()),
        "no JSON: it is not even looked at",
    );
    trial.caught_up(consumer);
    assert_eq!(trial.count("ledger"), 1, "a repetition had an effect");

    // Another event with the same payload, at whatever place.
    trial.produce(0, &id("0c000000-0000-4000-8000-000000000001"), PAYLOAD);
    trial.caught_up(consumer);
    assert_eq!(trial.count("ledger"), 2, "identity is not the payload");

    // Without an identity: not "new".
    let nameless: [&[(&str, Option<&str>)]; 5] = [
        &[("event_type", Some("x"))],
        &[("event_id", None)],
        &[("event_id", Some("7"))],
        &[("event_id", Some("1-1-1-1-1"))],
        &[("event_id", Some(&event)), ("event_id", Some(EVENT))],
    ];
    for headers in nameless {
        trial.produce(1, headers, PAYLOAD);
    }
    trial.caught_up(consumer);
    assert_eq!(trial.count("ledger"), 2);
    assert_eq!(trial.count("processed_events"), 2);
    assert_eq!(trial.count("rejected_records"), nameless.len());
    let kept = format!(
        "rejected_records where value = '{PAYLOAD}'::bytea and key = 'ada'::bytea and reason <> ''"
    );
    assert_eq!(trial.count(&kept), nameless.len());
    let headers = r#"rejected_records where headers = '[["event_id", "7"]]'"#;
    assert_eq!(trial.count(headers), 1);
}

/// Case U02: nothing is committed. The restarted one does it.
fn killed_before_the_commit(trial: &Trial<'_>, consumer: &mut Running) {
    let (blocker, watcher) = (trial.effects.connect(), trial.effects.connect());
    let before = trial.count("ledger");
    blocker.run("begin; lock table ledger in exclusive mode");
    trial.produce(
        2,
        &[("event_id", Some("0d000000-0000-4000-8000-000000000001"))],
        PAYLOAD,
    );
    trial.is_mid_effect(&watcher);
    consumer.process.kill9();
    // The dead one's session still waits, and holds its claim.
    let mut restarted = trial.start();
    blocker.run("rollback");
    trial.caught_up(&mut restarted);
    assert_eq!(trial.count("ledger"), before + 1);
    *consumer = restarted;
}

/// Case U02: the effect is committed, and the broker does not hear of it.
fn killed_before_the_offset(trial: &Trial<'_>, consumer: &mut Running) {
    let (blocker, watcher) = (trial.effects.connect(), trial.effects.connect());
    let before = trial.count("ledger");
    blocker.run("begin; lock table ledger in exclusive mode");
    trial.produce(
        2,
        &[("event_id", Some("0e000000-0000-4000-8000-000000000001"))],
        PAYLOAD,
    );
    trial.is_mid_effect(&watcher);
    trial.proxy.set(Way::SwallowsOffsets);
    blocker.run("rollback");
    eventually(MINUTE, "the effect is committed", || {
        (trial.count("ledger") == before + 1).then_some(())
    });
    eventually(MINUTE, "the offset is on its way", || {
        (trial.proxy.swallowed() > 0).then_some(())
    });
    consumer.process.kill9();
    trial.proxy.set(Way::Open);
    let offsets = Offsets::of(trial.stage.broker, &trial.group);
    assert!(
        !offsets.is_caught_up(&trial.topic),
        "the offset was committed"
    );
    let mut restarted = trial.start();
    trial.caught_up(&mut restarted);
    assert_eq!(trial.count("ledger"), before + 1, "{}", restarted.said());
    *consumer = restarted;
}
