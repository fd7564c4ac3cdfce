//! walrelay tails a Postgres transactional outbox through a logical replication slot and publishes
//! its rows to Kafka. The slot's `confirmed_flush_lsn` moves only over transactions whose every
//! event the broker has acknowledged.
//!
//! One task waits, one synchronous function decides:
//!
//! ```text
//!             WAL frames                records
//! Postgres ──────────────▶  io/slot ─▶ wire ─▶ relay ─▶ io/kafka ──────────────▶ Kafka
//!    ▲                                   │                                         │
//!    └───── standby status update ◀── relay/ledger ◀── delivery reports ◀──────────┘
//! ```
//!
//! - [`service`] is the loop. It waits for sockets, signals and timers, turns each into a call of
//!   the [`relay::machine`], and carries out what that orders. It alone reads a clock.
//! - [`relay`] decides: pure functions of (state, event, now). Whatever can lose, reorder or repeat
//!   an event is in there, so that the simulation in `tests/sim` can drive the same code through
//!   millions of crashes without a server. [`relay::ledger`] alone moves the LSN.
//! - [`wire`] turns bytes into messages, borrowing the payload from the read buffer.
//! - [`io`] carries: [`io::slot`] the replication stream, [`io::side`] ordinary statements and the
//!   leader's lock, [`io::kafka`] the producer. It decides nothing.
//! - [`commands`] are the subcommands that are not the relay.
//!
//! `relay` and `io` never import each other; `tests/tidy.rs` holds the walls.

pub mod cli;
pub mod commands;
pub mod config;
pub mod dead_letter;
pub mod error;
pub mod fault;
pub mod finding;
pub mod gap;
pub mod io;
pub mod lsn;
pub mod record;
pub mod relay;
pub mod service;
pub mod tail;
pub mod telemetry;
pub mod wire;
