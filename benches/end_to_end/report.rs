//! The table for people and the JSON for programs.

use std::fmt::Write as _;
use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Map, Value, json};

use crate::args::Args;
use crate::rig::Servers;

/// A limit and what is aimed at.
#[derive(Clone, Copy, Debug)]
pub struct Goal {
    must: Option<f64>,
    aim: Option<f64>,
    /// More is better.
    more: bool,
}

impl Goal {
    pub const fn at_least(must: f64, aim: Option<f64>) -> Goal {
        Goal {
            must: Some(must),
            aim,
            more: true,
        }
    }

    pub const fn at_most(must: f64, aim: Option<f64>) -> Goal {
        Goal {
            must: Some(must),
            aim,
            more: false,
        }
    }

    /// Nothing that must be.
    pub const fn aim_at_most(aim: f64) -> Goal {
        Goal {
            must: None,
            aim: Some(aim),
            more: false,
        }
    }

    fn verdict(&self, value: f64) -> Verdict {
        let meets = |limit: f64| {
            if self.more {
                value >= limit
            } else {
                value <= limit
            }
        };
        match (self.must.map(meets), self.aim.map(meets)) {
            (Some(false), _) => Verdict::Missed,
            (_, Some(true)) => Verdict::Aim,
            (Some(true), None) => Verdict::Aim,
            (Some(true), Some(false)) => Verdict::Must,
            (None, _) => Verdict::Open,
        }
    }

    fn words(&self, limit: Option<f64>) -> String {
        let sign = if self.more { "≥" } else { "≤" };
        limit.map_or_else(String::new, |limit| format!("{sign} {limit}"))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Missed,
    Must,
    Aim,
    /// The aim is missed, and nothing must be.
    Open,
}

impl Verdict {
    fn mark(self) -> &'static str {
        match self {
            Verdict::Missed => "MISSED",
            Verdict::Must => "ok",
            Verdict::Aim => "ok, aim",
            Verdict::Open => "no aim",
        }
    }
}

struct Row {
    what: String,
    value: f64,
    unit: &'static str,
    goal: Option<Goal>,
    beside: String,
}

pub struct Report {
    rounds: usize,
    quick: bool,
    machine: Vec<(&'static str, String)>,
    rows: Vec<Row>,
    notes: Vec<String>,
    details: Map<String, Value>,
}

impl Report {
    pub fn new(servers: &Servers, args: &Args) -> Report {
        Report {
            rounds: args.rounds,
            quick: args.quick,
            machine: machine(servers),
            rows: Vec::new(),
            notes: Vec::new(),
            details: Map::new(),
        }
    }

    pub fn row(
        &mut self,
        what: String,
        value: f64,
        unit: &'static str,
        goal: Option<Goal>,
        beside: String,
    ) {
        self.rows.push(Row {
            what,
            value,
            unit,
            goal,
            beside,
        });
    }

    pub fn note(&mut self, text: String) {
        self.notes.push(text);
    }

    pub fn detail(&mut self, name: &str, value: Value) {
        self.details.insert(name.to_owned(), value);
    }

    /// Prints the table; how many limits were missed.
    pub fn print(&self) -> usize {
        let mut text = String::new();
        let _ = writeln!(text, "\nwalrelay, median of {}\n", self.rounds);
        for (name, value) in &self.machine {
            let _ = writeln!(text, "  {name:<12} {value}");
        }
        let titles = ["", "measured", "must", "aim", "", "beside it"].map(str::to_owned);
        let lines: Vec<[String; 6]> = std::iter::once(titles)
            .chain(self.rows.iter().map(Row::cells))
            .collect();
        let width = |column: usize| {
            let widths = lines.iter().map(|line| line[column].chars().count());
            widths.max().unwrap_or_default()
        };
        let widths: Vec<usize> = (0..6).map(width).collect();
        text.push('\n');
        for line in &lines {
            text.push(' ');
            for (cell, width) in line.iter().zip(&widths) {
                let _ = write!(text, " {cell:<width$} ", width = *width);
            }
            text.truncate(text.trim_end().len());
            text.push('\n');
        }
        for note in &self.notes {
            let _ = writeln!(text, "\n  {note}");
        }
        if self.quick {
            text.push_str("\n  --quick: too little to judge by\n");
        }
        let _ = io::stdout().lock().write_all(text.as_bytes());
        self.rows
            .iter()
            .filter(|row| row.verdict() == Some(Verdict::Missed))
            .count()
    }

    /// `target/bench/<time>.json`, and the same as `latest.json`.
    pub fn save(&self) {
        let dir = target().join("bench");
        let machine: Map<String, Value> = self
            .machine
            .iter()
            .map(|(name, value)| ((*name).to_owned(), json!(value)))
            .collect();
        let rows: Vec<Value> = self.rows.iter().map(Row::json).collect();
        let seconds = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |since| since.as_secs());
        let all = json!({
            "unix_time": seconds,
            "rounds": self.rounds,
            "quick": self.quick,
            "machine": machine,
            "rows": rows,
            "details": self.details,
        });
        let text = format!("{all:#}\n");
        let file = dir.join(format!("end_to_end-{seconds}.json"));
        let saved = fs::create_dir_all(&dir)
            .and_then(|()| fs::write(&file, &text))
            .and_then(|()| fs::write(dir.join("latest.json"), &text));
        match saved {
            Ok(()) => crate::say(&format!("saved {}", file.display())),
            Err(error) => crate::say(&format!("cannot save {}: {error}", file.display())),
        }
    }
}

impl Row {
    fn verdict(&self) -> Option<Verdict> {
        self.goal.as_ref().map(|goal| goal.verdict(self.value))
    }

    fn cells(&self) -> [String; 6] {
        let digits = match self.value {
            v if v >= 100.0 => 0,
            v if v >= 10.0 => 1,
            v if v >= 0.1 => 2,
            _ => 3,
        };
        let goal = self.goal.as_ref();
        [
            self.what.clone(),
            format!("{:.digits$} {}", self.value, self.unit),
            goal.map_or_else(String::new, |g| g.words(g.must)),
            goal.map_or_else(String::new, |g| g.words(g.aim)),
            self.verdict().map_or("", Verdict::mark).to_owned(),
            self.beside.clone(),
        ]
    }

    fn json(&self) -> Value {
        json!({
            "what": self.what,
            "value": self.value,
            "unit": self.unit,
            "must": self.goal.and_then(|g| g.must),
            "aim": self.goal.and_then(|g| g.aim),
            "more_is_better": self.goal.map(|g| g.more),
            "verdict": self.verdict().map(Verdict::mark),
            "beside": self.beside,
        })
    }
}

/// Where cargo put the binary, two directories up.
fn target() -> PathBuf {
    let binary = Path::new(env!("CARGO_BIN_EXE_walrelay"));
    let target = binary.parent().and_then(Path::parent);
    target.unwrap_or(Path::new("target")).to_owned()
}

fn machine(servers: &Servers) -> Vec<(&'static str, String)> {
    let first = |file: &str, name: &str| {
        let text = fs::read_to_string(file).unwrap_or_default();
        let line = text.lines().find(|line| line.starts_with(name));
        let value = line.and_then(|line| line.split(':').nth(1));
        value.unwrap_or("?").trim().to_owned()
    };
    let cores = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    let memory_kb: u64 = first("/proc/meminfo", "MemTotal")
        .trim_end_matches(" kB")
        .parse()
        .unwrap_or_default();
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let rustc = Command::new("rustc").arg("--version").output();
    let rustc = rustc.map_or_else(
        |_| "?".to_owned(),
        |out| String::from_utf8_lossy(&out.stdout).trim().to_owned(),
    );
    let sql = servers.cluster.connect("postgres");
    let (_, librdkafka) = rdkafka::util::get_rdkafka_version();
    vec![
        (
            "machine",
            format!(
                "{cores} cores ({}), {} GB, Linux {}; everything below shares them",
                first("/proc/cpuinfo", "model name"),
                memory_kb.div_ceil(1 << 20),
                kernel.trim()
            ),
        ),
        (
            "Postgres",
            format!(
                "{}, fsync {}, TCP loopback without TLS",
                sql.one("show server_version"),
                sql.one("show fsync")
            ),
        ),
        (
            "Kafka",
            format!(
                "Apache Kafka {}, one node, 512 MB heap, acks=all, lz4",
                kafka_version()
            ),
        ),
        ("librdkafka", librdkafka),
        ("rustc", rustc),
        ("walrelay", env!("CARGO_PKG_VERSION").to_owned()),
    ]
}

/// From the name of the broker's jar: kafka-server-4.1.1.jar.
fn kafka_version() -> String {
    let jars = fs::read_dir(crate::proc::servers().join("kafka"));
    jars.into_iter()
        .flatten()
        .flatten()
        .filter_map(|jar| jar.file_name().into_string().ok())
        .find_map(|name| {
            let version = name.strip_prefix("kafka-clients-")?;
            version.strip_suffix(".jar").map(str::to_owned)
        })
        .unwrap_or_else(|| "?".to_owned())
}

/// The middle one; of an even number the lower of the two.
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len().saturating_sub(1) / 2;
    values.get(middle).copied().unwrap_or_default()
}
