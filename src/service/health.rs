//! Metrics and health of a running relay: what the loop hands over, and the server that answers.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio_postgres::Client;

use super::{Moment, now};
use crate::config::{Http, Source};
use crate::dead_letter::Tripped;
use crate::error::{self, Class, DbError, Failure};
use crate::io::http::{Answer, Server};
use crate::io::kafka::Publisher;
use crate::io::sample::{self, Holding};
use crate::io::sql::show_table;
use crate::record::Report;
use crate::relay::machine::Machine;
use crate::relay::orders::{Absent, Closed, Ill, Leadership, Seek, WhyNot};
use crate::telemetry::health::{
    self, Board, Brokers, Facts, Identity, Kafka, Lead, Now, Stream, Trouble, Waiting,
};
use crate::telemetry::{Amount, Gauges, Leader, Peer, Progress};

/// How often the database is asked how the slot stands.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(10);
const PATHS: [&str; 4] = ["/", "/metrics", "/livez", "/readyz"];

/// What is known about this relay, for whoever asks.
pub struct Vitals {
    pub progress: Arc<Progress>,
    board: Arc<Board>,
    /// The client library's last word; a producer that was built anew has none for a while.
    brokers: Option<Brokers>,
    /// Connections made so far: the side's and the stream's.
    sessions: u32,
    streams: u32,
    /// Kept for as long as it is to answer.
    _server: Option<Server>,
}

impl Vitals {
    /// # Errors
    /// Somebody asked for an address that cannot be had.
    pub fn start(http: Http, source: &Source, process_id: &str) -> Result<Self, Failure> {
        let identity = Identity {
            slot: source.slot.clone(),
            publication: source.publication.clone(),
            table: show_table(&source.table),
            process_id: process_id.to_owned(),
        };
        let progress = Arc::new(Progress::new());
        let board = Arc::new(Board::new(identity, both_clocks()));
        let server = serve(http, &progress, &board)?;
        Ok(Vitals {
            progress,
            board,
            brokers: None,
            sessions: 0,
            streams: 0,
            _server: server,
        })
    }

    /// Before the loop turns, while it is waited for something: never ends.
    pub async fn wait_alive(&self) {
        loop {
            self.turned(now());
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }

    /// First thing in every turn of the loop.
    pub fn turned(&self, now: Moment) {
        self.board.turned(now);
    }

    /// How things stand now; about once a second, and when something changed.
    pub fn hand_over(&mut self, machine: &Machine, publisher: &Publisher, now: Moment) {
        let wall = SystemTime::now();
        let standing = machine.standing(now);
        let amount = |events, bytes| Amount { events, bytes };
        let load = standing.load;
        let in_flight = amount(load.in_flight_events, load.in_flight_bytes);
        let held = amount(load.held_events, load.held_bytes);
        self.progress.gauges(Gauges {
            in_flight,
            held,
            oldest_undelivered: standing.oldest_undelivered,
            wal_end: standing.received,
            confirmed_flush: standing.flush,
            leader: match standing.leadership {
                Leadership::Leading => Leader::Leading,
                Leadership::Elsewhere(_) => Leader::Standby,
                Leadership::Unknown | Leadership::NoDatabase(_) => Leader::Unknown,
            },
            parked_keys: standing.parked_keys,
            retried_keys: standing.retried_keys,
            tripped_topics: standing.tripped.len(),
        });
        if let Some(stats) = publisher.broker_stats() {
            self.brokers = Some(Brokers {
                known: stats.brokers_known,
                up: stats.brokers_up,
                rtt_p50: stats.rtt_p50,
                rtt_p99: stats.rtt_p99,
            });
        }
        let complaint = publisher.trouble();
        self.board.facts(Facts {
            lead: lead(standing.leadership),
            stream: stream(standing.closed),
            ending: standing.ending.map(trouble),
            stuck_event: standing.stuck_event.map(trouble),
            kafka: Kafka {
                trouble: complaint.map(|(what, remedy)| Trouble { what, remedy }),
                refused: publisher
                    .denied()
                    .map(|(what, remedy)| Trouble { what, remedy })
                    .or(standing.refused.map(trouble)),
                silent_since: standing.silent.and_then(|silent| wall.checked_sub(silent)),
                brokers: self.brokers,
                has_answered: publisher.is_well() || self.progress.delivered_so_far() > 0,
            },
            topics: machine.absent_topics().into_iter().map(waiting).collect(),
            is_full: standing.is_full,
            not_parked: standing.not_parked.map(trouble),
            tripped: standing.tripped.iter().map(tripped).collect(),
            parked_keys: standing.parked_keys,
            in_flight,
            held,
            oldest_undelivered: standing.oldest_undelivered,
            received: standing.received,
            delivered: standing.delivered.map(|w| (w.commit_lsn, w.commit_time)),
        });
        self.log();
    }

    // ---- what the connections went through ------------------------------------------------

    pub fn postgres_failed(&self, class: Class) {
        self.progress.failed(Peer::Postgres, class);
    }

    /// `sessions`: made so far.
    pub fn sought(&mut self, seek: &Seek, sessions: u32) {
        match seek {
            Seek::Led(_) | Seek::Elsewhere(_) => {}
            Seek::Later(_) => self.postgres_failed(Class::Transient),
            Seek::Refused(_) => self.postgres_failed(Class::Definite),
        }
        for _ in self.sessions.max(1)..sessions {
            self.progress.reconnected(Peer::Postgres);
        }
        self.sessions = sessions;
    }

    pub fn opened(&mut self) {
        if self.streams > 0 {
            self.progress.reconnected(Peer::Postgres);
        }
        self.streams += 1;
    }

    pub fn refused(&self, reports: &[Report]) {
        for code in reports.iter().filter_map(|report| report.result.err()) {
            self.progress
                .failed(Peer::Kafka, error::kafka::entry(code).class);
        }
    }

    pub fn sampled(&self, sample: Result<Box<sample::Sample>, DbError>) {
        match sample {
            Ok(taken) => self.board.sample(to_telemetry(*taken)),
            // The session's end, or the leader's next proof, says what is wrong with it.
            Err(error) => tracing::debug!(%error, "the slot could not be looked at"),
        }
    }

    /// What no notice of the machine tells.
    fn log(&self) {
        for said in self.board.look(both_clocks()) {
            let condition = said.name;
            if said.ok {
                tracing::info!(condition, "{}", said.what);
            } else {
                let remedy = said.remedy.unwrap_or_default();
                tracing::warn!(condition, "{}; remedy: {remedy}", said.what);
            }
        }
    }
}

/// When to ask the database, and over which session.
#[derive(Default)]
pub struct Sampler {
    client: Option<Arc<Client>>,
    due_at: Moment,
    is_asking: bool,
}

impl Sampler {
    /// There is another session, or none. A new one is asked at once.
    pub fn session(&mut self, client: Option<Arc<Client>>, now: Moment) {
        let is_new = match (&self.client, &client) {
            (Some(old), Some(new)) => !Arc::ptr_eq(old, new),
            (None, Some(_)) => true,
            (Some(_) | None, None) => false,
        };
        if is_new {
            self.due_at = now;
            self.is_asking = false;
        }
        self.client = client;
    }

    /// Whom to ask now. One question at a time: [`Sampler::answered`] must follow.
    pub fn due(&mut self, now: Moment) -> Option<Arc<Client>> {
        if self.is_asking || now < self.due_at {
            return None;
        }
        let client = self.client.clone()?;
        self.is_asking = true;
        self.due_at = now + SAMPLE_INTERVAL;
        Some(client)
    }

    pub fn answered(&mut self) {
        self.is_asking = false;
    }
}

fn tripped(tripped: &Tripped) -> Trouble {
    Trouble {
        what: format!(
            "{} are held, too many keys would be parked: {} ({})",
            tripped.events(),
            tripped.reason,
            tripped.message
        ),
        remedy: format!(
            "mend its cause: one held event a minute is tried, and the first success lets all go; or park them: {}",
            tripped.park_command()
        ),
    }
}

fn to_telemetry(taken: sample::Sample) -> health::Sample {
    let at = SystemTime::now();
    let holding = |holding| match holding {
        Holding::None => health::Held::None,
        Holding::Hidden => health::Held::Unknown,
        Holding::By { who, age } => health::Held::By { who, age },
    };
    health::Sample {
        at,
        wal_end: taken.wal_end,
        wal_end_before: None,
        wal_bytes_per_second: None,
        slot: taken.slot.map(|slot| health::SlotSample {
            confirmed_flush: slot.confirmed_flush,
            restart: slot.restart,
            wal_status: slot.wal_status,
            safe_wal_size: slot.safe_wal_size,
            max_keep_bytes: slot.max_keep_bytes,
            holder: slot.active_pid,
        }),
        confirmed_since: at,
        publication: taken
            .publication
            .map(|(what, remedy)| Trouble { what, remedy }),
        leader: taken.leader,
        dead_standbys: taken.dead_standbys,
        oldest_transaction: holding(taken.oldest_transaction),
        prepared_transaction: holding(taken.prepared_transaction),
    }
}

fn lead(leadership: Leadership) -> Lead {
    match leadership {
        Leadership::Unknown => Lead::Starting,
        Leadership::Leading => Lead::Leading,
        Leadership::Elsewhere(why) => Lead::Standby(why),
        Leadership::NoDatabase(ill) => Lead::NoDatabase(trouble(ill)),
    }
}

fn stream(closed: Option<Closed>) -> Stream {
    match closed {
        None => Stream::Open,
        Some(Closed::Opening) => Stream::Opening,
        Some(Closed::UntilKafkaAnswers) => Stream::WaitsForKafka,
        Some(Closed::Because(why)) => Stream::Closed(why),
    }
}

fn waiting(absent: Absent) -> Waiting {
    let (denied, unanswered) = match absent.why {
        WhyNot::Absent => (None, None),
        WhyNot::Denied(right) => {
            let what = right.refusal(&absent.topic);
            let remedy = right.remedy(&absent.topic);
            (Some(Trouble { what, remedy }), None)
        }
        WhyNot::Silent(why) => (None, Some(why)),
    };
    Waiting {
        topic: absent.topic,
        unanswered,
        denied,
        events: absent.events,
        first_event_id: absent.first_event_id,
    }
}

fn trouble(ill: Ill) -> Trouble {
    Trouble {
        what: ill.what,
        remedy: ill.remedy,
    }
}

fn both_clocks() -> Now {
    Now {
        wall: SystemTime::now(),
        boot: now(),
    }
}

/// Binds, says where, and serves on a thread of its own.
fn serve(
    http: Http,
    progress: &Arc<Progress>,
    board: &Arc<Board>,
) -> Result<Option<Server>, Failure> {
    let (address, is_asked_for) = match http {
        Http::Off => return Ok(None),
        Http::Default(address) => (address, false),
        Http::At(address) => (address, true),
    };
    let (progress, board) = (Arc::clone(progress), Arc::clone(board));
    let handler = Arc::new(move |path: &str| answer(path, &progress, &board));
    match Server::start(address, &PATHS, handler) {
        Ok(server) => {
            tracing::info!("http listening on {}", server.address());
            Ok(Some(server))
        }
        Err(error) if is_asked_for => Err(Failure::refused(
            format!("cannot listen on {address} for metrics and health: {error}"),
            "name an address of this machine and a free port with --http, or --http off",
        )),
        Err(error) => {
            tracing::warn!(
                "no metrics and no health: cannot listen on {address}: {error}; remedy: --http with another port, one for each relay on this machine, or --http off"
            );
            Ok(None)
        }
    }
}

fn answer(path: &str, progress: &Progress, board: &Board) -> Option<Answer> {
    let health = || board.report(progress.delivered_so_far(), both_clocks());
    let (status, content_type, body) = match path {
        "/metrics" => (
            200,
            "text/plain; version=0.0.4; charset=utf-8",
            progress.gather(&health()),
        ),
        "/livez" | "/readyz" => {
            let health = health();
            let is_well = match path {
                "/livez" => health.live,
                _ => health.ready,
            };
            let body = serde_json::to_string_pretty(&health).ok()?;
            (
                if is_well { 200 } else { 503 },
                "application/json",
                format!("{body}\n"),
            )
        }
        "/" => (200, "text/plain; charset=utf-8", index()),
        _ => return None,
    };
    Some(Answer {
        status,
        content_type,
        body,
    })
}

fn index() -> String {
    format!(
        "walrelay {}\n\n\
         /metrics  Prometheus text\n\
         /livez    200 while the relay's loop turns\n\
         /readyz   200 while every condition holds; JSON\n",
        env!("CARGO_PKG_VERSION")
    )
}
