//! The subcommands other than `run`, a file each.

pub mod check;
pub mod dead_letters;
pub mod demo;
pub mod drain;
pub mod drop;
pub mod init;
mod report;
pub mod status;
