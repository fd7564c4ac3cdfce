//! `make bench`: the numbers that this relay is judged by, each beside the raw limit of the same
//! run: real Postgres, real Apache Kafka, the real binary.
//!
//! `cargo bench --bench end_to_end -- [--quick] [--rounds N] [--only NAME]…`

// The live tests' harness has doors that are not walked through here.
#![allow(dead_code)]

mod args;
#[path = "../../tests/live/certs.rs"]
mod certs;
mod drain;
mod idle;
#[path = "../../tests/live/kafka.rs"]
mod kafka;
mod latency;
mod load;
mod memory;
mod paired;
mod parked;
mod poison;
#[path = "../../tests/live/postgres.rs"]
mod postgres;
#[path = "../../tests/live/proc.rs"]
mod proc;
mod raw;
#[path = "../../tests/live/relay.rs"]
mod relay;
mod report;
mod restart;
mod rig;
mod sustained;
mod usage;

use std::io::{self, Write};

use args::Args;
use report::Report;
use rig::Servers;

/// Measures, and writes its rows into the report.
type Part = fn(&Servers, &Args, &mut Report);

fn main() {
    let args = match Args::parse(std::env::args().skip(1)) {
        Ok(args) => args,
        Err(text) => {
            let _ = writeln!(io::stderr(), "{text}");
            std::process::exit(2);
        }
    };
    let servers = Servers::start();
    let mut report = Report::new(&servers, &args);
    let parts: [(&str, Part); 9] = [
        ("drain", drain::measure),
        ("paired", paired::measure),
        ("memory", memory::measure),
        ("latency", latency::measure),
        ("sustained", sustained::measure),
        ("restart", restart::measure),
        ("idle", idle::measure),
        ("poison", poison::measure),
        ("parked", parked::measure),
    ];
    for (name, measure) in parts {
        if args.wants(name) {
            measure(&servers, &args, &mut report);
        }
    }
    let failed = report.print();
    report.save();
    // The servers are stopped before the process ends, which `exit` would not wait for.
    drop(servers);
    if failed > 0 && !args.quick {
        std::process::exit(1);
    }
}

/// A line of progress: a run takes many minutes.
pub fn say(text: &str) {
    let _ = writeln!(io::stderr(), "bench: {text}");
}
