//! How things go wrong: the class of an error, its remedy, the exit code. One table for Kafka's
//! codes, one for Postgres's SQLSTATEs.

pub mod postgres;

use std::fmt;

use crate::record::KafkaCode;

/// How the process ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// Clean end, SIGTERM included.
    Clean = 0,
    Unexpected = 1,
    /// Usage or configuration: found before anything was contacted.
    Usage = 2,
    /// The surroundings need an operator: permission, `wal_level`, a missing object, a password.
    Refused = 3,
    /// Stopped by policy: poison, a gap.
    Halted = 4,
}

/// An end that a person reads: one cause a line, the last line being what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub exit: Exit,
    pub causes: Vec<String>,
    pub remedy: String,
}

impl Failure {
    pub fn new(exit: Exit, cause: impl Into<String>, remedy: impl Into<String>) -> Self {
        Failure {
            exit,
            causes: vec![cause.into()],
            remedy: remedy.into(),
        }
    }

    pub fn usage(cause: impl Into<String>, remedy: impl Into<String>) -> Self {
        Failure::new(Exit::Usage, cause, remedy)
    }

    pub fn refused(cause: impl Into<String>, remedy: impl Into<String>) -> Self {
        Failure::new(Exit::Refused, cause, remedy)
    }

    pub fn halted(cause: impl Into<String>, remedy: impl Into<String>) -> Self {
        Failure::new(Exit::Halted, cause, remedy)
    }

    /// For a log, where a condition is a line.
    #[must_use]
    pub fn one_line(&self) -> String {
        format!("{}; remedy: {}", self.causes.join("; "), self.remedy)
    }

    #[must_use]
    pub fn because(mut self, cause: impl Into<String>) -> Self {
        self.causes.push(cause.into());
        self
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for cause in &self.causes {
            writeln!(f, "error: {cause}")?;
        }
        write!(f, "remedy: {}", self.remedy)
    }
}

impl std::error::Error for Failure {}

/// What a Kafka error means for the event that it came with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Time heals it: send again with a back-off, for ever.
    Transient,
    /// This event will never be taken: isolate it, then the poison policy.
    Poison,
    /// Configuration or permission: an operator must act; keep trying, loudly.
    Definite,
    /// The producer is dead: build another one.
    Fatal,
    /// Failed only because something else did.
    Consequence,
}

/// The one table of Kafka codes: class, name, remedy.
pub mod kafka {
    use super::{Class, KafkaCode};

    pub const REQUEST_TIMED_OUT: KafkaCode = KafkaCode(7);
    pub const MSG_SIZE_TOO_LARGE: KafkaCode = KafkaCode(10);
    pub const UNKNOWN_TOPIC_OR_PART: KafkaCode = KafkaCode(3);
    pub const PURGE_QUEUE: KafkaCode = KafkaCode(-152);
    pub const PURGE_INFLIGHT: KafkaCode = KafkaCode(-151);
    pub const CLUSTER_AUTHORIZATION_FAILED: KafkaCode = KafkaCode(31);
    pub const TOPIC_AUTHORIZATION_FAILED: KafkaCode = KafkaCode(29);
    pub const FATAL: KafkaCode = KafkaCode(-150);
    pub const UNKNOWN_TOPIC: KafkaCode = KafkaCode(-188);
    pub const UNKNOWN_PARTITION: KafkaCode = KafkaCode(-190);

    pub struct Entry {
        pub class: Class,
        pub name: &'static str,
        pub remedy: &'static str,
    }

    const RAISE_LIMIT: &str = "raise max.message.bytes of the topic, or make the event smaller";
    const WAIT: &str = "nothing to do: it is sent again until the broker takes it";
    const GRANT: &str = "grant this principal Write and Describe on the topic";
    const REBUILD: &str = "nothing to do: the producer is built anew";

    /// An unlisted code is transient: an event is never given up for a code that we do not know.
    #[must_use]
    pub fn entry(code: KafkaCode) -> Entry {
        let (class, name, remedy) = match code.0 {
            10 => (Class::Poison, "MSG_SIZE_TOO_LARGE", RAISE_LIMIT),
            18 => (Class::Poison, "RECORD_LIST_TOO_LARGE", RAISE_LIMIT),
            87 => (
                Class::Poison,
                "INVALID_RECORD",
                "a compacted topic needs a key; look at the topic's cleanup.policy",
            ),
            32 => (
                Class::Poison,
                "INVALID_TIMESTAMP",
                "look at the database server's clock and the topic's message.timestamp.after.max.ms",
            ),
            17 => (
                Class::Poison,
                "TOPIC_EXCEPTION",
                "the topic's name is not legal: ASCII letters, digits, '.', '_' and '-', at most 249",
            ),
            -138 => (
                Class::Consequence,
                "INVALID_DIFFERENT_RECORD",
                "nothing to do: another record of the batch was refused",
            ),
            -152 => (Class::Consequence, "PURGE_QUEUE", REBUILD),
            -151 => (Class::Consequence, "PURGE_INFLIGHT", REBUILD),
            -197 => (Class::Consequence, "DESTROY", REBUILD),
            29 => (Class::Definite, "TOPIC_AUTHORIZATION_FAILED", GRANT),
            31 => (
                Class::Definite,
                "CLUSTER_AUTHORIZATION_FAILED",
                "grant this principal Write and Describe on the topics (and IdempotentWrite on the cluster, where brokers are older than 3.0)",
            ),
            3 => (
                Class::Definite,
                "UNKNOWN_TOPIC_OR_PART",
                "create the topic, or run with --create-topics",
            ),
            -188 => (
                Class::Definite,
                "UNKNOWN_TOPIC",
                "create the topic, or run with --create-topics",
            ),
            -190 => (
                Class::Definite,
                "UNKNOWN_PARTITION",
                "create the topic, or run with --create-topics",
            ),
            44 => (
                Class::Definite,
                "POLICY_VIOLATION",
                "ask who runs the brokers which policy refuses the record",
            ),
            4 | 21 | 35 | 40 | 42 | 43 | 50 | 53 | 54 | 76 | -165 => (
                Class::Definite,
                "UNSUPPORTED",
                "the broker does not accept what this producer is configured for: look at --kafka and the broker's version",
            ),
            45 | 47 | 49 | 59 | 90 | -144 | -148 | -149 | -150 => {
                (Class::Fatal, "PRODUCER_FATAL", REBUILD)
            }
            -199 | -198 | -194 | -186 | -170 | -155 => (Class::Fatal, "CLIENT_INTERNAL", REBUILD),
            _ => (Class::Transient, "TRANSIENT", WAIT),
        };
        Entry {
            class,
            name,
            remedy,
        }
    }
}

/// What a Postgres server said, or why it could not be asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DbError {
    /// No conversation came about or it broke off: refused, timed out, no such host, end of file.
    #[error("{0}")]
    Unreachable(String),
    /// An ErrorResponse.
    #[error("{sqlstate} {message}{}", detail.as_deref().map(|d| format!(" ({d})")).unwrap_or_default())]
    Server {
        sqlstate: String,
        message: String,
        detail: Option<String>,
        hint: Option<String>,
    },
    /// TLS could not be agreed on or a certificate was not good enough.
    #[error("TLS: {0}")]
    Tls(String),
    /// The server asks for what we have not: a password, another method; or it could not prove
    /// that it knows the password itself.
    #[error("authentication: {0}")]
    Auth(String),
    /// The server does not speak the protocol as we know it.
    #[error("protocol: {0}")]
    Protocol(String),
}

impl DbError {
    /// The SQLSTATE of an ErrorResponse, else the empty string.
    #[must_use]
    pub fn sqlstate(&self) -> &str {
        match self {
            DbError::Server { sqlstate, .. } => sqlstate,
            DbError::Unreachable(_) | DbError::Tls(_) | DbError::Auth(_) | DbError::Protocol(_) => {
                ""
            }
        }
    }

    /// May waiting heal it? (A server that is down, starting, full, or a slot that is held.)
    #[must_use]
    pub fn heals_with_time(&self) -> bool {
        match self {
            DbError::Unreachable(_) => true,
            DbError::Tls(_) | DbError::Auth(_) | DbError::Protocol(_) => false,
            DbError::Server { sqlstate, .. } => match sqlstate.as_str() {
                // 08P01 is how a pooler refuses `replication`; 53400: no free slot, and none
                // comes free by itself.
                "08P01" | "53400" => false,
                // Slot held; a package upgraded under a running server; lock; read-only.
                "55006" | "58P01" | "55P03" | "25006" => true,
                other => ["08", "53", "57", "40"]
                    .iter()
                    .any(|class| other.starts_with(class)),
            },
        }
    }
}
