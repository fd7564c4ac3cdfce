//! What is away, broken or lying, and what comes of it: the rows of the README's table that have
//! no test elsewhere. Each ends with every event in its topic once, in the order of its key.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use crate::check::check;
use crate::faults_postgres::{ends_exactly_once, more};
use crate::http::{self, Ready};
use crate::kafka::Broker;
use crate::load::{Load, Plan, Shape};
use crate::postgres::{Cluster, Pg, Sql, Stop};
use crate::proc::{self, Disk, eventually, eventually_says, free_port};
use crate::proxy::Proxy;
use crate::stage::{MINUTE, Stage};
use crate::trio::Trio;

/// A fault's duration is what is tested.
fn for_the_fault(duration: Duration) {
    thread::sleep(duration);
}

fn serve_http(stage: &mut Stage<'_>) {
    stage
        .run_args
        .extend(["--http".to_owned(), "127.0.0.1:0".to_owned()]);
}

/// Through `println`, which the test harness captures, unlike a write to stdout.
#[allow(clippy::print_stdout)]
fn not_run(why: &str) {
    println!("not run: {why}");
}

/// Waits until `/readyz` names this condition.
#[track_caller]
fn names(address: &str, condition: &str) {
    let what = || format!("not ready for {condition}: {}", Ready::of(address).body);
    eventually_says(2 * MINUTE, what, || {
        (Ready::of(address).holds(condition) == Some(false)).then_some(())
    });
}

#[track_caller]
fn is_ready(address: &str) {
    let what = || format!("ready: {}", Ready::of(address).body);
    eventually_says(2 * MINUTE, what, || {
        (Ready::of(address).status == 200).then_some(())
    });
}

/// What was committed by now arrives.
#[track_caller]
fn catches_up(stage: &Stage<'_>, load: &Load) {
    stage.wait_count("t", load.committed(), 2 * MINUTE);
}

// ---- brokers -------------------------------------------------------------------------------

/// README: brokers are restarted one after the other. A partition's leader changes with each.
#[test]
fn three_brokers_restarted_one_after_the_other_cost_nothing() {
    let trio = Trio::lent();
    let stage = Stage::on(Cluster::shared(Pg::V18), &trio.nodes[0]);
    stage.try_init().expect_code(0);
    let topic = stage.topic("t");
    let two = [("min.insync.replicas", "2")];
    trio.nodes[0].create_replicated(&topic, 6, 3, &two);
    let mut relay = stage.run();
    let load = Load::start(&stage.db, &Plan::new(3, Shape::Mixed).a_second(200));
    more(&load, 200);
    for (node, is_orderly) in trio.nodes.iter().zip([true, false, true]) {
        trio.wait_in_sync(&topic, 3);
        catches_up(&stage, &load);
        if is_orderly {
            node.stop();
        } else {
            node.kill9();
        }
        // While it is down, the others lead.
        more(&load, 50);
        catches_up(&stage, &load);
        node.up();
    }
    ends_exactly_once(&stage, load, &mut relay);
}

/// README: fewer replicas are in sync than the topic wants.
#[test]
fn too_few_replicas_hold_up_their_topic_and_lose_nothing() {
    let trio = Trio::lent();
    let mut stage = Stage::on(Cluster::shared(Pg::V15), &trio.nodes[0]);
    serve_http(&mut stage);
    stage.try_init().expect_code(0);
    let topic = stage.topic("t");
    trio.nodes[0].create_replicated(&topic, 6, 3, &[("min.insync.replicas", "3")]);
    let mut relay = stage.run();
    let address = http::address(&mut relay);
    let load = Load::start(&stage.db, &Plan::new(2, Shape::Single).a_second(100));
    catches_up(&stage, &load);
    is_ready(&address);
    let victim = trio.node(trio.leader(&topic, 0));
    victim.kill9();
    names(&address, "kafka");
    let held_up = stage.db.confirmed();
    more(&load, 100);
    relay.assert_alive();
    assert_eq!(stage.db.confirmed(), held_up, "the slot moved meanwhile");
    victim.up();
    catches_up(&stage, &load);
    is_ready(&address);
    ends_exactly_once(&stage, load, &mut relay);
}

/// README: Kafka is away: it is down, refuses or hangs. Ten real minutes of it under load (case K11), with a restart of Postgres.
#[test]
#[ignore = "a quarter of an hour: make soak"]
fn soak_ten_minutes_without_a_broker_cost_nothing() {
    const RSS_MAX: u64 = 96 << 20;
    let cluster = Cluster::start(Pg::V17);
    let broker = Broker::start();
    let stage = Stage::on(&cluster, &broker);
    stage.init();
    let mut relay = stage.run();
    let load = Load::start(&stage.db, &Plan::new(4, Shape::Single).a_second(500));
    more(&load, 1000);
    broker.kill9();
    for_the_fault(2 * MINUTE);
    cluster.restart(Stop::Fast);
    let early = relay.memory();
    for_the_fault(8 * MINUTE);
    relay.assert_alive();
    let late = relay.memory();
    assert!(late.peak <= RSS_MAX, "peak RSS {} MB", late.peak >> 20);
    assert!(late.resident <= early.resident + (4 << 20), "memory grew");
    broker.up();
    let committed = load.stop();
    stage.wait_count("t", committed.len(), 10 * MINUTE);
    stage.wait_confirmed(MINUTE);
    relay.stop();
    assert!(relay.memory().peak <= RSS_MAX);
    check(&stage.broker.read_all(&stage.topic("t")), &committed).assert_exactly_once();
}

/// README: Kafka is away: it is down, refuses or hangs. For seconds up to half a minute, again and
/// again; every other time Postgres is restarted meanwhile.
#[test]
#[ignore = "ten minutes: make soak"]
fn soak_a_broker_that_hangs_again_and_again_costs_nothing() {
    let cluster = Cluster::start(Pg::V18);
    let broker = Broker::to_be_frozen();
    let stage = Stage::on(&cluster, &broker);
    stage.init();
    let mut relay = stage.run();
    let load = Load::start(&stage.db, &Plan::new(2, Shape::Single).a_second(200));
    let began = Instant::now();
    let mut round = 0;
    while began.elapsed() < 10 * MINUTE {
        round += 1;
        catches_up(&stage, &load);
        broker.freeze();
        // The client's own time-outs lie at 10 and 15 s, ours at 20: before, at and behind each.
        for_the_fault(Duration::from_millis(1_000 + (round * 2_700) % 27_000));
        if round % 2 == 0 {
            cluster.restart(Stop::Fast);
        }
        broker.thaw();
        relay.assert_alive();
    }
    ends_exactly_once(&stage, load, &mut relay);
}

// ---- the network ---------------------------------------------------------------------------

/// The connections through the proxy are forgotten, without a word to either end.
fn are_made_anew(mut stage: Stage<'_>, proxy: &Proxy, condition: &str) {
    serve_http(&mut stage);
    stage.init();
    let mut relay = stage.run();
    let address = http::address(&mut relay);
    let load = Load::start(&stage.db, &Plan::new(2, Shape::Single).a_second(100));
    stage.wait_count("t", 100, MINUTE);
    is_ready(&address);
    assert!(proxy.forget() > 0);
    names(&address, condition);
    catches_up(&stage, &load);
    is_ready(&address);
    ends_exactly_once(&stage, load, &mut relay);
}

/// README: packets are dropped without a word. Those to Kafka.
#[test]
fn connections_to_kafka_that_are_dropped_without_a_word_are_made_anew() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let seen_as = listener.local_addr().expect("it is bound").port();
    let port = free_port();
    // Every client is led to the proxy, whomever it asked first.
    let advertised = format!("advertised.listeners=PLAINTEXT://127.0.0.1:{seen_as}");
    let proxy = Proxy::on(listener, port);
    let broker = Broker::with_users(&[&advertised], &[], port);
    let stage = Stage::on(Cluster::shared(Pg::V16), &broker);
    are_made_anew(stage, &proxy, "kafka");
}

/// README: packets are dropped without a word. Those to Postgres: the server still holds the lock and
/// the slot for the sessions that it does not know to be dead.
#[test]
fn connections_to_postgres_that_are_dropped_without_a_word_are_made_anew() {
    let mut stage = Stage::shared(Pg::V17);
    let proxy = Proxy::before(stage.db.cluster.port);
    stage.database_url = Some(format!(
        "postgresql://postgres@127.0.0.1:{}/{}",
        proxy.port(),
        stage.db.name
    ));
    are_made_anew(stage, &proxy, "database");
}

// ---- Postgres ------------------------------------------------------------------------------

/// README: Postgres restarts, once or again and again.
#[test]
fn a_postgres_that_restarts_in_a_loop_costs_nothing() {
    let cluster = Cluster::start(Pg::V16);
    let stage = Stage::on(&cluster, Broker::shared());
    stage.init();
    let mut relay = stage.run();
    let load = Load::start(&stage.db, &Plan::new(3, Shape::Mixed).a_second(300));
    more(&load, 100);
    for round in 0..9 {
        match round % 3 {
            0 => cluster.stop(Stop::Fast),
            1 => cluster.stop(Stop::Immediate),
            _ => cluster.kill9(),
        }
        cluster.up();
        // Sometimes it lives for as long as it takes to connect, sometimes for a second.
        for_the_fault(Duration::from_millis(round * 130));
        relay.assert_alive();
    }
    more(&load, 100);
    ends_exactly_once(&stage, load, &mut relay);
}

/// README: Postgres is out of disk. It refuses every write, ends its sessions, then itself.
#[test]
fn a_postgres_that_is_out_of_disk_costs_nothing() {
    let Some(disk) = Disk::of_megabytes(200) else {
        not_run("only root can mount a small disk");
        return;
    };
    let cluster = Cluster::within(Pg::V18, disk.path.clone(), &[]);
    let stage = Stage::on(&cluster, Broker::shared());
    let sql = stage.init();
    let mut relay = stage.run();
    let load = Load::start(&stage.db, &Plan::new(2, Shape::Single).a_second(100));
    stage.wait_count("t", 100, MINUTE);
    disk.fill();
    eventually(2 * MINUTE, "writes are refused", || {
        let grow = "create table if not exists g as select generate_series(1, 1000)";
        let refused = sql.try_run(grow).err()?;
        (refused.code()?.code() == "53100").then_some(())
    });
    // Whoever comes new to it cannot write its name.
    sql.run(
        "select pg_terminate_backend(pid) from pg_stat_activity
         where application_name like 'walrelay%' and pid <> pg_backend_pid()",
    );
    for_the_fault(Duration::from_secs(3));
    relay.assert_alive();
    // No room for WAL: the server gives up.
    eventually(2 * MINUTE, "the server ends", || {
        if let Ok(sql) = Sql::try_connect(cluster.port, "postgres", "postgres") {
            let _ = sql.try_run("select pg_switch_wal()");
        }
        cluster.stopped_within(Duration::from_secs(1)).then_some(())
    });
    relay.assert_alive();
    disk.clear();
    cluster.up();
    more(&load, 100);
    ends_exactly_once(&stage, load, &mut relay);
}

// ---- names and clocks ----------------------------------------------------------------------

/// README: a name does not resolve. At the start.
#[test]
fn names_that_resolve_only_after_the_start_are_waited_for() {
    let dir = proc::dir("names");
    let hosts = dir.join("hosts");
    fs::write(&hosts, "127.0.0.1 localhost\n").expect("the directory is ours");
    let mut own_hosts = vec!["unshare".to_owned(), "--mount".to_owned()];
    if proc::unprivileged().is_none() {
        own_hosts.push("--map-root-user".to_owned());
    }
    let may = Command::new("unshare")
        .args(&own_hosts[1..])
        .arg("true")
        .status();
    if !may.is_ok_and(|status| status.success()) {
        not_run("this machine lets us have no /etc/hosts of our own");
        return;
    }
    let mount = "mount --bind \"$0\" /etc/hosts && exec \"$@\"";
    own_hosts.extend(["sh", "-c", mount].map(str::to_owned));
    own_hosts.push(hosts.to_string_lossy().into_owned());
    let mut stage = Stage::shared(Pg::V15);
    let sql = stage.init();
    sql.run(
        "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
         values (gen_random_uuid(), 't', 'k', 'e', '1')",
    );
    stage.wrapper = own_hosts;
    stage.database_url = Some(format!(
        "postgresql://postgres@db.walrelay.test:{}/{}",
        stage.db.cluster.port, stage.db.name
    ));
    let broker = stage.broker.bootstrap();
    let kafka_port = broker.rsplit_once(':').expect("host and port").1;
    stage.brokers = Some(format!("kafka.walrelay.test:{kafka_port}"));
    serve_http(&mut stage);
    let mut relay = stage.run();
    let address = http::address(&mut relay);
    relay.wait_for_text("db.walrelay.test", MINUTE);
    relay.wait_for_text("kafka.walrelay.test", MINUTE);
    relay.assert_alive();
    assert_eq!(Ready::of(&address).status, 503);
    // In place: the relay sees this very file.
    let names = "127.0.0.1 localhost db.walrelay.test kafka.walrelay.test\n";
    fs::write(&hosts, names).expect("the directory is ours");
    is_ready(&address);
    stage.wait_count("t", 1, MINUTE);
    relay.stop();
}

/// A relay whose wall clock can be set, in hours off the real one.
struct Clock {
    library: PathBuf,
    offset: PathBuf,
}

impl Clock {
    fn new() -> Clock {
        let dir = proc::dir("clock");
        let (library, offset) = (dir.join("clock.so"), dir.join("offset"));
        let mut cc = Command::new("cc");
        cc.args(["-O1", "-shared", "-fPIC", "-o"])
            .arg(&library)
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/live/clock.c"))
            .arg("-ldl");
        proc::output(cc);
        fs::write(&offset, 0_i64.to_ne_bytes()).expect("the directory is ours");
        Clock { library, offset }
    }

    /// What starts a relay that goes by it.
    fn wrapper(&self) -> Vec<String> {
        vec![
            "env".to_owned(),
            format!("LD_PRELOAD={}", self.library.display()),
            format!("CLOCK_OFFSET={}", self.offset.display()),
        ]
    }

    fn jump_to(&self, hours: i64) {
        // In place: the relay has it in its memory.
        let file = fs::OpenOptions::new().write(true).open(&self.offset);
        let seconds = (hours * 3600).to_ne_bytes();
        file.and_then(|file| file.write_all_at(&seconds, 0))
            .expect("it is ours");
    }
}

/// README: the clock of the relay's machine jumps.
#[test]
fn a_clock_that_jumps_costs_nothing() {
    let clock = Clock::new();
    let mut stage = Stage::shared(Pg::V17);
    stage.wrapper = clock.wrapper();
    serve_http(&mut stage);
    stage.init();
    let mut relay = stage.run();
    let address = http::address(&mut relay);
    let load = Load::start(&stage.db, &Plan::new(2, Shape::Single).a_second(100));
    for hours in [3, -3, 0] {
        more(&load, 50);
        catches_up(&stage, &load);
        clock.jump_to(hours);
        more(&load, 50);
        catches_up(&stage, &load);
    }
    is_ready(&address);
    ends_exactly_once(&stage, load, &mut relay);
}

/// README: the clock of the relay's machine jumps. Back by hours, while the client library waits
/// to connect again.
#[test]
#[ignore = "librdkafka's waits are of that clock: make soak"]
fn soak_a_clock_that_is_set_back_while_kafka_is_away_costs_nothing() {
    let clock = Clock::new();
    let broker = Broker::start();
    let mut stage = Stage::on(Cluster::shared(Pg::V17), &broker);
    stage.wrapper = clock.wrapper();
    serve_http(&mut stage);
    stage.init();
    let mut relay = stage.run();
    let address = http::address(&mut relay);
    let load = Load::start(&stage.db, &Plan::new(2, Shape::Single).a_second(100));
    more(&load, 50);
    catches_up(&stage, &load);
    broker.kill9();
    names(&address, "kafka");
    clock.jump_to(-5);
    more(&load, 50);
    broker.up();
    catches_up(&stage, &load);
    is_ready(&address);
    ends_exactly_once(&stage, load, &mut relay);
}

/// The README promises a test for each row of its table.
#[test]
fn each_row_of_the_readmes_table_names_its_test() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let readme = fs::read_to_string(root.join("README.md")).expect("there is a README");
    let section = readme
        .split("## Reliability: ")
        .nth(1)
        .expect("its section");
    let section = section.split("\n## ").next().expect("its text");
    let rows = section.lines().filter_map(|line| line.strip_prefix("| "));
    let rows: Vec<&str> = rows.filter_map(|line| line.split(" | ").next()).collect();
    let tests: String = fs::read_dir(root.join("tests/live"))
        .expect("we are in there")
        .map(|entry| fs::read_to_string(entry.expect("a file").path()).unwrap_or_default())
        .collect();
    assert!(rows.len() > 10, "{rows:?}");
    for row in rows.iter().filter(|row| **row != "when") {
        let claim = format!("/// README: {row}.");
        assert!(tests.contains(&claim), "no test says: {claim}");
    }
}
