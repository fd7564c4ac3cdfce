//! What the cluster says of itself: brokers, topics and their settings, over one client.

use std::collections::HashMap;
use std::ffi::CString;
use std::time::{Duration, Instant};

use rdkafka::producer::{BaseProducer, Producer as _};

use super::super::context::Inbox;
use super::super::native::admin::{Answer, Each, Node, Questions, Refusal, Topic, TopicConfig};
use super::super::{ClientNotice, Settings};
use super::address::Address;
use super::tls::{DISTRUST_WITHIN, Trust, distrust};
use crate::record::KafkaCode;

/// Between two looks at what the client library complains of: short at first, when it connects.
const LOOK_EVERY_MIN: Duration = Duration::from_millis(100);
const LOOK_EVERY_MAX: Duration = Duration::from_millis(500);
const ANSWER_WITHIN: Duration = Duration::from_secs(2);
/// A client that is done with is waited for no longer than this.
const DESTROY_WITHIN: Duration = Duration::from_millis(200);
/// One question names no more topics than this.
const TOPICS_MAX: usize = 1_000;

/// Per topic.
type ByName<T> = HashMap<String, Result<T, Refusal>>;

/// What was answered until the time was up. `None`: nothing.
#[derive(Debug, Default)]
pub struct Heard {
    pub cluster: Option<Result<Vec<Node>, Refusal>>,
    pub topics: Option<Result<ByName<Topic>, Refusal>>,
    pub configs: Option<Result<ByName<TopicConfig>, Refusal>>,
    /// The likeliest cause of a silence.
    pub notice: Option<ClientNotice>,
}

impl Heard {
    /// It could not even be asked.
    fn refused(text: String) -> Self {
        let code = KafkaCode(0);
        Heard {
            cluster: Some(Err(Refusal { code, text })),
            ..Heard::default()
        }
    }

    /// Only an operator can put it right.
    pub fn is_definite(&self) -> bool {
        self.notice.as_ref().is_some_and(ClientNotice::is_definite)
    }

    /// Puts OpenSSL's reason in the place of the library's long sentence, which has none.
    fn explain_distrust(&mut self, addresses: &[Address], trust: &Trust) {
        let Some(notice) = &mut self.notice else {
            return;
        };
        let Some(at) = notice
            .text
            .find(": broker certificate could not be verified")
        else {
            return;
        };
        let address = addresses
            .iter()
            .find(|address| notice.text.contains(&address.to_string()));
        if let Some(why) = address.and_then(|address| distrust(address, trust)) {
            notice.text.truncate(at);
            notice.text.push_str(": ");
            notice.text.push_str(&why);
        }
    }

    fn take(&mut self, answer: Answer) {
        match answer {
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

fn by_name<T>(each: Each<T>) -> ByName<T> {
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
    let mut recipe = match settings.asking() {
        Ok(recipe) => recipe,
        Err(failure) => return Heard::refused(failure.causes.join("; ")),
    };
    recipe
        .config
        .set("bootstrap.servers", bootstrap.join(","))
        // A client that lives for a second looks again at once.
        .set("reconnect.backoff.max.ms", "250")
        .set("statistics.interval.ms", "100");
    let topics: Vec<CString> = topics
        .iter()
        .filter_map(|topic| CString::new(topic.as_str()).ok())
        .take(TOPICS_MAX)
        .collect();
    let trust = Trust {
        file: recipe.config.get("ssl.ca.location").map(str::to_owned),
        pem: recipe.config.get("ssl.ca.pem").map(str::to_owned),
    };
    let addresses = Address::list(&bootstrap.join(","));
    let asked = tokio::task::spawn_blocking(move || {
        let client: BaseProducer<Inbox> = match recipe.make() {
            Ok(client) => client,
            Err(failure) => return Heard::refused(failure.causes.join("; ")),
        };
        let mut heard = ask(&client, &topics, until);
        destroy(client);
        if left(until) > DISTRUST_WITHIN {
            heard.explain_distrust(&addresses, &trust);
        }
        heard
    });
    asked.await.unwrap_or_default()
}

fn ask(client: &BaseProducer<Inbox>, topics: &[CString], until: Instant) -> Heard {
    let mut heard = Heard::default();
    let questions = Questions::over(client);
    if topics.is_empty() {
        heard.topics = Some(Ok(HashMap::new()));
        heard.configs = Some(Ok(HashMap::new()));
    } else {
        questions.topics(topics, left(until));
        questions.configs(topics, left(until));
    }
    let mut slice = LOOK_EVERY_MIN;
    while !left(until).is_zero() {
        heard.take_notices(client);
        if heard.is_definite() {
            return heard;
        }
        let answer = questions.brokers(slice.min(left(until)));
        // As soon as the brokers' own addresses are known, the client asks nobody but them.
        let answer = answer.or_else(|refusal| told(client).ok_or(refusal));
        let is_answered = answer.is_ok();
        heard.cluster = Some(answer);
        if is_answered {
            break;
        }
        slice = (slice * 2).min(LOOK_EVERY_MAX);
    }
    // A broker that answers one question answers the others, where it can be reached.
    let until = until.min(Instant::now() + ANSWER_WITHIN);
    while heard.topics.is_none() || heard.configs.is_none() {
        if left(until).is_zero() {
            break;
        }
        if let Some(answer) = questions.next(left(until)) {
            heard.take(answer);
        }
    }
    heard
}

/// The brokers that the client was told of, reachable or not.
fn told(client: &BaseProducer<Inbox>) -> Option<Vec<Node>> {
    let mut nodes: Vec<Node> = client
        .context()
        .nodes()
        .into_iter()
        .filter_map(|(id, name)| {
            let Address { host, port } = Address::list(&name).into_iter().next()?;
            Some(Node { id, host, port })
        })
        .collect();
    nodes.sort_by_key(|node| node.id);
    (!nodes.is_empty()).then_some(nodes)
}

fn left(until: Instant) -> Duration {
    until.saturating_duration_since(Instant::now())
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
