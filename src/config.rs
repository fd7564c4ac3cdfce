//! What the operator asked for: flag > environment > file > default, parsed once, never checked
//! again.
//!
//! # Invariants
//! - A setting that this build cannot honour is refused (exit 2), never ignored.
//! - Nothing here connects, and no message or `Debug` holds a password.

mod conninfo;
mod database;
mod layers;
mod letters;
mod mapping;
mod passfile;
mod property;
mod values;

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use crate::cli::{self, Command};
use crate::error::Failure;

pub use crate::dead_letter::OnPoison;
pub use crate::gap::OnGap;
pub use crate::relay::mapping::{Clock, Columns, Mapping, Part};
pub use crate::relay::route::Template;
pub use database::{
    Auth, ChannelBinding, Database, Host, Method, Methods, Negotiation, Pem, Root, SslMode, Target,
    Tcp, Tls, TlsVersion,
};
pub use layers::Surroundings;
use layers::{Given, Layers};
pub use letters::{KeyName, LetterId, LettersTask, ListLetters, Order, Status, Which};
pub use property::Property;

/// What one invocation of the program is to do.
#[derive(Debug)]
pub struct Config {
    pub log: LogFormat,
    pub task: Task,
}

#[derive(Debug)]
pub enum Task {
    Init(Box<InitConfig>),
    Run(Box<RunConfig>),
    Check(Box<CheckConfig>),
    Status(Box<StatusConfig>),
    DeadLetters(Box<DeadLettersConfig>),
    Drain(Box<DrainConfig>),
    Drop(Box<DropConfig>),
    Demo(DemoConfig),
}

/// A table's name, as SQL would have it: never folded after parsing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableName {
    pub schema: String,
    pub name: String,
}

/// What every command that touches the database needs.
#[derive(Clone, Debug)]
pub struct Source {
    pub database: Database,
    pub table: TableName,
    pub slot: String,
    pub publication: String,
}

/// How to reach Kafka.
#[derive(Clone)]
pub struct Kafka {
    /// `host:port,…`; `mock` is the built-in demo broker.
    pub brokers: String,
    /// Extra librdkafka properties.
    pub properties: Vec<Property>,
    /// Prints a token for OAUTHBEARER; run by `sh -c`.
    pub token_command: Option<String>,
    pub create_topics: Option<CreateTopics>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CreateTopics {
    pub partitions: i32,
    /// `None`: the cluster's default.
    pub replication: Option<i32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    Text,
    Json,
}

/// What becomes of the rows that were in the table before its first slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    Leave,
    Publish,
}

/// Where metrics and health are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Http {
    Off,
    /// Nobody asked for it: where it is taken, the relay goes on without.
    Default(SocketAddr),
    At(SocketAddr),
}

#[derive(Clone, Debug)]
pub struct CheckConfig {
    pub source: Source,
    pub mapping: Mapping,
    /// `None`: only Postgres is looked at.
    pub kafka: Option<Kafka>,
    pub on_poison: OnPoison,
    pub json: bool,
}

#[derive(Clone, Debug)]
pub struct StatusConfig {
    pub source: Source,
    pub mapping: Mapping,
    pub http: Http,
    pub json: bool,
}

#[derive(Clone, Debug)]
pub struct DeadLettersConfig {
    pub source: Source,
    pub task: LettersTask,
    pub json: bool,
}

#[derive(Clone, Debug)]
pub struct InitConfig {
    pub source: Source,
    pub mapping: Mapping,
    pub print_sql: bool,
    pub existing: Option<Existing>,
    pub lock_timeout: Duration,
    pub json: bool,
}

#[derive(Clone, Debug)]
pub struct DropConfig {
    pub source: Source,
    pub mapping: Mapping,
    /// Do not ask.
    pub yes: bool,
    pub keep_publication: bool,
    pub json: bool,
}

#[derive(Clone, Debug)]
pub struct RunConfig {
    pub source: Source,
    pub kafka: Kafka,
    pub mapping: Mapping,
    pub http: Http,
    /// A broker that is silent for longer costs us the replication connection: an un-acked,
    /// talking client would block the server's shutdown.
    pub stall_timeout: Duration,
    /// How long a SIGTERM waits for deliveries.
    pub shutdown_timeout: Duration,
    pub in_flight_bytes: usize,
    pub on_poison: OnPoison,
    /// `None`: heal where it can be proved to be complete, else halt.
    pub on_gap: Option<OnGap>,
    /// How long an absent topic is waited for before its keys are parked.
    pub topic_grace: Duration,
}

#[derive(Clone, Debug)]
pub struct DrainConfig {
    pub run: RunConfig,
    pub deadline: Duration,
    /// The stream is held open until the server is down.
    pub hold: bool,
    pub json: bool,
}

#[derive(Clone, Debug)]
pub struct DemoConfig {
    pub seconds: Option<Duration>,
    pub events: Option<u64>,
    /// Payments a second; `None`: the demo's own choice.
    pub rate: Option<u32>,
    /// `None`: the built-in mock broker.
    pub brokers: Option<String>,
    /// Where `initdb` and `postgres` are; `None`: PATH, then the usual places.
    pub pg_bin: Option<PathBuf>,
    /// Everything is killed meanwhile.
    pub chaos: bool,
    /// What one of the chaos's own processes is to do.
    pub part: Option<String>,
}

const TABLE_DEFAULT: &str = "public.outbox";
const SLOT_DEFAULT: &str = "walrelay";
const PUBLICATION_DEFAULT: &str = "walrelay";
/// Health says where the database is and what is wrong with it: for this machine alone, unless
/// asked for.
const HTTP_DEFAULT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 9187);
const LOCK_TIMEOUT_DEFAULT: Duration = Duration::from_secs(10);
const STALL_TIMEOUT_DEFAULT: Duration = Duration::from_secs(20);
const SHUTDOWN_TIMEOUT_DEFAULT: Duration = Duration::from_secs(30);
/// A backlog of hours takes minutes.
const DEADLINE_DEFAULT: Duration = Duration::from_secs(10 * 60);
/// A cluster that restarts says of its topics for a while that they are not there.
const TOPIC_GRACE_DEFAULT: Duration = Duration::from_secs(5 * 60);
/// One frame is at most 64 MiB, and so is what the producer may hold.
const IN_FLIGHT_BYTES_MAX: usize = 64 << 20;
/// One maximal record of a default broker (1 MiB) has to fit.
const IN_FLIGHT_BYTES_MIN: usize = 1 << 20;

impl Config {
    /// Lays the flags over the environment and the file, and parses every value.
    ///
    /// # Errors
    /// `Exit::Usage`: a value is wrong, unknown, missing, or asks for what is not built yet.
    pub fn resolve(command: Command, around: &Surroundings) -> Result<Self, Failure> {
        match command {
            Command::Init(args) => {
                let layers = Layers::read(around, args.common.config.as_deref())?;
                Ok(Config {
                    log: log_format(&layers, around, args.common.log.clone())?,
                    task: Task::Init(Box::new(init(&layers, around, *args)?)),
                })
            }
            Command::Check(args) => {
                let layers = Layers::read(around, args.common.config.as_deref())?;
                Ok(Config {
                    log: log_format(&layers, around, args.common.log.clone())?,
                    task: Task::Check(Box::new(check(&layers, around, *args)?)),
                })
            }
            Command::Status(args) => {
                let layers = Layers::read(around, args.common.config.as_deref())?;
                Ok(Config {
                    log: log_format(&layers, around, args.common.log.clone())?,
                    task: Task::Status(Box::new(status(&layers, around, *args)?)),
                })
            }
            Command::Run(args) => {
                let layers = Layers::read(around, args.common.config.as_deref())?;
                Ok(Config {
                    log: log_format(&layers, around, args.common.log.clone())?,
                    task: Task::Run(Box::new(run(&layers, around, *args)?)),
                })
            }
            Command::Demo(args) => {
                let layers = Layers::read(around, args.common.config.as_deref())?;
                Ok(Config {
                    log: log_format(&layers, around, args.common.log.clone())?,
                    task: Task::Demo(demo(&layers, args)?),
                })
            }
            Command::DeadLetters(args) => {
                let common = args.action.common();
                let layers = Layers::read(around, common.config.as_deref())?;
                let log = log_format(&layers, around, common.log.clone())?;
                let config = letters::dead_letters(&layers, around, args.action)?;
                Ok(Config {
                    log,
                    task: Task::DeadLetters(Box::new(config)),
                })
            }
            Command::Prune(_) => Err(command_not_built("prune")),
            Command::Replay(_) => Err(command_not_built("replay")),
            Command::Poll(_) => Err(command_not_built("poll")),
            Command::Drain(args) => {
                let layers = Layers::read(around, args.run.common.config.as_deref())?;
                let deadline = layers.get("deadline", args.deadline)?;
                Ok(Config {
                    log: log_format(&layers, around, args.run.common.log.clone())?,
                    task: Task::Drain(Box::new(DrainConfig {
                        run: run(&layers, around, args.run)?,
                        deadline: duration_or(deadline, DEADLINE_DEFAULT)?,
                        hold: args.hold,
                        json: args.json,
                    })),
                })
            }
            Command::Drop(args) => {
                let layers = Layers::read(around, args.common.config.as_deref())?;
                Ok(Config {
                    log: log_format(&layers, around, args.common.log.clone())?,
                    task: Task::Drop(Box::new(drop_config(&layers, around, *args)?)),
                })
            }
        }
    }
}

fn command_not_built(name: &str) -> Failure {
    Failure::usage(
        format!("walrelay {name} is not built yet"),
        "use init, check, run, status, dead-letters, drain, drop or demo; walrelay --help shows what they take",
    )
}

fn init(layers: &Layers, around: &Surroundings, args: cli::InitCli) -> Result<InitConfig, Failure> {
    let existing = match args.existing {
        None => None,
        Some(cli::ExistingCli::Leave) => Some(Existing::Leave),
        Some(cli::ExistingCli::Publish) => Some(Existing::Publish),
    };
    let lock_timeout = layers.get("lock_timeout", args.lock_timeout)?;
    Ok(InitConfig {
        source: source(layers, around, args.source)?,
        mapping: mapping::mapping(layers, args.record)?,
        print_sql: args.print_sql,
        existing,
        lock_timeout: duration_or(lock_timeout, LOCK_TIMEOUT_DEFAULT)?,
        json: args.json,
    })
}

fn run(layers: &Layers, around: &Surroundings, args: cli::RunCli) -> Result<RunConfig, Failure> {
    refuse_not_built(layers, &args)?;
    let in_flight_bytes = match layers.get("in_flight_bytes", args.in_flight_bytes)? {
        Some(given) => values::size(&given, IN_FLIGHT_BYTES_MIN, IN_FLIGHT_BYTES_MAX)?,
        None => IN_FLIGHT_BYTES_MAX,
    };
    let stall_timeout = layers.get("stall_timeout", args.stall_timeout)?;
    let shutdown_timeout = layers.get("shutdown_timeout", args.shutdown_timeout)?;
    let topic_grace = layers.get("topic_grace", args.topic_grace)?;
    let on_poison = on_poison(layers, args.on_poison)?;
    let on_gap = on_gap(layers, args.on_gap)?;
    let Some(kafka) = kafka(layers, args.kafka)? else {
        return Err(Failure::usage(
            "no brokers: run does not know where Kafka is",
            "add --brokers host:port,… (or WALRELAY_BROKERS, or brokers in the file)",
        ));
    };
    Ok(RunConfig {
        source: source(layers, around, args.source)?,
        kafka,
        mapping: mapping::mapping(layers, args.record)?,
        http: http(layers, args.http)?,
        stall_timeout: duration_or(stall_timeout, STALL_TIMEOUT_DEFAULT)?,
        shutdown_timeout: duration_or(shutdown_timeout, SHUTDOWN_TIMEOUT_DEFAULT)?,
        in_flight_bytes,
        on_poison,
        on_gap,
        topic_grace: duration_or(topic_grace, TOPIC_GRACE_DEFAULT)?,
    })
}

fn on_poison(layers: &Layers, flag: Option<String>) -> Result<OnPoison, Failure> {
    let Some(given) = layers.get("on_poison", flag)? else {
        return Ok(OnPoison::Park);
    };
    match given.value.as_str() {
        "park" => Ok(OnPoison::Park),
        "halt" => Ok(OnPoison::Halt),
        _ => Err(given.wrong("is no such policy", "write park or halt")),
    }
}

fn on_gap(layers: &Layers, flag: Option<String>) -> Result<Option<OnGap>, Failure> {
    let Some(given) = layers.get("on_gap", flag)? else {
        return Ok(None);
    };
    match given.value.as_str() {
        "heal" => Ok(Some(OnGap::Heal)),
        "halt" => Ok(Some(OnGap::Halt)),
        "skip" => Ok(Some(OnGap::Skip)),
        _ => Err(given.wrong("is no such policy", "write heal, halt or skip")),
    }
}

fn check(
    layers: &Layers,
    around: &Surroundings,
    args: cli::CheckCli,
) -> Result<CheckConfig, Failure> {
    Ok(CheckConfig {
        kafka: kafka(layers, args.kafka)?,
        mapping: mapping::mapping(layers, args.record)?,
        source: source(layers, around, args.source)?,
        on_poison: on_poison(layers, args.on_poison)?,
        json: args.json,
    })
}

fn status(
    layers: &Layers,
    around: &Surroundings,
    args: cli::StatusCli,
) -> Result<StatusConfig, Failure> {
    Ok(StatusConfig {
        mapping: mapping::mapping(layers, args.record)?,
        source: source(layers, around, args.source)?,
        http: http(layers, args.http)?,
        json: args.json,
    })
}

fn drop_config(
    layers: &Layers,
    around: &Surroundings,
    args: cli::DropCli,
) -> Result<DropConfig, Failure> {
    Ok(DropConfig {
        mapping: mapping::mapping(layers, args.record)?,
        source: source(layers, around, args.source)?,
        yes: args.yes,
        keep_publication: args.keep_publication,
        json: args.json,
    })
}

/// `None`: no brokers are named.
fn kafka(layers: &Layers, args: cli::KafkaCli) -> Result<Option<Kafka>, Failure> {
    let create_topics = match layers.get("create_topics", args.create_topics)? {
        Some(given) => values::create_topics(&given)?,
        None => None,
    };
    let properties = layers
        .pairs("kafka", "--kafka", &args.kafka)?
        .into_iter()
        .map(|(name, text)| Property::parse(name, &text, |name| layers.variable(name)))
        .collect::<Result<_, _>>()?;
    let token_command = layers.get("kafka_token_command", args.kafka_token_command)?;
    let brokers = layers.get("brokers", args.brokers)?;
    Ok(brokers.map(|brokers| Kafka {
        brokers: brokers.value,
        properties,
        token_command: token_command.map(|given| given.value),
        create_topics,
    }))
}

fn http(layers: &Layers, flag: Option<String>) -> Result<Http, Failure> {
    let Some(given) = layers.get("http", flag)? else {
        return Ok(Http::Default(HTTP_DEFAULT));
    };
    if given.value == "off" {
        return Ok(Http::Off);
    }
    let address = given.value.parse().map_err(|_| {
        given.wrong(
            "is no address and port",
            "write an address of this machine and a port, e.g. 127.0.0.1:9187, or off",
        )
    })?;
    Ok(Http::At(address))
}

fn demo(layers: &Layers, args: cli::DemoCli) -> Result<DemoConfig, Failure> {
    // The demo keeps to its flags: a file or variables that describe a real database and a real
    // Kafka must not turn it loose on them.
    let brokers = match args.brokers {
        Some(value) => layers.flag_only("brokers", value)?,
        None => None,
    };
    Ok(DemoConfig {
        seconds: args.seconds.map(Duration::from_secs),
        events: args.events,
        rate: args.rate,
        brokers,
        pg_bin: args.pg_bin,
        chaos: args.chaos,
        part: args.part,
    })
}

fn source(layers: &Layers, around: &Surroundings, args: cli::SourceCli) -> Result<Source, Failure> {
    let slot = match layers.get("slot", args.slot)? {
        Some(given) => values::slot(&given)?,
        None => SLOT_DEFAULT.to_owned(),
    };
    let publication = match layers.get("publication", args.publication)? {
        Some(given) => values::publication(&given)?,
        None => PUBLICATION_DEFAULT.to_owned(),
    };
    let table = layers
        .get("table", args.table)?
        .unwrap_or_else(|| Given::default_of("table", TABLE_DEFAULT));
    let database_url = layers.get("database_url", args.database_url)?;
    Ok(Source {
        database: conninfo::parse(database_url.as_ref(), around)?,
        table: values::table(&table)?,
        slot,
        publication,
    })
}

fn log_format(
    layers: &Layers,
    around: &Surroundings,
    flag: Option<String>,
) -> Result<LogFormat, Failure> {
    let Some(given) = layers.get("log", flag)? else {
        return Ok(if around.terminal {
            LogFormat::Text
        } else {
            LogFormat::Json
        });
    };
    match given.value.as_str() {
        "text" => Ok(LogFormat::Text),
        "json" => Ok(LogFormat::Json),
        _ => Err(given.wrong("is neither text nor json", "write text or json")),
    }
}

/// Settings that design and file format know, of which this build honours one value only.
fn refuse_not_built(layers: &Layers, args: &cli::RunCli) -> Result<(), Failure> {
    match layers.get("retention", args.retention.clone())? {
        Some(given) if given.value != "off" => Err(given.wrong(
            "is not built yet",
            "write off, or leave it out: today only off is built",
        )),
        Some(_) | None => Ok(()),
    }
}

fn duration_or(given: Option<Given>, default: Duration) -> Result<Duration, Failure> {
    given.map_or(Ok(default), |given| values::duration(&given))
}

#[cfg(test)]
impl Source {
    /// For tests of what is judged without a server.
    pub(crate) fn sample(publication: &str) -> Self {
        Source {
            database: Database::plain("/tmp", 5432, "u", "d"),
            table: TableName {
                schema: "public".into(),
                name: "outbox".into(),
            },
            slot: "walrelay".into(),
            publication: publication.into(),
        }
    }
}

impl TableName {
    /// Quoted, ready to be put into a statement.
    #[must_use]
    pub fn sql(&self) -> String {
        let quote = |part: &str| format!("\"{}\"", part.replace('"', "\"\""));
        format!("{}.{}", quote(&self.schema), quote(&self.name))
    }
}

/// As a person would write it: quoted only where it has to be.
impl fmt::Display for TableName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let part = |f: &mut fmt::Formatter<'_>, part: &str| {
            if values::is_plain_identifier(part) {
                f.write_str(part)
            } else {
                write!(f, "\"{}\"", part.replace('"', "\"\""))
            }
        };
        part(f, &self.schema)?;
        f.write_str(".")?;
        part(f, &self.name)
    }
}

/// No values of properties, among which is `sasl.password`; a command may hold a secret too.
impl fmt::Debug for Kafka {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kafka")
            .field("brokers", &self.brokers)
            .field("properties", &self.properties)
            .field("token_command", &self.token_command.as_ref().map(|_| "***"))
            .field("create_topics", &self.create_topics)
            .finish()
    }
}

#[cfg(test)]
mod tests;
