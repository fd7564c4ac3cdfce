//! Seeded simulation of the whole machine, without a server: the very `Machine` that `service.rs`
//! runs, on a fake Postgres and a fake Kafka, for as many random lives as the budget allows.
//!
//! `SIM_SEED=42` runs one life and prints its history when a promise is broken;
//! `SIM_SEEDS=50` is content with so many lives, `SIM_BUDGET_SECS=60` goes on for a minute, `SIM_CRASHES=1000000` until there were so many.

mod broker;
mod checker;
mod feedback_model;
mod frames;
mod golden;
mod history;
mod ledger_model;
mod letters;
mod postgres;
mod process;
mod rng;
mod world;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use history::{Fact, Moment};

/// Lives that a run has to see, whatever the budget.
const SEEDS_MIN: u64 = 200;
const BUDGET_DEFAULT: u64 = 10;
/// What is counted as a crash.
const CRASH: &str = "killed";
/// Facts that are printed of a life that went wrong.
const FACTS_MAX: usize = 160;

/// What has to come about in `SEEDS_MIN` lives, or they show nothing.
const REACHED: [&str; 53] = [
    "a claim of the lead whose answer was lost",
    "a batch was refused",
    "a clock was ahead",
    "a complete stop",
    "a copy was restored",
    "a foreign table's row",
    "a halted event passed",
    "a held event was released",
    "a key was set free",
    "a late append",
    "a leader was away",
    "a limit was raised",
    "a request is stuck in the network",
    "a retry failed",
    "a row that can be no record",
    "a statement failed",
    "a stored stop was erased",
    "a tail may not be read",
    "a tail was longer than is read",
    "a tail was read",
    "a topic has grown",
    "a topic was absent",
    "a topic was tripped",
    "a topic went away under its events",
    "a tripped topic opened by itself",
    "an event was sent apart",
    "an incomplete stop",
    "another history",
    "closed because Kafka stalled",
    "committed, and the answer was lost",
    "cut inside a transaction",
    "dead letters could not be written",
    "dead letters were delivered",
    "discarded",
    "halted by poison",
    "keepalive inside a transaction",
    "killed",
    "killed behind a boundary",
    "killed between two orders",
    "killed in front of a boundary",
    "larger than its topic takes",
    "neighbours share an LSN",
    "parked twice",
    "parked: a malformed row",
    "parked: behind another",
    "parked: its topic was absent",
    "parked: no such topic can be",
    "parked: refused",
    "parked: too large",
    "re-sent from below W",
    "reconnected with events on their way",
    "the slot went backwards",
    "worked but said failed",
];

struct Broken {
    what: String,
    facts: Vec<(Moment, Fact)>,
}

/// One life: what it reached, or what was broken.
fn live(seed: u64, span: Option<Duration>) -> Result<BTreeMap<&'static str, u64>, Broken> {
    let outcome = catch_unwind(AssertUnwindSafe(|| world::run(seed, span)));
    let outcome = outcome.map_err(|panic| {
        let text = panic
            .downcast_ref::<String>()
            .cloned()
            .or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()));
        Broken {
            what: format!("panic: {}", text.unwrap_or_default()),
            facts: Vec::new(),
        }
    })?;
    match checker::check(&outcome.facts) {
        Ok(_) => Ok(outcome.reached),
        Err(what) => Err(Broken {
            what,
            facts: outcome.facts,
        }),
    }
}

/// The same life, cut as short as it is still broken.
fn shortest(seed: u64, broken: Broken) -> Broken {
    let mut shortest = broken;
    let mut span = 60_000;
    let mut step = 30_000;
    while step > 200 {
        match live(seed, Some(Duration::from_millis(span - step))) {
            Err(broken) => {
                shortest = broken;
                span -= step;
            }
            Ok(_) => step /= 2,
        }
        if span <= step {
            step = span / 2;
        }
    }
    shortest
}

fn story(seed: u64, broken: &Broken) -> String {
    let mut text = format!("seed {seed}: {}\n", broken.what);
    let wanted: Vec<&(Moment, Fact)> = broken
        .facts
        .iter()
        .filter(|(_, fact)| is_worth_telling(fact, &broken.what))
        .collect();
    let most = env_number("SIM_FACTS").and_then(|n| usize::try_from(n).ok());
    let skipped = wanted.len().saturating_sub(most.unwrap_or(FACTS_MAX));
    for (at, fact) in wanted.into_iter().skip(skipped) {
        let _ = writeln!(text, "{:>12.6} {fact:?}", at.as_secs_f64());
    }
    let _ = writeln!(
        text,
        "again: SIM_SEED={seed} cargo test --release --test sim"
    );
    text
}

/// Traffic is told of only where it concerns the events that the verdict names.
fn is_worth_telling(fact: &Fact, what: &str) -> bool {
    let is_all = env_number("SIM_ALL").is_some();
    let is_named = |event: &history::EventId| is_all || what.contains(&event.to_string());
    match fact {
        Fact::Sent { .. } | Fact::Status { .. } => is_all,
        Fact::Appended { event, .. } | Fact::SaidFailed { event } | Fact::Acked { event } => {
            is_named(event)
        }
        Fact::Committed { rows, .. } => rows.iter().any(|(event, _)| is_named(event)),
        _ => true,
    }
}

fn env_number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// Lives one after the other until the budget is used up (`SIM_BUDGET_SECS`) and enough crashes have
/// come about (`SIM_CRASHES`).
fn live_all(first: u64, started: Instant) -> (u64, BTreeMap<&'static str, u64>) {
    let budget = Duration::from_secs(env_number("SIM_BUDGET_SECS").unwrap_or(BUDGET_DEFAULT));
    let crashes = env_number("SIM_CRASHES").unwrap_or(0);
    let seeds = env_number("SIM_SEEDS").unwrap_or(SEEDS_MIN);
    let next = AtomicU64::new(first);
    let reached: Mutex<BTreeMap<&'static str, u64>> = Mutex::default();
    let is_broken = AtomicBool::new(false);
    let lock = || reached.lock().unwrap_or_else(PoisonError::into_inner);
    let is_enough = |seed: u64| {
        let crashed = lock().get(CRASH).copied().unwrap_or_default();
        seed >= first + seeds && started.elapsed() >= budget && crashed >= crashes
    };
    let work = || {
        while !is_broken.load(Ordering::Relaxed) && !is_enough(next.load(Ordering::Relaxed)) {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            match live(seed, None) {
                Ok(more) => {
                    let mut reached = lock();
                    for (what, count) in more {
                        *reached.entry(what).or_default() += count;
                    }
                }
                Err(broken) => {
                    is_broken.store(true, Ordering::Relaxed);
                    let broken = shortest(seed, broken);
                    panic!("{}", story(seed, &broken));
                }
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        for thread in all {
            if let Err(panic) = thread.join() {
                std::panic::resume_unwind(panic);
            }
        }
    });
    let lives = next.load(Ordering::Relaxed) - first;
    (lives, std::mem::take(&mut lock()))
}

#[test]
fn promises_hold_in_every_life() {
    if let Some(seed) = env_number("SIM_SEED") {
        let span = env_number("SIM_SPAN_MS").map(Duration::from_millis);
        if let Err(broken) = live(seed, span) {
            panic!("{}", story(seed, &broken));
        }
        return;
    }
    let started = Instant::now();
    let first = env_number("SIM_FIRST_SEED").unwrap_or(1);
    let (lives, reached) = live_all(first, started);
    for (what, count) in &reached {
        eprintln_line(&format!("{count:>9} {what}"));
    }
    let crashes = reached.get(CRASH).copied().unwrap_or_default();
    let took = started.elapsed().as_secs_f64();
    eprintln_line(&format!(
        "{lives} lives from seed {first}, {crashes} crashes in {took:.0} s"
    ));
    for what in REACHED.iter().filter(|_| lives >= SEEDS_MIN) {
        assert!(reached.contains_key(*what), "never came about: {what}");
    }
}

/// Shown with `--nocapture`, and when the test fails.
fn eprintln_line(text: &str) {
    use std::io::Write as _;
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}
