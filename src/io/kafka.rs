//! The Kafka producing side: hands records to librdkafka and brings their delivery reports back,
//! on the one thread that also reads the WAL. Nothing here blocks and nothing here decides.
//!
//! # Invariants
//! - A ticket is *in flight* from [`Publisher::send`] until [`Publisher::drain`] has given its
//!   report, and gets exactly one report, whatever happens in between, a rebuild included.
//! - The one reflex: from the first bad report or refused send on, nothing more is given to the
//!   client library until the producer was rebuilt. Without it the events behind the failed one
//!   are delivered first, and the order of a key is lost.
//! - An outage of the broker fails nothing (`message.timeout.ms=0`, idempotence): it is waited out
//!   by the client library, and shows only as [`ClientNotice`]s.

mod check;
mod context;
mod mock;
mod native;
mod properties;
mod publisher;
mod reader;
mod settings;
mod tail;
#[cfg(test)]
mod tests;
mod token;
mod topics;
mod watch;

pub use check::{Reach, look, reach};
pub use context::{BrokerStats, ClientNotice};
pub use mock::MockBroker;
pub use publisher::{Publisher, Rebuilt};
pub use reader::{Extent, Got, Reader};
pub use settings::{MESSAGE_BYTES_MAX, Settings, check_brokers};
pub use tail::read_tail;
pub use topics::{NotMade, create_topic, lookup_topic, may_read};
pub use watch::News;
use watch::Watch;

use rdkafka::error::KafkaError;

use crate::record::KafkaCode;

/// librdkafka's number for an error; 0 where the error has none (it came from the Rust side).
fn code_of(error: &KafkaError) -> KafkaCode {
    KafkaCode(error.rdkafka_error_code().map_or(0, |code| code as i32))
}
