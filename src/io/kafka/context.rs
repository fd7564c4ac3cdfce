//! What librdkafka tells a client while it is polled: reports, errors, log lines, statistics.

use std::collections::HashMap;
use std::error::Error;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rdkafka::ClientContext;
use rdkafka::client::OAuthToken;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::consumer::ConsumerContext;
use rdkafka::error::KafkaError;
use rdkafka::message::DeliveryResult;
use rdkafka::producer::ProducerContext;
use serde::Deserialize;
use tracing::{debug, warn};

use super::code_of;
use super::properties::Secrets;
use super::token::TokenSource;
use crate::record::{KafkaCode, Report, Ticket};

/// Different notices that are kept between two looks; later ones are dropped, the first say it.
const NOTICES_MAX: usize = 16;
/// Says of the whole producer what the refused records' own reports say better.
const GAPLESS_GUARANTEE: KafkaCode = KafkaCode(-148);
/// Lines of librdkafka's own log that are passed on in one `LOG_SPAN`.
const LOG_LINES_MAX: u32 = 10;
const LOG_SPAN: Duration = Duration::from_secs(10);

/// Something that the client library says about the cluster as a whole, never about one record:
/// "all brokers down", "cannot resolve", "authentication failed". Records wait meanwhile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientNotice {
    pub code: KafkaCode,
    /// The library's words, without the counters that make each occurrence look different.
    pub text: String,
    /// How often it was said since the last look.
    pub times: u32,
}

impl ClientNotice {
    /// "All brokers are down" and bare transport errors are the consequence; a name that does not
    /// resolve, TLS or a password is the cause. Higher is nearer to the cause.
    #[must_use]
    pub fn weight(&self) -> u8 {
        match self.code.0 {
            -187 => 0, // ALL_BROKERS_DOWN
            -195 => 1, // TRANSPORT
            -193 => 2, // RESOLVE
            _ => 3,    // AUTHENTICATION, SSL, SASL, FATAL
        }
    }

    /// Is it a refusal that time does not heal: TLS or SASL where the broker wants none or another,
    /// a wrong password, a certificate that is not good enough?
    #[must_use]
    pub fn is_definite(&self) -> bool {
        // A connection that broke off in the middle of a login says "authentication" too.
        let broke_off = self.text.contains("Local: ") || self.text.contains("OAUTHBEARER token");
        match self.code.0 {
            // AUTHENTICATION, SSL, UNSUPPORTED_SASL_MECHANISM, SASL_AUTHENTICATION_FAILED
            -169 | -181 | 33 | 58 => !broke_off,
            // TRANSPORT
            -195 => {
                self.text.contains("PLAINTEXT broker listener") || self.text.contains(" alert ")
            }
            _ => false,
        }
    }
}

/// From the client's statistics, some seconds old.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BrokerStats {
    pub brokers_known: usize,
    pub brokers_up: usize,
    /// The slowest broker's, over the last interval; zero where nothing was asked.
    pub rtt_p50: Duration,
    pub rtt_p99: Duration,
}

/// One client's context. Its locks are taken by the polling thread only, so never waited for.
#[derive(Default)]
pub struct Inbox {
    /// Nothing of these leaves in a log line or a notice.
    secrets: Secrets,
    tokens: Option<Arc<TokenSource>>,
    reports: Mutex<Vec<Report>>,
    notices: Mutex<Vec<ClientNotice>>,
    stats: Mutex<Option<BrokerStats>>,
    /// Number and address of each broker, as the cluster has told them.
    nodes: Mutex<Vec<(i32, String)>>,
    /// Topics and their partitions as the client itself knows them, from the newest statistics.
    partitions: Mutex<Vec<(String, i32)>>,
    log: Mutex<LogPace>,
}

#[derive(Default)]
struct LogPace {
    since: Option<Instant>,
    lines: u32,
}

impl Inbox {
    pub fn new(secrets: Secrets, tokens: Option<Arc<TokenSource>>) -> Self {
        Inbox {
            secrets,
            tokens,
            ..Inbox::default()
        }
    }

    pub fn secrets(&self) -> &Secrets {
        &self.secrets
    }

    pub fn reports(&self) -> MutexGuard<'_, Vec<Report>> {
        lock(&self.reports)
    }

    pub fn take_notices(&self) -> Vec<ClientNotice> {
        let mut notices = std::mem::take(&mut *lock(&self.notices));
        for notice in &mut notices {
            // rdkafka gives each error event to the context twice.
            notice.times = notice.times.div_ceil(2);
        }
        notices
    }

    pub fn stats(&self) -> Option<BrokerStats> {
        *lock(&self.stats)
    }

    /// Number and address of each broker: from the statistics, which know them even where none of
    /// them can be reached.
    pub fn nodes(&self) -> Vec<(i32, String)> {
        lock(&self.nodes).clone()
    }

    /// How many partitions the client knows of each topic, from statistics that were not looked at
    /// yet. It refuses records for others.
    pub fn take_partitions(&self) -> Vec<(String, i32)> {
        std::mem::take(&mut *lock(&self.partitions))
    }

    /// Is this line within the pace? `Some(n)`: yes, and `n` before it were left out.
    fn log_slot(&self) -> Option<u32> {
        let mut pace = lock(&self.log);
        let now = Instant::now();
        let mut left_out = 0;
        if pace.since.is_none_or(|since| now - since >= LOG_SPAN) {
            left_out = pace.lines.saturating_sub(LOG_LINES_MAX);
            *pace = LogPace {
                since: Some(now),
                lines: 0,
            };
        }
        pace.lines += 1;
        (pace.lines <= LOG_LINES_MAX).then_some(left_out)
    }
}

/// A panic elsewhere leaves these values whole: they are plain lists.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ClientContext for Inbox {
    const ENABLE_REFRESH_OAUTH_TOKEN: bool = true;

    /// Called in a poll, on the thread that relays: from memory.
    fn generate_oauth_token(&self, _config: Option<&str>) -> Result<OAuthToken, Box<dyn Error>> {
        match &self.tokens {
            Some(tokens) => Ok(tokens.token()?),
            None => Err("there is no --kafka-token-command".into()),
        }
    }

    fn log(&self, level: RDKafkaLogLevel, facility: &str, line: &str) {
        let line = self.secrets.hide(line);
        let loud = match level {
            RDKafkaLogLevel::Emerg
            | RDKafkaLogLevel::Alert
            | RDKafkaLogLevel::Critical
            | RDKafkaLogLevel::Error
            | RDKafkaLogLevel::Warning => true,
            RDKafkaLogLevel::Notice | RDKafkaLogLevel::Info | RDKafkaLogLevel::Debug => false,
        };
        // A lost connection, and a producer's end, come as notices too, and the service words it with a remedy.
        // And that gapless guarantees are experimental is no news to an operator, who cannot choose.
        // Nor is a broker that needs a moment for the producer's id: it is asked again.
        // Nor is a property for the producer news to a client that reads.
        let is_known = facility == "GETPID"
            || facility == "CONFWARN"
                && (line.contains("enable.gapless.guarantee")
                    || line.contains("is a producer property"));
        if !loud || is_known || matches!(facility, "FAIL" | "ERROR" | "FATAL") {
            debug!(target: "librdkafka", facility, "{line}");
        } else if let Some(left_out) = self.log_slot() {
            if left_out > 0 {
                warn!(target: "librdkafka", left_out, "some lines of librdkafka were left out");
            }
            warn!(target: "librdkafka", facility, "{line}");
        }
    }

    fn error(&self, error: KafkaError, reason: &str) {
        let code = code_of(&error);
        if code == GAPLESS_GUARANTEE {
            return;
        }
        let reason = self.secrets.hide(reason);
        let text = without_counters(&reason);
        let mut notices = lock(&self.notices);
        if let Some(known) = notices
            .iter_mut()
            .find(|n| n.code == code && n.text == text)
        {
            known.times = known.times.saturating_add(1);
        } else if notices.len() < NOTICES_MAX {
            notices.push(ClientNotice {
                code,
                text: text.to_owned(),
                times: 1,
            });
        }
    }

    fn stats_raw(&self, json: &[u8]) {
        match serde_json::from_slice::<RawStats>(json) {
            Ok(raw) => {
                *lock(&self.stats) = Some(raw.digest());
                *lock(&self.nodes) = raw.nodes();
                *lock(&self.partitions) = raw.partitions();
            }
            Err(error) => debug!(%error, "librdkafka's statistics cannot be read"),
        }
    }
}

impl ConsumerContext for Inbox {}

impl ProducerContext for Inbox {
    type DeliveryOpaque = usize;

    fn delivery(&self, result: &DeliveryResult<'_>, ticket: usize) {
        let result = match result {
            Ok(_) => Ok(()),
            Err((error, _)) => Err(code_of(error)),
        };
        self.reports().push(Report {
            ticket: Ticket(ticket),
            result,
        });
    }
}

/// "…: Connection refused (after 0ms in state CONNECT, 5 identical error(s) suppressed)"
fn without_counters(reason: &str) -> &str {
    match reason.rfind(" (after ") {
        Some(at) if reason.ends_with(')') => &reason[..at],
        Some(_) | None => reason,
    }
}

#[derive(Deserialize)]
struct RawStats {
    #[serde(default)]
    brokers: HashMap<String, RawBroker>,
    #[serde(default)]
    topics: HashMap<String, RawTopic>,
}

#[derive(Deserialize)]
struct RawTopic {
    #[serde(default)]
    partitions: HashMap<i32, RawPartition>,
}

#[derive(Deserialize)]
struct RawPartition {
    /// Not among what the cluster told.
    #[serde(default)]
    unknown: bool,
}

#[derive(Deserialize)]
struct RawBroker {
    nodeid: i64,
    #[serde(default)]
    nodename: String,
    state: String,
    rtt: Option<RawWindow>,
}

#[derive(Deserialize)]
struct RawWindow {
    p50: i64,
    p99: i64,
}

impl RawStats {
    fn nodes(&self) -> Vec<(i32, String)> {
        let known = self.brokers.values().filter(|broker| broker.nodeid >= 0);
        known
            .filter_map(|broker| {
                Some((i32::try_from(broker.nodeid).ok()?, broker.nodename.clone()))
            })
            .collect()
    }

    fn partitions(&self) -> Vec<(String, i32)> {
        let count = |topic: &RawTopic| {
            // Number -1 is where records wait for the answer about their topic.
            let known = topic
                .partitions
                .iter()
                .filter(|(n, p)| **n >= 0 && !p.unknown);
            i32::try_from(known.count()).unwrap_or(i32::MAX)
        };
        let topics = self.topics.iter();
        topics.map(|(name, t)| (name.clone(), count(t))).collect()
    }

    fn digest(&self) -> BrokerStats {
        let mut stats = BrokerStats::default();
        let micros = |n: i64| Duration::from_micros(u64::try_from(n).unwrap_or(0));
        // Node -1 is a bootstrap address whose broker has not answered yet, or that stands beside
        // the broker's own entry.
        for broker in self.brokers.values().filter(|b| b.nodeid >= 0) {
            stats.brokers_known += 1;
            if broker.state == "UP" {
                stats.brokers_up += 1;
            }
            if let Some(rtt) = &broker.rtt {
                stats.rtt_p50 = stats.rtt_p50.max(micros(rtt.p50));
                stats.rtt_p99 = stats.rtt_p99.max(micros(rtt.p99));
            }
        }
        stats
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rdkafka::types::RDKafkaErrorCode;

    #[test]
    fn a_repeated_notice_is_one_notice_with_a_count() {
        let inbox = Inbox::default();
        for n in 0..4 {
            inbox.error(
                KafkaError::Global(RDKafkaErrorCode::BrokerTransportFailure),
                &format!("b:1/1: Connection refused (after {n}ms in state CONNECT)"),
            );
        }
        let notices = inbox.take_notices();
        assert_eq!(notices.len(), 1);
        assert_eq!(notices[0].text, "b:1/1: Connection refused");
        assert_eq!((notices[0].code, notices[0].times), (KafkaCode(-195), 2));
        assert!(inbox.take_notices().is_empty());
    }

    #[test]
    fn notices_are_bounded() {
        let inbox = Inbox::default();
        for n in 0..100 {
            inbox.error(
                KafkaError::Global(RDKafkaErrorCode::Resolve),
                &format!("host{n} cannot be resolved"),
            );
        }
        assert_eq!(inbox.take_notices().len(), NOTICES_MAX);
    }

    #[test]
    fn statistics_give_brokers_and_round_trip() {
        let inbox = Inbox::default();
        inbox.stats_raw(
            br#"{"brokers":{
                "a:1/bootstrap":{"nodeid":-1,"state":"UP","rtt":{"p50":9,"p99":9}},
                "a:1/1":{"nodeid":1,"state":"UP","rtt":{"p50":100,"p99":250}},
                "b:1/2":{"nodeid":2,"nodename":"b:1","state":"INIT"}}}"#,
        );
        let stats = inbox.stats().expect("read");
        assert_eq!((stats.brokers_known, stats.brokers_up), (2, 1));
        assert_eq!(stats.rtt_p99, Duration::from_micros(250));
        assert!(inbox.nodes().contains(&(2, "b:1".to_owned())));
    }

    #[test]
    fn statistics_give_the_partitions_that_the_client_knows() {
        let inbox = Inbox::default();
        inbox.stats_raw(
            br#"{"topics":{"t":{"topic":"t","partitions":{
                "0":{"partition":0,"unknown":false},
                "1":{"partition":1,"unknown":false},
                "7":{"partition":7,"unknown":true},
                "-1":{"partition":-1,"unknown":false}}}}}"#,
        );
        assert_eq!(inbox.take_partitions(), [("t".to_owned(), 2)]);
        assert!(inbox.take_partitions().is_empty());
    }
}
