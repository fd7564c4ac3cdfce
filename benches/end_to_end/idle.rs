//! What a connected relay costs while nothing happens.

use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::args::Args;
use crate::latency::warm;
use crate::report::{Goal, Report, median};
use crate::rig::{Rig, Servers, Socket};
use crate::say;
use crate::usage::on_processor;

pub fn measure(servers: &Servers, args: &Args, report: &mut Report) {
    let span = Duration::from_secs(args.pick(60, 10));
    let shares: Vec<f64> = (0..args.rounds).map(|_| one(servers, span)).collect();
    say(&format!("idle: {shares:.3?} % of a core"));
    let title = format!("CPU while idle for {span:?}");
    let goal = Goal::at_most(0.2, None);
    let share = median(shares.iter().copied());
    report.row(title, share, "% of a core", Some(goal), String::new());
    report.detail("idle", json!({ "percent_of_a_core": shares }));
}

fn one(servers: &Servers, span: Duration) -> f64 {
    let rig = Rig::new(servers, Socket::Tcp);
    let mut relay = rig.relay_streaming();
    // It has published: the producer is connected.
    warm(&rig);
    thread::sleep(Duration::from_secs(3));
    let (before, start) = (on_processor(relay.pid()), Instant::now());
    thread::sleep(span);
    let used = on_processor(relay.pid()).saturating_sub(before);
    let share = used.as_secs_f64() / start.elapsed().as_secs_f64() * 100.0;
    relay.stop();
    rig.broker.delete_topic(&rig.topic());
    share
}
