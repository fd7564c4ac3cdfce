//! `walrelay demo`: the real `init` and the real relay between a throw-away Postgres and, unless
//! a real Kafka is named, librdkafka's simulated broker. A small shop writes, a consumer reads
//! back, and at the end what was promised is checked.
//!
//! # Invariants
//! - Nothing is left behind, whatever ends it (`server`).
//! - The summary is computed from what shop and consumer know; it asks nothing of the relay.

mod audience;
mod binaries;
mod chaos;
mod server;
mod shop;
mod show;
mod verdict;

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use crate::config::{
    CreateTopics, Database, DemoConfig, Http, InitConfig, Kafka, Mapping, OnPoison, RunConfig,
    Source, TableName, Template,
};
use crate::error::{DbError, Exit, Failure};
use crate::io::side::{Side, db_error};
use crate::io::{connect, kafka, registry};
use crate::service::{self, StopBy, Termination};
use audience::Audience;
use binaries::Binaries;
use server::Server;
use shop::{AGGREGATE_TYPE, Doors, Plan, Takings};
use show::Style;
use verdict::Verdict;

const MOCK: &str = "mock";
const SLOT: &str = "walrelay";
const PARTITIONS: i32 = 6;
const RATE_DEFAULT: u32 = 50;
/// Where neither a time nor a number of events was asked for.
const LENGTH_DEFAULT: Duration = Duration::from_secs(20);
const STREAMING_WITHIN: Duration = Duration::from_secs(30);
/// Without a single further record for so long, what is missing counts as lost.
const SILENCE_MAX: Duration = Duration::from_secs(20);
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Where it plays, for those who watch.
pub struct Setting {
    postgres: String,
    dir: String,
    is_mock: bool,
    bootstrap: String,
    topic: String,
}

/// # Errors
/// Something could not be had (exit 3), broke, or the summary is not as promised (exit 1).
pub async fn run(config: DemoConfig) -> Result<(), Failure> {
    if let Some(part) = &config.part {
        return chaos::play(part).await;
    }
    if config.chaos {
        return chaos::run(config).await;
    }
    let style = Style::of_stdout();
    let mut asked = Termination::listen()?;
    show::title(style);
    let stage = tokio::select! {
        stage = Stage::prepare(&config, style) => stage?,
        () = asked.next() => return too_early(),
    };
    let (stop, stopped) = oneshot::channel();
    let mut relay = Box::pin(service::run_with(
        stage.run.clone(),
        stage.kafka.clone(),
        StopBy::Request(stopped),
    ));
    let played = tokio::select! {
        ended = &mut relay => Err(ended_early(ended)),
        played = stage.play(&mut asked) => played,
    };
    let done = match played {
        Ok(Some(played)) => {
            // Nobody listens any more where the relay has just ended: its own word is taken.
            let _ = stop.send(());
            let ended = tokio::select! {
                ended = &mut relay => ended,
                () = asked.next() => Err(aborted()),
            };
            match ended {
                Ok(()) => stage.judge(played).await.map(Some),
                Err(failure) => Err(failure),
            }
        }
        Ok(None) => Ok(None),
        Err(failure) => Err(failure),
    };
    // Before the server, which would wait for a stream that is open and that nobody reads.
    drop(relay);
    let setting = stage.strike();
    match done? {
        Some(judged) => conclude(style, &setting, &judged),
        None => too_early(),
    }
}

fn too_early() -> Result<(), Failure> {
    show::say("Stopped before anything was written: nothing to check, nothing left behind.");
    Ok(())
}

/// All that the play needs.
struct Stage {
    server: Server,
    /// The demo's own session: it looks, and makes the shop's table.
    side: Side,
    kafka: kafka::Settings,
    run: RunConfig,
    setting: Setting,
    plan: Plan,
    style: Style,
}

/// What the shop knows, and who heard it.
struct Played {
    takings: Takings,
    audience: Audience,
}

struct Judged {
    verdict: Verdict,
    takings: Takings,
    is_trimmed: bool,
}

impl Stage {
    async fn prepare(config: &DemoConfig, style: Style) -> Result<Stage, Failure> {
        let plan = Plan {
            rate: config.rate.unwrap_or(RATE_DEFAULT),
            events: config.events,
            length: match (config.seconds, config.events) {
                (None, None) => Some(LENGTH_DEFAULT),
                (seconds, _) => seconds,
            },
        };
        let binaries = Binaries::find(config.pg_bin.as_deref())?;
        let (to_kafka, kafka, prefix) = broker(config)?;
        let topic = make_topic(&to_kafka, &kafka, &prefix).await?;
        let server = Server::start(&binaries).await?;
        let setting = setting(&binaries, &server, &kafka, topic);
        show::setting(style, &setting);
        let source = source(server.database());
        let side = set_up(&source, shop::TABLE, style).await?;
        let run = relay_config(source, to_kafka, &prefix);
        Ok(Stage {
            server,
            side,
            kafka,
            run,
            setting,
            plan,
            style,
        })
    }

    /// From the relay's start until everything that was written has arrived, or nothing more
    /// does. `None`: stopped before anything was written.
    async fn play(&self, asked: &mut Termination) -> Result<Option<Played>, Failure> {
        let doors = Arc::new(Doors::default());
        let audience = tokio::select! {
            audience = self.seat(&doors) => audience?,
            () = asked.next() => return Ok(None),
        };
        show::curtain(self.style, &self.plan);
        let mut trade = self.open_shop(&doors);
        let takings = tokio::select! {
            takings = &mut trade => takings,
            () = asked.next() => {
                doors.shut();
                tokio::select! {
                    takings = &mut trade => takings,
                    () = asked.next() => return Err(aborted()),
                }
            }
        };
        let takings = takings.map_err(|_| {
            Failure::new(
                Exit::Unexpected,
                "the shop's thread ended without a word",
                "report this as a bug",
            )
        })??;
        show::draining();
        tokio::select! {
            () = arrive(&audience, takings.written.len()) => {}
            () = asked.next() => return Err(aborted()),
        }
        Ok(Some(Played { takings, audience }))
    }

    /// Waits until the relay streams and the consumer reads.
    async fn seat(&self, doors: &Arc<Doors>) -> Result<Audience, Failure> {
        let until = Instant::now() + STREAMING_WITHIN;
        loop {
            let state = registry::slot_state(&self.side.client, SLOT).await;
            let state = state.map_err(|error| broken(&error))?;
            if state.is_some_and(|state| state.active_pid.is_some()) {
                break;
            }
            if Instant::now() > until {
                return Err(Failure::new(
                    Exit::Unexpected,
                    "the relay does not stream",
                    "run the demo with RUST_LOG=info to see why",
                ));
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        let topic = &self.setting.topic;
        Audience::start(
            self.kafka.clone(),
            topic.clone(),
            PARTITIONS,
            Arc::clone(doors),
            self.style,
        )
        .await
        .map_err(|error| unread(topic, &error))
    }

    fn open_shop(&self, doors: &Arc<Doors>) -> oneshot::Receiver<Result<Takings, Failure>> {
        let (tell, takings) = oneshot::channel();
        let database = self.server.database();
        let plan = self.plan;
        let doors = Arc::clone(doors);
        thread::spawn(move || {
            // Nobody waits for it where the demo was given up.
            let _ = tell.send(shop::trade(&database, &plan, &doors));
        });
        takings
    }

    /// After the relay's end: what has it delivered, all in all?
    async fn judge(&self, played: Played) -> Result<Judged, Failure> {
        let heard = played.audience.end().await;
        let heard = heard.map_err(|error| unread(&self.setting.topic, &error))?;
        let rows = self
            .side
            .client
            .query_one("select count(*) from public.outbox", &[])
            .await
            .map_err(|error| broken(&db_error(&error)))?;
        let in_table = usize::try_from(rows.get::<_, i64>(0)).unwrap_or_default();
        Ok(Judged {
            verdict: Verdict::of(&played.takings.written, &heard.received, in_table),
            takings: played.takings,
            is_trimmed: heard.is_trimmed,
        })
    }

    /// Everything is taken down.
    fn strike(self) -> Setting {
        self.setting
    }
}

/// How to reach Kafka, and what topics begin with.
fn broker(config: &DemoConfig) -> Result<(Kafka, kafka::Settings, String), Failure> {
    let brokers = config.brokers.clone().unwrap_or_else(|| MOCK.to_owned());
    kafka::check_brokers(&brokers)?;
    let to_kafka = Kafka {
        brokers,
        properties: Vec::new(),
        token_command: None,
        create_topics: None,
    };
    let kafka = kafka::Settings::new(&to_kafka, "walrelay-demo")?;
    // A real Kafka may hold other people's topics, and those of earlier demos.
    let prefix = if kafka.mock().is_some() {
        "outbox.event".to_owned()
    } else {
        let id = service::process_id()?;
        format!("walrelay-demo-{}", id.get(..8).unwrap_or(&id))
    };
    Ok((to_kafka, kafka, prefix))
}

/// The topic of the payments, with partitions that the demo knows.
async fn make_topic(
    to_kafka: &Kafka,
    kafka: &kafka::Settings,
    prefix: &str,
) -> Result<String, Failure> {
    let topic = format!("{prefix}.{AGGREGATE_TYPE}");
    let how = CreateTopics {
        partitions: PARTITIONS,
        replication: None,
    };
    kafka::create_topic(kafka, &topic, how)
        .await
        .map_err(|error| no_topic(&to_kafka.brokers, &topic, &error.to_string()))?;
    Ok(topic)
}

fn source(database: Database) -> Source {
    Source {
        database,
        table: TableName {
            schema: "public".to_owned(),
            name: "outbox".to_owned(),
        },
        slot: SLOT.to_owned(),
        publication: "walrelay".to_owned(),
    }
}

/// What is shown of it to whoever watches.
fn setting(
    binaries: &Binaries,
    server: &Server,
    kafka: &kafka::Settings,
    topic: String,
) -> Setting {
    Setting {
        postgres: binaries.version.clone(),
        dir: server.dir().display().to_string(),
        is_mock: kafka.mock().is_some(),
        bootstrap: kafka.bootstrap().to_owned(),
        topic,
    }
}

fn relay_config(source: Source, kafka: Kafka, prefix: &str) -> RunConfig {
    RunConfig {
        source,
        kafka,
        mapping: Mapping {
            topic: Template::parse(&format!("{prefix}.{{aggregate_type}}"))
                .expect("our own prefix is legal"),
            ..Mapping::default()
        },
        http: Http::Off,
        stall_timeout: Duration::from_secs(20),
        shutdown_timeout: Duration::from_secs(30),
        in_flight_bytes: 64 << 20,
        // Whoever watches should see it end.
        on_poison: OnPoison::Halt,
        on_gap: None,
        topic_grace: Duration::from_secs(300),
    }
}

/// `walrelay init`, and the shop's own tables.
async fn set_up(source: &Source, tables: &str, style: Style) -> Result<Side, Failure> {
    let init = InitConfig {
        source: source.clone(),
        mapping: Mapping::default(),
        print_sql: false,
        existing: None,
        lock_timeout: Duration::from_secs(10),
        json: false,
    };
    show::init(style, &super::init::report(&init).await?);
    let side = Side::connect(&source.database, None)
        .await
        .map_err(|error| connect::failure(&error, &source.database))?;
    side.run(tables).await.map_err(|error| broken(&error))?;
    Ok(side)
}

/// Until that many records are there, or none came for a while.
async fn arrive(audience: &Audience, written: usize) {
    let mut last = (audience.received(), Instant::now());
    while last.0 < written && last.1.elapsed() < SILENCE_MAX {
        tokio::time::sleep(LOOK_EVERY).await;
        let received = audience.received();
        if received != last.0 {
            last = (received, Instant::now());
        }
    }
}

fn conclude(style: Style, setting: &Setting, judged: &Judged) -> Result<(), Failure> {
    let verdict = &judged.verdict;
    show::summary(style, verdict, &judged.takings);
    if verdict.holds() {
        show::farewell(setting);
        return Ok(());
    }
    let mut failure = Failure::new(
        Exit::Unexpected,
        "the demo's summary is not what was promised",
        if judged.is_trimmed {
            "lower --rate, or use a real Kafka (--brokers): the simulated broker has dropped \
             records that the consumer had not read yet"
        } else {
            "report this as a bug, with the lines above and the --rate that you used"
        },
    );
    for complaint in verdict.complaints() {
        failure = failure.because(complaint);
    }
    Err(failure)
}

fn ended_early(ended: Result<(), Failure>) -> Failure {
    match ended {
        Err(failure) => failure.because("the relay ended before the demo did"),
        Ok(()) => Failure::new(
            Exit::Unexpected,
            "the relay ended before the demo did",
            "report this as a bug",
        ),
    }
}

fn aborted() -> Failure {
    Failure::new(
        Exit::Unexpected,
        "stopped by a second signal: nothing was checked",
        "one Ctrl-C is enough: the demo then ends in order, with its summary",
    )
}

fn broken(error: &DbError) -> Failure {
    Failure::new(
        Exit::Unexpected,
        format!("the throw-away Postgres: {error}"),
        "run the demo again; nobody but the demo should touch its Postgres",
    )
}

fn no_topic(brokers: &str, topic: &str, error: &str) -> Failure {
    Failure::refused(
        format!("topic {topic} cannot be made at {brokers}: {error}"),
        "look whether Kafka is up and reachable there without TLS and password, or leave \
         --brokers out: the demo then simulates a broker",
    )
}

fn unread(topic: &str, error: &str) -> Failure {
    Failure::new(
        Exit::Unexpected,
        format!("topic {topic} cannot be read back: {error}"),
        "look whether Kafka is up, and run the demo again",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(verdict: Verdict, is_trimmed: bool) -> Judged {
        Judged {
            verdict,
            takings: Takings::default(),
            is_trimmed,
        }
    }

    #[test]
    fn a_summary_that_does_not_hold_is_exit_1_and_says_what() {
        let setting = Setting {
            postgres: "18.1".to_owned(),
            dir: "/tmp/x".to_owned(),
            is_mock: true,
            bootstrap: "127.0.0.1:1".to_owned(),
            topic: "t".to_owned(),
        };
        let whole = Verdict {
            written: 2,
            in_table: 2,
            delivered: 2,
            ..Verdict::default()
        };
        let holds = judged(whole.clone(), false);
        assert_eq!(conclude(Style::Plain, &setting, &holds), Ok(()));
        let short = Verdict {
            delivered: 1,
            lost: 1,
            ..whole
        };
        let failure = conclude(Style::Plain, &setting, &judged(short.clone(), false));
        let failure = failure.expect_err("one is lost");
        assert_eq!(failure.exit, Exit::Unexpected);
        assert_eq!(failure.causes[1], "1 written and not delivered");
        let failure = conclude(Style::Plain, &setting, &judged(short, true));
        let failure = failure.expect_err("one is lost");
        assert!(failure.remedy.contains("--rate"), "{failure}");
    }
}
