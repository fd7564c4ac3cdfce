//! What can be typed: one struct a subcommand, no logic. Every setting stays text here; `config`
//! lays it over the environment and the file, and parses it.

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

/// Relays a Postgres transactional outbox to Kafka through a logical replication slot.
#[derive(Debug, Parser)]
#[command(
    name = "walrelay",
    version,
    propagate_version = true,
    after_help = "A setting is a flag, else an environment variable (--topic: WALRELAY_TOPIC), else a key\n\
                  in the file that --config names (topic), else its default."
)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    Init(Box<InitCli>),
    Run(Box<RunCli>),
    Demo(DemoCli),
    Check(Box<CheckCli>),
    Status(Box<StatusCli>),
    DeadLetters(Box<DeadLettersCli>),
    #[command(hide = true, disable_help_flag = true)]
    Prune(NotBuilt),
    #[command(hide = true, disable_help_flag = true)]
    Replay(NotBuilt),
    #[command(hide = true, disable_help_flag = true)]
    Poll(NotBuilt),
    Drain(Box<DrainCli>),
    Drop(Box<DropCli>),
}

/// A subcommand that has its name but not its work yet.
#[derive(Debug, Args)]
pub struct NotBuilt {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    pub rest: Vec<OsString>,
}

/// Where settings come from, and how to log: every subcommand takes these.
#[derive(Debug, Default, Args)]
pub struct CommonCli {
    /// TOML file with settings
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// `text` or `json` [default: text on a terminal, else json]; RUST_LOG filters
    #[arg(long, value_name = "FORMAT")]
    pub log: Option<String>,
}

#[derive(Debug, Default, Args)]
pub struct SourceCli {
    /// Postgres, as a libpq URL or keyword string [default: the PG* variables]. Leave the password
    /// to PGPASSWORD or WALRELAY_DATABASE_URL: a command line can be read by others
    #[arg(long, value_name = "URL")]
    pub database_url: Option<String>,
    /// Outbox table, quoted as in SQL: "Sales"."Out box" [default: public.outbox]
    #[arg(long, value_name = "NAME")]
    pub table: Option<String>,
    /// Replication slot [default: walrelay]
    #[arg(long, value_name = "NAME")]
    pub slot: Option<String>,
    /// Publication, quoted as in SQL [default: walrelay]
    #[arg(long, value_name = "NAME")]
    pub publication: Option<String>,
}

/// How to reach Kafka.
#[derive(Default, Args)]
pub struct KafkaCli {
    /// Kafka, as host:port,… (required by run); `mock` is the built-in demo broker
    #[arg(long, value_name = "LIST")]
    pub brokers: Option<String>,
    /// Any librdkafka property (TLS, SASL, …); may be repeated. In a value ${env:NAME} and
    /// ${file:/path} stand for what is there: a command line can be read by others
    #[arg(long, value_name = "KEY=VALUE")]
    pub kafka: Vec<String>,
    /// Prints a token for sasl.mechanism=OAUTHBEARER: a JWT, or JSON with access_token and
    /// expires_in. Run by sh, again before the token expires
    #[arg(long, value_name = "COMMAND")]
    pub kafka_token_command: Option<String>,
    /// Make absent topics, with so many partitions and replicas [default: off]
    #[arg(long, value_name = "P[:R]")]
    pub create_topics: Option<String>,
}

/// Nothing of what may hold a password.
impl fmt::Debug for KafkaCli {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KafkaCli")
            .field("brokers", &self.brokers)
            .field("create_topics", &self.create_topics)
            .finish_non_exhaustive()
    }
}

/// How a row becomes a record.
#[derive(Debug, Default, Args)]
pub struct RecordCli {
    /// Topic, a template over columns [default: outbox.event.{aggregate_type}]
    #[arg(long, value_name = "TEMPLATE")]
    pub topic: Option<String>,
    /// Record header from a column; may be repeated
    #[arg(long, value_name = "NAME=COLUMN")]
    pub header: Vec<String>,
    /// Column of a table of your own; may be repeated. PART is event_id, aggregate_type,
    /// aggregate_id (the key), event_type, payload, headers, timestamp, partition, id, created_at or
    /// xid; an empty COLUMN says that there is none [default: columns of these names]
    #[arg(long, value_name = "PART=COLUMN")]
    pub column: Vec<String>,
    /// Topic in place of what the template gives; may be repeated
    #[arg(long, value_name = "NAME=TOPIC")]
    pub topic_for: Vec<String>,
    /// Record timestamp: `commit` or `publish`; for a column see --column [default: commit]
    #[arg(long, value_name = "TIME")]
    pub timestamp: Option<String>,
}

/// Look at every requirement of `run`, say what is missing, change nothing
#[derive(Debug, Default, Args)]
#[command(
    after_help = "Exit code: 0, `run` can start (there may be warnings); 3, something is in its way; 4, a\n\
                  decision is; 2, wrong usage. The last line on stderr then says what to do."
)]
pub struct CheckCli {
    #[command(flatten)]
    pub source: SourceCli,
    #[command(flatten)]
    pub record: RecordCli,
    #[command(flatten)]
    pub kafka: KafkaCli,
    /// What run is to do with an event that Kafka will never take: `park` or `halt` [default: park]
    #[arg(long, value_name = "POLICY")]
    pub on_poison: Option<String>,
    /// Report as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub common: CommonCli,
}

/// Say how far the relay is and what holds it up; works while it is down
#[derive(Debug, Default, Args)]
#[command(
    after_help = "Exit code: 0, a leader streams and nothing is wrong; 3, something needs attention (no relay\n\
                  runs, it is not ready, the database cannot be reached, the slot is missing, ...); 4, an\n\
                  event or a gap waits for a decision; 2, wrong usage. The last line on stderr then says\n\
                  what to do."
)]
pub struct StatusCli {
    #[command(flatten)]
    pub source: SourceCli,
    #[command(flatten)]
    pub record: RecordCli,
    /// Where the relay's own metrics and health are [default: 127.0.0.1:9187]
    #[arg(long, value_name = "ADDRESS")]
    pub http: Option<String>,
    /// Report as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub common: CommonCli,
}

/// Look at events that could not be published, and decide what becomes of them
#[derive(Debug, Args)]
#[command(
    after_help = "An ID is the id of a row (row:7), an event_id (event:7), or either.\n\
                  Exit code: 0, done; 3, there is no such dead letter, or the database refuses or cannot be\n\
                  reached; 2, wrong usage. The last line on stderr then says what to do."
)]
pub struct DeadLettersCli {
    #[command(subcommand)]
    pub action: DeadLettersAction,
}

#[derive(Debug, Subcommand)]
pub enum DeadLettersAction {
    List(LettersListCli),
    Show(LettersShowCli),
    Retry(LettersRetryCli),
    Discard(LettersDiscardCli),
    Park(LettersParkCli),
}

impl DeadLettersAction {
    pub fn common(&self) -> &CommonCli {
        let place = match self {
            DeadLettersAction::List(args) => &args.place,
            DeadLettersAction::Show(args) => &args.place,
            DeadLettersAction::Retry(args) => &args.place,
            DeadLettersAction::Discard(args) => &args.place,
            DeadLettersAction::Park(args) => &args.place,
        };
        &place.common
    }
}

/// Where the dead letters are, and how to speak of them.
#[derive(Debug, Default, Args)]
pub struct LettersPlaceCli {
    #[command(flatten)]
    pub source: SourceCli,
    /// Report as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub common: CommonCli,
}

/// Show the parked keys, a line each, and the topics that are held
#[derive(Debug, Default, Args)]
pub struct LettersListCli {
    /// Of what became of them [default: parked]
    #[arg(long, value_enum, value_name = "STATUS")]
    pub status: Option<StatusOfLetter>,
    /// Only of this topic
    #[arg(long, value_name = "TOPIC")]
    pub topic: Option<String>,
    /// Every event of this aggregate_id
    #[arg(long, value_name = "K")]
    pub key: Option<String>,
    /// Only of this aggregate_type
    #[arg(long = "type", value_name = "T", requires = "key")]
    pub of_type: Option<String>,
    /// Lines at most [default: 50]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub limit: Option<u32>,
    /// Newest first
    #[arg(long)]
    pub newest: bool,
    #[command(flatten)]
    pub place: LettersPlaceCli,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum StatusOfLetter {
    Parked,
    Delivered,
    Discarded,
}

/// Show one dead letter: why it is parked, what to do, and what would have been sent
#[derive(Debug, Default, Args)]
pub struct LettersShowCli {
    /// Id of the row, or event_id
    pub id: String,
    #[command(flatten)]
    pub place: LettersPlaceCli,
}

/// Which dead letters.
#[derive(Debug, Default, Args)]
pub struct WhichCli {
    /// Id of a row, or event_id
    #[arg(required_unless_present_any = ["key", "all"], conflicts_with_all = ["key", "all"])]
    pub id: Option<String>,
    /// All of this aggregate_id
    #[arg(long, value_name = "K", conflicts_with = "all")]
    pub key: Option<String>,
    /// All that are parked
    #[arg(long)]
    pub all: bool,
    /// With --key: only of this aggregate_type
    #[arg(long = "type", value_name = "T", requires = "key", conflicts_with_all = ["id", "all"])]
    pub of_type: Option<String>,
}

/// Ask the leader to publish dead letters again; one ID stands for its whole key
#[derive(Debug, Default, Args)]
pub struct LettersRetryCli {
    #[command(flatten)]
    pub which: WhichCli,
    #[command(flatten)]
    pub place: LettersPlaceCli,
}

/// Give dead letters up: they are never published. Who and when are kept
#[derive(Debug, Default, Args)]
pub struct LettersDiscardCli {
    #[command(flatten)]
    pub which: WhichCli,
    /// Do not ask
    #[arg(long)]
    pub yes: bool,
    #[command(flatten)]
    pub place: LettersPlaceCli,
}

/// Park what is held of a topic, of which too many keys would have been parked at once
#[derive(Debug, Default, Args)]
pub struct LettersParkCli {
    /// The topic, as `list` shows it; '' for events whose row gives none
    #[arg(long, value_name = "T", required = true)]
    pub topic: String,
    #[command(flatten)]
    pub place: LettersPlaceCli,
}

/// Make the tables, the publication and the slot; a second time changes nothing
#[derive(Debug, Default, Args)]
pub struct InitCli {
    #[command(flatten)]
    pub source: SourceCli,
    #[command(flatten)]
    pub record: RecordCli,
    /// Print the SQL that would run, and change nothing
    #[arg(long)]
    pub print_sql: bool,
    /// What to do with the rows that the table holds already
    #[arg(long, value_enum, value_name = "CHOICE")]
    pub existing: Option<ExistingCli>,
    /// How long to wait for other transactions [default: 10s]
    #[arg(long, value_name = "DURATION", allow_hyphen_values = true)]
    pub lock_timeout: Option<String>,
    /// Report as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub common: CommonCli,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ExistingCli {
    /// Leave them alone, for ever
    Leave,
    /// Publish them (not built yet)
    Publish,
}

/// Remove slot and publication, after showing what is not delivered
#[derive(Debug, Default, Args)]
#[command(
    after_help = "Exit code: 0, they are gone, or you said no; 3, a relay runs, or the database refuses or\n\
                  cannot be reached; 2, wrong usage. The last line on stderr then says what to do."
)]
pub struct DropCli {
    #[command(flatten)]
    pub source: SourceCli,
    #[command(flatten)]
    pub record: RecordCli,
    /// Do not ask
    #[arg(long)]
    pub yes: bool,
    /// Leave the publication
    #[arg(long)]
    pub keep_publication: bool,
    /// Report as JSON; needs --yes
    #[arg(long, requires = "yes")]
    pub json: bool,
    #[command(flatten)]
    pub common: CommonCli,
}

/// Relay committed outbox rows to Kafka until SIGTERM
#[derive(Debug, Default, Args)]
pub struct RunCli {
    #[command(flatten)]
    pub source: SourceCli,
    #[command(flatten)]
    pub record: RecordCli,
    #[command(flatten)]
    pub kafka: KafkaCli,
    /// How long to wait for an absent topic before its keys are parked [default: 5m]
    #[arg(long, value_name = "DURATION", allow_hyphen_values = true)]
    pub topic_grace: Option<String>,
    /// What to do with an event that Kafka will never take: `park` (see dead-letters) or `halt`
    /// [default: park]
    #[arg(long, value_name = "POLICY")]
    pub on_poison: Option<String>,
    /// What to do where rows are in no stream any more: `heal` (publish them from the table), `halt`,
    /// or `skip` (give them up) [default: heal for the table that init made, else halt]
    #[arg(long, value_name = "POLICY")]
    pub on_gap: Option<String>,
    /// How long to keep streamed rows [default: off]
    #[arg(long, value_name = "DURATION")]
    pub retention: Option<String>,
    /// Address of metrics and health, or `off` [default: 127.0.0.1:9187]
    #[arg(long, value_name = "ADDRESS")]
    pub http: Option<String>,
    /// Close the replication connection when Kafka is silent for longer [default: 20s]
    #[arg(long, value_name = "DURATION", allow_hyphen_values = true)]
    pub stall_timeout: Option<String>,
    /// How long SIGTERM waits for deliveries [default: 30s]
    #[arg(long, value_name = "DURATION", allow_hyphen_values = true)]
    pub shutdown_timeout: Option<String>,
    /// Bound on what is given to Kafka and not yet delivered, 1MiB to 64MiB [default: 64MiB]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub in_flight_bytes: Option<String>,
    #[command(flatten)]
    pub common: CommonCli,
}

/// Relay until nothing is left, once the writers are stopped, and say when that is so
#[derive(Debug, Default, Args)]
#[command(
    after_help = "Exit code: 0, drained: nothing is left and nobody writes; 3, not drained in time, or another\n\
                  relay runs; 4, an event or a gap waits for a decision; 2, wrong usage. The last line on\n\
                  stderr then says what to do."
)]
pub struct DrainCli {
    #[command(flatten)]
    pub run: RunCli,
    /// How long it may take [default: 10m]
    #[arg(long, value_name = "DURATION", allow_hyphen_values = true)]
    pub deadline: Option<String>,
    /// Once drained, hold the stream open until the server is shut down (for pg_upgrade from 17 on)
    #[arg(long)]
    pub hold: bool,
    /// Report as JSON
    #[arg(long)]
    pub json: bool,
}

/// Show it all on a throw-away Postgres and a simulated broker
#[derive(Debug, Default, Args)]
pub struct DemoCli {
    /// End after so many seconds [default: 20, or when --events are written]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub seconds: Option<u64>,
    /// End after so many events
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub events: Option<u64>,
    /// Payments a second [default: 50]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub rate: Option<u32>,
    /// A real Kafka, as host:port,…; a topic of its own stays there [default: the built-in mock
    /// broker]
    #[arg(long, value_name = "LIST")]
    pub brokers: Option<String>,
    /// Directory of initdb and postgres [default: PATH, then the usual places]
    #[arg(long, value_name = "DIR")]
    pub pg_bin: Option<PathBuf>,
    /// Kill relays, Postgres, writer and consumer meanwhile, then balance the books [default: for
    /// 30 seconds, 100 payments a second]
    #[arg(long, conflicts_with = "events")]
    pub chaos: bool,
    /// The demo's own processes are told by this what they are.
    #[arg(long, hide = true)]
    pub part: Option<String>,
    #[command(flatten)]
    pub common: CommonCli,
}
