//! The harness itself: the servers start, carry data, and survive what tests do to them.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::kafka::Broker;
use crate::load::{Load, Plan, Shape};
use crate::postgres::{Cluster, Pg, Stop};
use crate::proc::eventually;

#[test]
fn a_cluster_survives_every_kind_of_end() {
    let cluster = Cluster::start(Pg::V15);
    let db = cluster.database();
    db.connect().run("create table t (n int)");
    for end in ["fast", "immediate", "kill"] {
        db.connect().run("insert into t values (1)");
        match end {
            "fast" => cluster.restart(Stop::Fast),
            "immediate" => cluster.restart(Stop::Immediate),
            _ => {
                cluster.kill9();
                cluster.up();
            }
        }
    }
    assert_eq!(db.connect().one("select count(*) from t"), "3");
}

#[test]
fn a_cluster_goes_back_to_a_copy() {
    let cluster = Cluster::start(Pg::V18);
    let sql = cluster.connect("postgres");
    sql.run("create table t (n int); insert into t values (1)");
    cluster.stop(Stop::Fast);
    let copy = cluster.copy_data();
    cluster.up();
    cluster.connect("postgres").run("insert into t values (2)");
    cluster.kill9();
    cluster.roll_back_to(&copy);
    cluster.up();
    let sql = cluster.connect("postgres");
    assert_eq!(sql.one("select count(*) from t"), "1");
}

#[test]
fn a_broker_keeps_its_topics_over_a_kill() {
    let broker = Broker::start();
    broker.create_topic("a", 3);
    broker.kill9();
    broker.up();
    broker.freeze();
    broker.thaw();
    broker.wait_count("a", 0, Duration::from_secs(1));
    assert!(broker.read_all("a").is_empty());
    assert_eq!(broker.partitions("a"), Some(3));
    broker.delete_topic("a");
    assert!(!broker.topic_exists("a"));
}

#[test]
fn shared_servers_of_every_version_answer() {
    for pg in Pg::ALL {
        let db = Cluster::shared(pg).database();
        let version = db.connect().one("show server_version");
        assert!(version.starts_with(pg.number()), "{version}");
    }
    assert!(!Broker::shared().topic_exists("none"));
}

#[test]
fn writers_know_what_they_committed_over_every_restart() {
    let cluster = Cluster::start(Pg::V15);
    let db = cluster.database();
    db.connect().run(
        "create table outbox (event_id uuid unique, aggregate_type text, aggregate_id text,
                              event_type text, payload jsonb)",
    );
    let load = Load::start(&db, &Plan::new(4, Shape::Mixed));
    for end in [Stop::Fast, Stop::Immediate] {
        let goal = load.committed() + 300;
        eventually(Duration::from_secs(60), "writers go on", || {
            (load.committed() >= goal).then_some(())
        });
        cluster.restart(end);
    }
    let goal = load.committed() + 100;
    eventually(Duration::from_secs(60), "writers go on", || {
        (load.committed() >= goal).then_some(())
    });
    let committed = load.stop();
    let stored: BTreeSet<String> = db
        .connect()
        .rows("select event_id from outbox")
        .into_iter()
        .map(|row| row[0].clone().expect("an id"))
        .collect();
    let said: BTreeSet<String> = committed.events().cloned().collect();
    let differ: Vec<&String> = stored.symmetric_difference(&said).collect();
    assert!(
        differ.is_empty(),
        "stored {}, said {}: {differ:?}",
        stored.len(),
        said.len()
    );
}
