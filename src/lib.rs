pub mod cli;
pub mod config;
pub mod error;
pub mod io;
pub mod lsn;
pub mod record;
pub mod telemetry;
pub mod wire;
