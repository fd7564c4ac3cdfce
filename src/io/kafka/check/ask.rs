//! What the cluster says of itself: brokers, topics and their settings, over one client.

use std::collections::HashMap;
use std::ffi::CString;
use std::time::{Duration, Instant};

use rdkafka::producer::{BaseProducer, Producer as _};

use super::super::context::Inbox;
use super::super::native::admin::{Answer, Each, Node, Questions, Refusal, Topic, TopicConfig};
use super::super::{ClientNotice, Settings};
use super::address::Address;
use crate::record::KafkaCode;

/// Between two looks at what the client library complains of.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// A client that is done with is waited for no longer than this.
const DESTROY_WITHIN: Duration = Duration::from_millis(200);
/// One question names no more topics than this.
const TOPICS_MAX: usize = 1_000;

/// What was answered until the time was up. `None`: nothing.
#[derive(Debug, Default)]
pub struct Heard {
    pub cluster: Option<Result<Vec<Node>, Refusal>>,
    pub topics: Option<Result<HashMap<String, Result<Topic, Refusal>>, Refusal>>,
    pub configs: Option<Result<HashMap<String, Result<TopicConfig, Refusal>>, Refusal>>,
    /// The likeliest cause of a silence.
    pub notice: Option<ClientNotice>,
}

impl Heard {
    /// Only an operator can put it right.
    pub fn is_definite(&self) -> bool {
        self.notice.as_ref().is_some_and(ClientNotice::is_definite)
    }

    fn is_complete(&self) -> bool {
        self.cluster.is_some() && self.topics.is_some() && self.configs.is_some()
    }

    fn take(&mut self, answer: Answer) {
        match answer {
            Answer::Cluster(nodes) => self.cluster = Some(nodes),
            Answer::Topics(topics) => self.topics = Some(topics.map(by_name)),
            Answer::Configs(configs) => self.configs = Some(configs.map(by_name)),
        }
    }

    fn take_notices(&mut self, client: &BaseProducer<Inbox>) {
        // Each poll handles one event; the first is where a token is asked for.
        for _ in 0..64 {
            client.poll(Duration::ZERO);
        }
        for notice in client.context().take_notices() {
            let known = self.notice.as_ref().map_or(0, ClientNotice::weight);
            if self.notice.is_none() || notice.weight() > known {
                self.notice = Some(notice);
            }
        }
    }
}

fn by_name<T>(each: Each<T>) -> HashMap<String, Result<T, Refusal>> {
    each.into_iter().collect()
}

pub fn address_of(node: &Node) -> Address {
    Address {
        host: node.host.clone(),
        port: node.port,
    }
}

/// Asks everything at once over a client of its own, and ends early where an answer will not come.
pub async fn all(
    settings: &Settings,
    bootstrap: &[String],
    topics: &[String],
    until: Instant,
) -> Heard {
    let mut config = settings.asking();
    config
        .set("bootstrap.servers", bootstrap.join(","))
        // A client that lives for a second looks again at once.
        .set("reconnect.backoff.max.ms", "250");
    let topics: Vec<CString> = topics
        .iter()
        .filter_map(|topic| CString::new(topic.as_str()).ok())
        .take(TOPICS_MAX)
        .collect();
    let asked = tokio::task::spawn_blocking(move || {
        let client: BaseProducer<Inbox> = match config.create_with_context(Inbox::default()) {
            Ok(client) => client,
            Err(error) => {
                let text = format!("the Kafka client cannot be made: {error}");
                return Heard {
                    cluster: Some(Err(Refusal {
                        code: KafkaCode(0),
                        text,
                    })),
                    ..Heard::default()
                };
            }
        };
        let heard = ask(&client, &topics, until);
        destroy(client);
        heard
    });
    asked.await.unwrap_or_default()
}

fn ask(client: &BaseProducer<Inbox>, topics: &[CString], until: Instant) -> Heard {
    let mut heard = Heard::default();
    let left = || until.saturating_duration_since(Instant::now());
    let questions = Questions::over(client);
    questions.cluster(left());
    if topics.is_empty() {
        heard.topics = Some(Ok(HashMap::new()));
        heard.configs = Some(Ok(HashMap::new()));
    } else {
        questions.topics(topics, left());
        questions.configs(topics, left());
    }
    while !heard.is_complete() && !left().is_zero() {
        heard.take_notices(client);
        if heard.is_definite() {
            break;
        }
        if let Some(answer) = questions.next(LOOK_EVERY.min(left())) {
            heard.take(answer);
        }
    }
    heard
}

/// Destroying a client joins its threads, and one of them may be resolving a name.
fn destroy(client: BaseProducer<Inbox>) {
    let (done, is_done) = std::sync::mpsc::channel();
    let spawned = std::thread::Builder::new()
        .name("kafka-retire".into())
        .spawn(move || {
            drop(client);
            // Nobody waits any more: it took too long.
            let _ = done.send(());
        });
    if spawned.is_ok() {
        // Either way we go on.
        let _ = is_done.recv_timeout(DESTROY_WITHIN);
    }
}
