//! The subcommands other than `run`, a file each.

pub mod init;
