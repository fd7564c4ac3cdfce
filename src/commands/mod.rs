//! The subcommands other than `run`, a file each.

pub mod check;
pub mod demo;
pub mod init;
pub mod status;
