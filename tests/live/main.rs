//! Live tests: the real binary between a real Postgres and a real Apache Kafka, with real kills.
//!
//! `make test` runs them. Alone: `tests/servers/fetch.sh && cargo test --release --test live`.
//! `WALRELAY_KEEP=1` leaves the servers' files in /tmp for a look.

// The harness has doors that not every test set walks through.
#![allow(dead_code)]

mod bad_input;
mod certs;
mod chaos;
mod check;
mod check_command;
mod connect;
mod consumers;
mod ddl;
mod dead_letter_store;
mod dead_letters_cli;
mod demo;
mod drop_drain;
mod faults_kafka;
mod faults_postgres;
mod faults_relay;
mod gap;
mod health;
mod hosts;
mod http;
mod init;
mod init_surroundings;
mod kafka;
mod kafka_secured;
mod kafka_security;
mod kafka_view;
mod kills;
mod leadership;
mod load;
mod mapping;
mod matrix;
mod odd;
mod outages;
mod parked;
mod parking;
mod parking_retry;
mod parking_trouble;
mod partitions;
mod payments;
mod poison;
mod postgres;
mod proc;
mod proxy;
mod refusals;
mod registry;
mod relay;
mod restart;
mod rights;
mod rows;
mod servers;
mod stage;
mod status;
mod stream;
mod swap;
mod tail;
mod tls;
mod trio;
