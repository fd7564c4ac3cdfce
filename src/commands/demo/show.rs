//! What the demo prints: plain text in 80 columns, with a little colour on a terminal.

use std::io::{self, IsTerminal as _, Write as _};
use std::time::Duration;

use super::Setting;
use super::audience::LINES_EACH_SECOND;
use super::chaos::Balance;
use super::shop::{DECLINED_EACH, Plan, Takings};
use super::verdict::Verdict;
use crate::io::kafka::Got;

#[derive(Clone, Copy, Debug)]
pub enum Style {
    Plain,
    Colour,
}

impl Style {
    pub fn of_stdout() -> Self {
        if io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none() {
            Style::Colour
        } else {
            Style::Plain
        }
    }

    fn paint(self, code: &str, text: &str) -> String {
        match self {
            Style::Plain => text.to_owned(),
            Style::Colour => format!("\x1b[{code}m{text}\x1b[0m"),
        }
    }

    fn bold(self, text: &str) -> String {
        self.paint("1", text)
    }

    fn dim(self, text: &str) -> String {
        if text.is_empty() {
            return String::new();
        }
        self.paint("2", text)
    }

    fn good(self, text: &str) -> String {
        self.paint("1;32", text)
    }

    fn bad(self, text: &str) -> String {
        self.paint("1;31", text)
    }
}

/// Whole lines. Who reads them may have gone: the demo ends in order all the same.
pub fn say(text: &str) {
    let mut out = io::stdout().lock();
    let _ = writeln!(out, "{text}").and_then(|()| out.flush());
}

pub fn title(style: Style) {
    let title = "walrelay demo: a shop's payments travel from Postgres to Kafka";
    say(&format!("{}\n", style.bold(title)));
}

/// Where it plays, before `init`.
pub fn setting(style: Style, setting: &Setting) {
    let Setting {
        postgres,
        dir,
        is_mock,
        bootstrap,
        topic,
    } = setting;
    let mut text = format!("  Postgres {postgres}, throw-away, in {dir}\n");
    text.push_str(&if *is_mock {
        format!(
            "  Kafka: {} in this process (librdkafka's mock broker). It keeps the\n  \
             last 5 MiB of a partition, and goes with the demo; --brokers takes a real one\n",
            style.bold("SIMULATED")
        )
    } else {
        format!("  Kafka at {bootstrap}, topic {topic}\n")
    });
    text.push_str("  Watch it from another terminal:\n");
    text.push_str(&format!("    {}", watch_command(bootstrap, topic)));
    say(&text);
}

fn watch_command(bootstrap: &str, topic: &str) -> String {
    format!("kcat -b {bootstrap} -C -t {topic} -f '%p %k %s\\n'")
}

/// What `walrelay init` reported.
pub fn init(style: Style, report: &str) {
    let mut text = format!("\n{}\n", style.bold("$ walrelay init"));
    // The last line is what to type next, which the demo does itself.
    for line in report.lines().filter(|line| !line.starts_with("ready ")) {
        text.push_str(&format!("  {line}\n"));
    }
    text.push_str(&style.bold("$ walrelay run"));
    say(&text);
}

pub fn curtain(style: Style, plan: &Plan) {
    let until = match (plan.events, plan.length) {
        (Some(events), None) => format!("until {events} are written"),
        (Some(events), Some(length)) => {
            format!("for {} s, {events} at most", length.as_secs())
        }
        (None, Some(length)) => format!("for {} s", length.as_secs()),
        (None, None) => "without an end".to_owned(),
    };
    let mut text = format!(
        "  streaming\n\n\
         Each payment is one transaction: a row in payment, and select outbox_emit(…).\n\
         One in {DECLINED_EACH} is declined and rolled back: Kafka must never see it.\n\
         {} payments a second, {until}; Ctrl-C ends it in order.\n\
         Latency: from the return of the commit until the consumer has the record.\n",
        plan.rate,
    );
    if plan.rate > LINES_EACH_SECOND {
        text.push_str(&format!(
            "Shown is a sample, {LINES_EACH_SECOND} records a second; all are checked.\n"
        ));
    }
    let head = "partition  key       event                 amount      latency";
    say(&format!("{text}\n{}", style.dim(head)));
}

pub fn record(style: Style, got: &Got, cents: i64, latency: Duration) {
    let key = String::from_utf8_lossy(&got.key);
    let event = got.header("event_type").unwrap_or("?");
    let amount = format!("{}.{:02}", cents / 100, cents % 100);
    let latency = style.bold(&milliseconds(latency));
    say(&format!(
        "{:>9}  {key:<8}  {event:<18}  {amount:>8}  {latency}",
        got.partition
    ));
}

fn milliseconds(time: Duration) -> String {
    format!("{:>8.1} ms", time.as_secs_f64() * 1000.0)
}

pub fn draining() {
    say("\nThe shop is closed; waiting for the last records, then stopping the relay.");
}

pub fn summary(style: Style, verdict: &Verdict, takings: &Takings) {
    let rate = takings.written.len() as f64 / takings.time.as_secs_f64().max(0.001);
    let count = |n: usize, must_be: usize| {
        let text = format!("{n:>8}");
        if n == must_be {
            style.good(&text)
        } else {
            style.bad(&text)
        }
    };
    let mut text = String::new();
    for (name, number, comment) in [
        (
            "written",
            count(verdict.written, verdict.in_table),
            &*format!("committed, {rate:.0} a second; the outbox holds as many"),
        ),
        (
            "delivered",
            count(verdict.delivered, verdict.written),
            "read back from Kafka, to the end of every partition",
        ),
        ("lost", count(verdict.lost, 0), ""),
        (
            "out of order",
            count(verdict.out_of_order, 0),
            "per key, by a number in each payload",
        ),
        ("duplicates", count(verdict.duplicates, 0), "by event_id"),
        (
            "uncommitted",
            count(verdict.strangers, 0),
            &*format!("of {} payments that were rolled back", takings.declined),
        ),
        (
            "altered",
            count(verdict.altered, 0),
            "key or number not as written",
        ),
    ] {
        text.push_str(&format!("\n  {name:<12}{number}   {}", style.dim(comment)));
        text.truncate(text.trim_end().len());
    }
    if let (Some(p50), Some(p99)) = (verdict.latency(50), verdict.latency(99)) {
        text.push_str(&format!(
            "\n  latency      p50 {}, p99 {}",
            milliseconds(p50).trim_start(),
            milliseconds(p99).trim_start()
        ));
    }
    text.push_str(&format!("\n\n{}", verdict_line(style, verdict)));
    say(&text);
}

fn verdict_line(style: Style, verdict: &Verdict) -> String {
    if verdict.written == 0 && verdict.holds() {
        "Nothing was written, nothing could be checked.".to_owned()
    } else if verdict.holds() {
        format!(
            "{} written = delivered, lost 0, out of order 0, duplicates 0: checked.",
            style.good("OK:")
        )
    } else {
        format!(
            "{} this is not what walrelay promises.",
            style.bad("FAILED:")
        )
    }
}

/// What is left, once all is taken down.
pub fn struck(setting: &Setting) {
    let mut text = format!("Stopped Postgres and removed {}.", setting.dir);
    if !setting.is_mock {
        text.push_str(&format!(
            "\nIts topic stays in your Kafka: {}.",
            setting.topic
        ));
    }
    say(&text);
}

pub fn farewell(setting: &Setting) {
    struck(setting);
    say(
        "\nNext, with your own Postgres (wal_level = logical) and Kafka:\n\
         \x20 walrelay init --database-url postgres://USER@HOST/DB\n\
         \x20 walrelay run  --database-url postgres://USER@HOST/DB --brokers HOST:9092\n\
         and in your application, in the transaction that writes the business row:\n\
         \x20 select outbox_emit('payment', 'ada', 'payment.received', '{\"cents\": 1250}');",
    );
}

pub fn chaos_title(style: Style) {
    let title = "walrelay demo: who is killed, and do the books balance?";
    say(&format!("{}\n", style.bold(title)));
}

pub fn chaos_curtain(style: Style, rate: u32, length: Duration) {
    say(&format!(
        "  two of them: one leads, one stands by\n\n\
         A shop writes {rate} payments a second, each with its event in one transaction.\n\
         A ledger enters each record that it reads, in one transaction with its claim\n\
         (migrations/consumer.sql). For {} s shop, ledger, relays and Postgres get SIGKILL.\n\
         A killed ledger reads the whole topic again: a consumer's worst case.\n\n{}",
        length.as_secs(),
        style.dim("      kill -9                          payments   in the ledger"),
    ));
}

pub fn kill(style: Style, number: usize, who: &str, balance: &Balance) {
    let who = format!("{who:<32}");
    say(&format!(
        "{number:>4}  {} {:>8}        {:>8}",
        style.bad(&who),
        balance.payments,
        balance.entries
    ));
}

fn money(cents: i64) -> String {
    format!("{}.{:02}", cents / 100, cents % 100)
}

pub fn balance(style: Style, balance: &Balance, kills: usize, records: i64) {
    let count = |n: i64, must_be: i64| {
        let text = format!("{n:>10}");
        if n == must_be {
            style.good(&text)
        } else {
            style.bad(&text)
        }
    };
    let line = if balance.holds() {
        format!(
            "{} {kills} kills, and each payment is in the ledger exactly once, in order.",
            style.good("OK:")
        )
    } else {
        format!("{} the books do not balance.", style.bad("FAILED:"))
    };
    say(&format!(
        "\n  payments     {:>10}   committed, of {}\n\
         \x20 entries      {}   of {}\n\
         \x20 missing      {}\n\
         \x20 twice        {}   {}\n\
         \x20 out of order {}   {}\n\n{line}",
        balance.payments,
        money(balance.payment_cents),
        count(balance.entries, balance.payments),
        money(balance.entry_cents),
        count(balance.missing + balance.strangers, 0),
        count(balance.twice, 0),
        style.dim(&format!(
            "of {records} records in Kafka, {} of them repeats",
            records - balance.payments
        )),
        count(balance.out_of_order, 0),
        style.dim("by the number within the account"),
    ));
}
