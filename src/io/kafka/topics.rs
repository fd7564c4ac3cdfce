//! What the cluster says about a topic, and making one. Off the service's thread: these calls wait
//! for the cluster.

use std::ffi::CString;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::producer::{BaseProducer, Producer as _};

use super::context::Inbox;
use super::native::admin::{Answer, Questions};
use super::{ClientNotice, Settings, native};
use crate::config::CreateTopics;
use crate::error::Failure;
use crate::record::{KafkaCode, Right, TopicState};

/// For one request; an answer takes milliseconds.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// An idle client costs little, but not nothing.
const IDLE_MAX: Duration = Duration::from_secs(30);

/// Each poll handles one event; a handful waits after a failed connection.
const POLLS: usize = 64;

const TOPIC_AUTHORIZATION_FAILED: KafkaCode = KafkaCode(29);

type Asker = BaseProducer<Inbox>;

/// The client that asks, kept between questions.
#[derive(Default)]
pub struct Lookup {
    asker: Mutex<Option<(Arc<Asker>, Instant)>>,
    /// Why the last question got no answer: the client library does not repeat itself each time.
    reason: Mutex<Option<ClientNotice>>,
}

impl Lookup {
    /// The client, and whether it is new.
    fn asker(&self, settings: &Settings) -> Result<(Arc<Asker>, bool), String> {
        let mut slot = self.slot();
        if let Some((asker, used)) = slot.as_mut() {
            *used = Instant::now();
            return Ok((Arc::clone(asker), false));
        }
        let asker = Arc::new(make(settings)?);
        *slot = Some((Arc::clone(&asker), Instant::now()));
        Ok((asker, true))
    }

    fn forget(&self) {
        let asker = self.slot().take();
        // Whoever asks has a share in it, and is on a thread that may block.
        drop(asker);
    }

    /// Takes the client out when nobody used it for a while.
    fn retire(&self) -> Option<Arc<Asker>> {
        let mut slot = self.slot();
        slot.take_if(|(_, used)| used.elapsed() >= IDLE_MAX)
            .map(|(asker, _)| asker)
    }

    /// What to say for `error`, given what the client has heard since the last question.
    fn explain(&self, heard: Option<ClientNotice>, error: &KafkaError) -> String {
        let mut reason = lock(&self.reason);
        let known = reason.as_ref().map_or(0, ClientNotice::weight);
        if let Some(notice) = heard.filter(|notice| notice.weight() >= known) {
            *reason = Some(notice);
        }
        reason
            .as_ref()
            .map_or_else(|| error.to_string(), |notice| notice.text.clone())
    }

    fn is_empty(&self) -> bool {
        self.slot().is_none()
    }

    fn slot(&self) -> MutexGuard<'_, Option<(Arc<Asker>, Instant)>> {
        lock(&self.asker)
    }
}

fn make(settings: &Settings) -> Result<Asker, String> {
    let words = |failure: Failure| failure.causes.join("; ");
    let asker = settings.asking().map_err(words)?.make().map_err(words)?;
    // Where tokens are used, the first poll is where one is asked for.
    for _ in 0..POLLS {
        asker.poll(Duration::ZERO);
    }
    Ok(asker)
}

/// A panic elsewhere leaves these values whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Drops the client some time after its last use, off this thread: destroying it may block.
async fn retire_when_idle(lookup: Weak<Lookup>) {
    loop {
        tokio::time::sleep(IDLE_MAX).await;
        let Some(lookup) = lookup.upgrade() else {
            return;
        };
        let retired = lookup.retire();
        let gone = retired.is_some() || lookup.is_empty();
        if let Some(asker) = retired {
            tokio::task::spawn_blocking(move || drop(asker));
        }
        if gone {
            return;
        }
    }
}

/// Asks the cluster about a topic, for 5 seconds at most. Never makes the topic.
pub async fn lookup_topic(settings: &Settings, topic: &str) -> TopicState {
    let settings = settings.clone();
    let lookup = Arc::downgrade(&settings.lookup);
    let topic = topic.to_owned();
    let asked = tokio::task::spawn_blocking(move || {
        let (asker, is_new) = match settings.lookup.asker(&settings) {
            Ok(asker) => asker,
            Err(words) => return (TopicState::Unknown(words), false),
        };
        let state = match ask(&settings.lookup, &asker, &topic) {
            // The demo broker has no admin API: asking it would only wait for the time-out.
            TopicState::Present { partitions, .. } if settings.mock().is_none() => {
                TopicState::Present {
                    partitions,
                    max_message_bytes: max_message_bytes(&asker, &topic),
                }
            }
            state => state,
        };
        (state, is_new)
    });
    match asked.await {
        Ok((state, is_new)) => {
            if is_new {
                tokio::spawn(retire_when_idle(lookup));
            }
            state
        }
        Err(error) => TopicState::Unknown(error.to_string()),
    }
}

/// May this principal read the topic? Where the broker does not say (before Kafka 2.3, or the demo's)
/// reading it will tell: true.
///
/// # Errors
/// No answer within 5 seconds, or an answer that is about something else: no such topic.
pub async fn may_read(settings: &Settings, topic: &str) -> Result<bool, String> {
    if settings.mock().is_some() {
        return Ok(true);
    }
    let settings = settings.clone();
    let lookup = Arc::downgrade(&settings.lookup);
    let topic = CString::new(topic).map_err(|error| error.to_string())?;
    let asked = tokio::task::spawn_blocking(move || {
        let (asker, is_new) = settings.lookup.asker(&settings)?;
        let questions = Questions::over(&asker);
        questions.topics(&[topic], ANSWER_WITHIN);
        Ok((questions.next(ANSWER_WITHIN), is_new))
    });
    let (answer, is_new) = asked.await.unwrap_or_else(|error| Err(error.to_string()))?;
    if is_new {
        tokio::spawn(retire_when_idle(lookup));
    }
    let Some(Answer::Topics(topics)) = answer else {
        return Err("no answer".into());
    };
    let topics = topics.map_err(|refusal| refusal.text)?;
    match topics.into_iter().next() {
        Some((_, Ok(topic))) => Ok(topic.rights.is_none_or(|rights| rights.read)),
        Some((_, Err(refusal))) if refusal.code == TOPIC_AUTHORIZATION_FAILED => Ok(false),
        Some((_, Err(refusal))) => Err(refusal.text),
        None => Err("the answer does not name the topic".into()),
    }
}

fn ask(lookup: &Lookup, asker: &Asker, topic: &str) -> TopicState {
    let answer = asker.client().fetch_metadata(Some(topic), ANSWER_WITHIN);
    let heard = likeliest_cause(asker);
    let metadata = match answer {
        Ok(metadata) => metadata,
        Err(error) => {
            if heard.as_ref().is_some_and(ClientNotice::is_definite) {
                // The next question is asked by another client, with what the files hold then.
                lookup.forget();
            }
            return TopicState::Unknown(lookup.explain(heard, &error));
        }
    };
    *lock(&lookup.reason) = None;
    let Some(found) = metadata.topics().iter().find(|t| t.name() == topic) else {
        return TopicState::Unknown("the answer does not name the topic".into());
    };
    match found.error() {
        None => {}
        Some(error) => {
            return match RDKafkaErrorCode::from(error) {
                RDKafkaErrorCode::UnknownTopicOrPartition => TopicState::Absent,
                RDKafkaErrorCode::TopicAuthorizationFailed
                | RDKafkaErrorCode::ClusterAuthorizationFailed => TopicState::Denied(Right::Use),
                code => TopicState::Unknown(code.to_string()),
            };
        }
    }
    match i32::try_from(found.partitions().len()) {
        // A topic that is being made is named before its partitions are.
        Ok(0) | Err(_) => TopicState::Unknown("the topic has no partitions yet".into()),
        Ok(partitions) => TopicState::Present {
            partitions,
            max_message_bytes: None,
        },
    }
}

/// The likeliest cause of a question without an answer, in the client library's words.
fn likeliest_cause(asker: &Asker) -> Option<ClientNotice> {
    for _ in 0..POLLS {
        asker.poll(Duration::ZERO);
    }
    let notices = asker.context().take_notices();
    notices.into_iter().max_by_key(ClientNotice::weight)
}

/// `None` where the cluster does not let us read it.
fn max_message_bytes(asker: &Asker, topic: &str) -> Option<usize> {
    let questions = Questions::over(asker);
    questions.configs(&[CString::new(topic).ok()?], ANSWER_WITHIN);
    let Some(Answer::Configs(Ok(configs))) = questions.next(ANSWER_WITHIN) else {
        return None;
    };
    let (_, config) = configs.into_iter().next()?;
    let config = config.ok()?;
    let (_, value) = config
        .iter()
        .find(|(name, _)| name == "max.message.bytes")?;
    value.parse().ok()
}

/// Why a topic was not made.
#[derive(Debug, PartialEq, Eq)]
pub enum NotMade {
    NoRight,
    Because(String),
}

impl From<String> for NotMade {
    fn from(why: String) -> Self {
        NotMade::Because(why)
    }
}

impl fmt::Display for NotMade {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NotMade::NoRight => write!(f, "this principal may not create it"),
            NotMade::Because(why) => write!(f, "{why}"),
        }
    }
}

/// Makes a topic; one that exists is left as it is.
///
/// # Errors
/// The cluster's reason: no right, a policy, too few brokers, no answer within 5 seconds.
pub async fn create_topic(
    settings: &Settings,
    topic: &str,
    how: CreateTopics,
) -> Result<(), NotMade> {
    if let Some(mock) = settings.mock() {
        return Ok(mock.create_topic_with(topic, how.partitions)?);
    }
    let settings = settings.clone();
    let topic = topic.to_owned();
    let made = tokio::task::spawn_blocking(move || create(&settings, &topic, how));
    made.await
        .unwrap_or_else(|error| Err(error.to_string().into()))
}

fn create(settings: &Settings, topic: &str, how: CreateTopics) -> Result<(), NotMade> {
    let recipe = settings
        .asking()
        .map_err(|failure| failure.causes.join("; "))?;
    let admin: AdminClient<Inbox> = recipe
        .config
        .create_with_context(recipe.context)
        .map_err(|error| error.to_string())?;
    // Nobody polls this client where a token would be asked for.
    if let Some(tokens) = settings.token() {
        native::set_token(admin.inner(), &tokens.token()?)?;
    }
    // -1: the cluster's default.
    let replication = TopicReplication::Fixed(how.replication.unwrap_or(-1));
    let new = [NewTopic::new(topic, how.partitions, replication)];
    let options = AdminOptions::new()
        .request_timeout(Some(ANSWER_WITHIN))
        .operation_timeout(Some(ANSWER_WITHIN));
    let answer = admin.create_topics(&new, &options);
    let answer = tokio::runtime::Handle::current()
        .block_on(answer)
        .map_err(|error| error.to_string())?;
    match answer.into_iter().next() {
        Some(Ok(_)) | Some(Err((_, RDKafkaErrorCode::TopicAlreadyExists))) => Ok(()),
        Some(Err((
            _,
            RDKafkaErrorCode::TopicAuthorizationFailed
            | RDKafkaErrorCode::ClusterAuthorizationFailed,
        ))) => Err(NotMade::NoRight),
        Some(Err((_, code))) => Err(code.to_string().into()),
        None => Err("the cluster's answer does not name the topic"
            .to_owned()
            .into()),
    }
}
