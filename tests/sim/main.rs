//! Seeded simulation of the whole machine, without a server.
