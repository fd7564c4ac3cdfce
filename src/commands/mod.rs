//! The subcommands other than `run`, a file each.

pub mod demo;
pub mod init;
