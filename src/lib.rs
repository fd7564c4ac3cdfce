pub mod config;
pub mod error;
pub mod lsn;
pub mod record;
pub mod wire;
