//! What the operator asked for: flag > environment > file > default, parsed once, never checked
//! again.

use std::path::PathBuf;
use std::time::Duration;

/// How to reach Postgres. Both connections (replication and side) are made from this.
#[derive(Clone)]
pub struct Database {
    /// A name, an address, or a directory that holds the Unix socket (it starts with `/`).
    pub host: String,
    pub port: u16,
    pub user: String,
    pub password: Option<String>,
    pub dbname: String,
    pub sslmode: SslMode,
    pub sslrootcert: Option<PathBuf>,
    pub application_name: String,
    pub connect_timeout: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SslMode {
    Disable,
    Prefer,
    Require,
    VerifyFull,
}

/// A table's name, as SQL would have it: never folded after parsing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableName {
    pub schema: String,
    pub name: String,
}

/// What every command that touches the database needs.
#[derive(Clone)]
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
    /// Extra librdkafka properties, already checked against the ones that a promise rests on.
    pub properties: Vec<(String, String)>,
    pub create_topics: Option<CreateTopics>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CreateTopics {
    pub partitions: i32,
    /// `None`: the cluster's default.
    pub replication: Option<i32>,
}
