//! A cluster of three Kafka nodes, each broker and controller. Tests take it in turn: they kill
//! its nodes, and whoever comes next finds all three up.

use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use crate::kafka::Broker;
use crate::proc::{self, eventually_says};

/// What three JVMs on two busy cores may take.
const PATIENCE: Duration = Duration::from_secs(120);

pub struct Trio {
    pub nodes: [Broker; 3],
}

impl Trio {
    /// The cluster that tests share, for one of them.
    pub fn lent() -> MutexGuard<'static, Trio> {
        static SHARED: OnceLock<Mutex<Trio>> = OnceLock::new();
        let trio = SHARED
            .get_or_init(|| Mutex::new(Trio::prepared()))
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        trio.all_up();
        trio
    }

    fn prepared() -> Trio {
        let ports: [u16; 3] = std::array::from_fn(|_| proc::free_port());
        let controllers: [u16; 3] = std::array::from_fn(|_| proc::free_port());
        let list = |each: &dyn Fn(usize) -> String| {
            let all: Vec<String> = (0..3).map(each).collect();
            all.join(",")
        };
        let bootstrap = list(&|n| format!("127.0.0.1:{}", ports[n]));
        let voters = list(&|n| format!("{}@127.0.0.1:{}", n + 1, controllers[n]));
        let nodes = std::array::from_fn(|n| {
            let (port, controller) = (ports[n], controllers[n]);
            let own = [
                format!("node.id={}", n + 1),
                format!(
                    "listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}"
                ),
                format!("controller.quorum.voters={voters}"),
                "offsets.topic.replication.factor=3".to_owned(),
                // A follower that was killed is out of the in-sync replicas after this.
                "replica.lag.time.max.ms=5000".to_owned(),
                "broker.session.timeout.ms=6000".to_owned(),
            ];
            let own: Vec<&str> = own.iter().map(String::as_str).collect();
            Broker::node(n + 1, &own, port, &bootstrap)
        });
        Trio { nodes }
    }

    /// Starts whoever is down, together: the first two wait for each other.
    fn all_up(&self) {
        let down: Vec<&Broker> = self.nodes.iter().filter(|node| !node.is_up()).collect();
        let said: Vec<usize> = down.iter().map(|node| node.log().len()).collect();
        for node in &down {
            node.launch();
        }
        for (node, said) in down.iter().zip(said) {
            node.wait_until_it_serves(said);
        }
    }

    /// By the number that the cluster knows it by.
    pub fn node(&self, id: i32) -> &Broker {
        let index = usize::try_from(id - 1).expect("nodes are numbered from 1");
        &self.nodes[index]
    }

    /// The node that leads this partition, by its number.
    pub fn leader(&self, topic: &str, partition: usize) -> i32 {
        self.nodes[0].replicas(topic)[partition].0
    }

    /// Waits until every partition of a topic has so many replicas in sync.
    #[track_caller]
    pub fn wait_in_sync(&self, topic: &str, replicas: usize) {
        let what = || {
            let now = self.nodes[0].replicas(topic);
            format!("{topic} has {replicas} replicas in sync: {now:?}")
        };
        eventually_says(PATIENCE, what, || {
            let all = self.nodes[0].replicas(topic);
            let are_there = !all.is_empty() && all.iter().all(|p| p.1.len() >= replicas);
            are_there.then_some(())
        });
    }
}
