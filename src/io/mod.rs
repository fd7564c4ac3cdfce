//! Sockets: what carries, and decides nothing.

pub mod kafka;
