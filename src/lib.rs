pub mod config;
pub mod error;
pub mod io;
pub mod lsn;
pub mod record;
pub mod wire;
