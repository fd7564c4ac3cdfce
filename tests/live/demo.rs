//! `walrelay demo` as a stranger runs it: what it shows, how it ends, and that nothing stays.

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::Signal;

use crate::kafka::Broker;
use crate::postgres::Pg;
use crate::proc::{self, Proc, eventually};
use crate::relay::{self, Ended, run_to_end};

const MINUTE: Duration = Duration::from_secs(60);

fn demo(pg: Pg, args: &[&str]) -> Ended {
    let bin = bin(pg);
    let line = [&["demo", "--pg-bin", &bin][..], args].concat();
    run_to_end(&line, &[], MINUTE)
}

fn bin(pg: Pg) -> String {
    let postgres = pg.bin("postgres");
    let dir = postgres.parent().expect("a file is in a directory");
    dir.display().to_string()
}

/// The number behind a name in the summary.
#[track_caller]
fn count(ended: &Ended, name: &str) -> u64 {
    let line = ended
        .stdout
        .lines()
        .find_map(|line| line.trim_start().strip_prefix(name));
    line.and_then(|rest| rest.split_whitespace().next())
        .and_then(|number| number.parse().ok())
        .unwrap_or_else(|| panic!("no {name} in\n{}\n{}", ended.stdout, ended.stderr))
}

/// The directory that the demo said it works in.
#[track_caller]
fn directory(stdout: &str) -> String {
    let (_, rest) = stdout
        .split_once("throw-away, in ")
        .unwrap_or_else(|| panic!("no directory in\n{stdout}"));
    rest.lines().next().expect("a line").to_owned()
}

/// Does any process name the directory on its command line? (Backends name it nowhere, but end with
/// their postmaster.)
fn is_in_use(dir: &str) -> bool {
    let processes = fs::read_dir("/proc").expect("a Linux machine").flatten();
    let mut command_lines = processes.filter_map(|p| fs::read(p.path().join("cmdline")).ok());
    command_lines.any(|line| String::from_utf8_lossy(&line).contains(dir))
}

#[track_caller]
fn assert_nothing_is_left(stdout: &str) {
    let dir = directory(stdout);
    eventually(
        Duration::from_secs(20),
        format!("{dir} is left alone"),
        || (!Path::new(&dir).exists() && !is_in_use(&dir)).then_some(()),
    );
}

#[track_caller]
fn assert_all_is_well(ended: &Ended) {
    assert_eq!(count(ended, "written"), count(ended, "delivered"));
    for name in [
        "lost",
        "out of order",
        "duplicates",
        "uncommitted",
        "altered",
    ] {
        assert_eq!(count(ended, name), 0, "{name}\n{}", ended.stdout);
    }
    assert!(ended.stdout.contains("OK: written = delivered"));
    assert!(ended.stdout.contains("walrelay init --database-url"));
    // Not a terminal: no colours, no line that a terminal of 80 columns would break.
    assert!(!ended.stdout.contains('\x1b'));
    for line in ended.stdout.lines() {
        assert!(line.chars().count() <= 80, "too long: {line}");
    }
    assert_nothing_is_left(&ended.stdout);
}

#[test]
fn three_seconds_are_shown_checked_and_gone() {
    let ended = demo(Pg::V18, &["--seconds", "3"]).expect_code(0);
    assert_all_is_well(&ended);
    assert!(count(&ended, "written") > 20, "{}", ended.stdout);
    for part in [
        "SIMULATED",
        "kcat -b 127.0.0.1:",
        "$ walrelay init\n  created        table public.outbox\n",
        "payment.received",
        " ms\n",
    ] {
        assert!(
            ended.stdout.contains(part),
            "no {part} in\n{}",
            ended.stdout
        );
    }
    assert_eq!(ended.stderr, "");
}

#[test]
fn a_number_of_events_is_kept_to() {
    let ended = demo(Pg::V15, &["--events", "50", "--rate", "200"]).expect_code(0);
    assert_all_is_well(&ended);
    assert_eq!(count(&ended, "written"), 50);
}

#[test]
fn a_real_kafka_is_taken_where_one_is_named() {
    let brokers = Broker::shared().bootstrap();
    let ended = demo(Pg::V18, &["--events", "50", "--brokers", &brokers]).expect_code(0);
    assert_all_is_well(&ended);
    assert!(!ended.stdout.contains("SIMULATED"));
    assert!(ended.stdout.contains("stays in your Kafka"));
}

/// A demo that would go on for a minute, once it shows its first records.
fn showing() -> (Proc, impl Fn() -> String) {
    let dir = proc::dir("demo");
    let (out, err) = (dir.join("out"), dir.join("err"));
    let bin = bin(Pg::V15);
    let mut command = relay::binary(&["demo", "--seconds", "60", "--pg-bin", &bin]);
    command
        .stdin(Stdio::null())
        .stdout(fs::File::create(&out).expect("the directory is ours"))
        .stderr(fs::File::create(&err).expect("the directory is ours"));
    let process = Proc::from_child(proc::spawn_child(command));
    let said = move || fs::read_to_string(&out).unwrap_or_default();
    eventually(MINUTE, "the first records", || {
        said().contains("payment.received").then_some(())
    });
    (process, said)
}

#[test]
fn one_ctrl_c_ends_it_in_order_with_its_summary() {
    let (mut process, said) = showing();
    process.signal(Signal::INT);
    let status = process.wait(MINUTE).expect("it ends");
    assert_eq!(proc::code(status), 0, "{}", said());
    assert!(said().contains("OK: written = delivered"), "{}", said());
    assert_nothing_is_left(&said());
}

#[test]
fn a_killed_demo_leaves_nothing_either() {
    let (mut process, said) = showing();
    process.kill9();
    assert_nothing_is_left(&said());
}

#[test]
fn what_it_lacks_is_named() {
    let ended = run_to_end(&["demo", "--pg-bin", "/nowhere"], &[], MINUTE).expect_code(3);
    assert!(ended.stderr.contains("/nowhere/initdb"), "{}", ended.stderr);
    assert!(ended.stderr.contains("remedy: "), "{}", ended.stderr);
    let free = format!("127.0.0.1:{}", proc::free_port());
    let ended = demo(Pg::V15, &["--brokers", &free]).expect_code(3);
    assert!(ended.stderr.contains(&free), "{}", ended.stderr);
}

#[test]
fn the_chaos_kills_everybody_and_balances_the_books() {
    let ended = demo(Pg::V18, &["--chaos", "--seconds", "12"]).expect_code(0);
    for who in [
        "the leading relay, pid",
        "the ledger, pid",
        "the shop, pid",
        "Postgres, every",
    ] {
        assert!(ended.stdout.contains(who), "no {who} in\n{}", ended.stdout);
    }
    assert!(
        ended.stdout.contains("exactly once, in order"),
        "{}",
        ended.stdout
    );
    assert!(count(&ended, "payments") > 100, "{}", ended.stdout);
    assert_eq!(count(&ended, "payments"), count(&ended, "entries"));
    assert_nothing_is_left(&ended.stdout);
}
