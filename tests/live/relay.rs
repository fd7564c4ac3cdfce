//! The real binary, as an operator would run it: arguments in, log lines and an exit code out.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;

use crate::proc::{self, AtParentDeath, Proc, RunAs, eventually};

/// What a one-shot command left behind.
#[derive(Debug)]
pub struct Ended {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Ended {
    /// Fails with everything that was said unless the exit code is this one.
    #[track_caller]
    pub fn expect_code(self, code: i32) -> Ended {
        assert_eq!(self.code, code, "{}\n{}", self.stdout, self.stderr);
        self
    }
}

/// The relay of this build.
pub const OWN: &str = env!("CARGO_BIN_EXE_walrelay");

pub fn binary(args: &[&str]) -> Command {
    binary_under(&[], args)
}

/// The same, started by a program that is given the relay's command line behind its own.
pub fn binary_under(wrapper: &[String], args: &[&str]) -> Command {
    let Some((first, rest)) = wrapper.split_first() else {
        return program(OWN, args);
    };
    let rest: Vec<&str> = rest.iter().map(String::as_str).collect();
    program(first, &[&rest[..], &[OWN], args].concat())
}

fn program(program: &str, args: &[&str]) -> Command {
    let mut command = proc::command(program, RunAs::Me, AtParentDeath::Kill);
    command.args(args);
    // What the caller's shell says about databases must not reach the relay under test.
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        if name.starts_with("PG") || name.starts_with("WALRELAY_") || name == "RUST_LOG" {
            command.env_remove(name.as_ref());
        }
    }
    command
}

/// Runs a command to its end (`init`, a refused `run`), at most until `deadline`.
pub fn run_to_end(args: &[&str], env: &[(&str, &str)], deadline: Duration) -> Ended {
    run_program(OWN, args, env, deadline)
}

/// The same of another build.
pub fn run_program(path: &str, args: &[&str], env: &[(&str, &str)], deadline: Duration) -> Ended {
    let dir = proc::dir("command");
    let (out, err) = (dir.join("out"), dir.join("err"));
    let mut command = program(path, args);
    command
        .envs(env.iter().copied())
        .current_dir(&dir)
        .stdin(Stdio::null())
        .stdout(fs::File::create(&out).expect("the directory is ours"))
        .stderr(fs::File::create(&err).expect("the directory is ours"));
    let mut process = Proc::from_child(proc::spawn_child(command));
    let status = process.wait(deadline);
    let read = |path| String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).into_owned();
    let (stdout, stderr) = (read(&out), read(&err));
    let status = status
        .unwrap_or_else(|| panic!("{args:?} still runs after {deadline:?}:\n{stdout}\n{stderr}"));
    Ended {
        code: proc::code(status),
        stdout,
        stderr,
    }
}

/// One line of the relay's log.
#[derive(Clone, Debug)]
pub struct Line(pub Value);

impl Line {
    /// A field, wherever the formatter put it.
    pub fn field(&self, name: &str) -> Option<&Value> {
        self.0
            .get(name)
            .or_else(|| self.0.get("fields").and_then(|fields| fields.get(name)))
    }

    pub fn text(&self, name: &str) -> String {
        match self.field(name) {
            Some(Value::String(text)) => text.clone(),
            Some(other) => other.to_string(),
            None => String::new(),
        }
    }

    pub fn level(&self) -> String {
        self.text("level")
    }

    /// Does the whole line, fields included, contain this?
    pub fn has(&self, part: &str) -> bool {
        self.0.to_string().contains(part)
    }
}

/// A running `walrelay run`. Dropping it kills it.
pub struct Relay {
    process: Proc,
    log: PathBuf,
}

impl Relay {
    pub fn start(args: &[&str], env: &[(&str, &str)]) -> Relay {
        Relay::start_under(&[], args, env)
    }

    pub fn start_under(wrapper: &[String], args: &[&str], env: &[(&str, &str)]) -> Relay {
        Relay::started(binary_under(wrapper, args), env)
    }

    /// Of another build.
    pub fn start_program(path: &str, args: &[&str], env: &[(&str, &str)]) -> Relay {
        Relay::started(program(path, args), env)
    }

    fn started(mut command: Command, env: &[(&str, &str)]) -> Relay {
        let dir = proc::dir("relay");
        let log = dir.join("log");
        command.envs(env.iter().copied()).current_dir(&dir);
        Relay {
            process: Proc::start(command, &log),
            log,
        }
    }

    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// All that it said so far, standard output included.
    pub fn said(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// The lines of its log that are JSON, which all should be.
    pub fn lines(&self) -> Vec<Line> {
        self.said()
            .lines()
            .filter_map(|line| serde_json::from_str(line).ok().map(Line))
            .collect()
    }

    /// Waits for a log line; fails at once when the relay ends without saying it.
    #[track_caller]
    pub fn wait_for(&mut self, what: &str, deadline: Duration, is: impl Fn(&Line) -> bool) -> Line {
        eventually(deadline, format!("a log line: {what}"), || {
            let ended = self.process.ended();
            let found = self.lines().into_iter().find(|line| is(line));
            if found.is_none()
                && let Some(status) = ended
            {
                panic!("the relay ended ({status}) before {what}:\n{}", self.said());
            }
            found
        })
    }

    /// Waits for a line that contains a text.
    #[track_caller]
    pub fn wait_for_text(&mut self, text: &str, deadline: Duration) -> Line {
        self.wait_for(text, deadline, |line| line.has(text))
    }

    pub fn is_alive(&mut self) -> bool {
        self.process.ended().is_none()
    }

    /// Fails with its log when it has ended.
    #[track_caller]
    pub fn assert_alive(&mut self) {
        assert!(self.is_alive(), "the relay ended:\n{}", self.said());
    }

    pub fn kill9(&mut self) {
        self.process.kill9();
    }

    pub fn signal(&self, signal: Signal) {
        self.process.signal(signal);
    }

    pub fn freeze(&self) {
        self.signal(Signal::STOP);
    }

    pub fn thaw(&self) {
        self.signal(Signal::CONT);
    }

    /// The exit code, minus the signal where one ended it.
    #[track_caller]
    pub fn wait_exit(&mut self, deadline: Duration) -> i32 {
        match self.process.wait(deadline) {
            Some(status) => proc::code(status),
            None => panic!("the relay still runs after {deadline:?}:\n{}", self.said()),
        }
    }

    /// SIGTERM, and the clean end that must follow.
    #[track_caller]
    pub fn stop(&mut self) {
        self.signal(Signal::TERM);
        let code = self.wait_exit(Duration::from_secs(30));
        assert_eq!(code, 0, "SIGTERM ends with 0:\n{}", self.said());
    }

    /// Resident memory now and at its peak, in bytes.
    pub fn memory(&self) -> Memory {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid()));
        let status = status.unwrap_or_default();
        let field = |name: &str| {
            status
                .lines()
                .find_map(|line| line.strip_prefix(name))
                .and_then(|rest| rest.split_whitespace().next())
                .and_then(|kilobytes| kilobytes.parse::<u64>().ok())
                .map_or(0, |kilobytes| kilobytes * 1024)
        };
        Memory {
            resident: field("VmRSS:"),
            peak: field("VmHWM:"),
        }
    }

    /// User and system time so far.
    pub fn cpu(&self) -> Duration {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid())).unwrap_or_default();
        // After the name in parentheses, which may hold blanks: fields 14 and 15 are the times,
        // in hundredths of a second (USER_HZ is fixed in the kernel's interface).
        let ticks: u64 = stat
            .rsplit(')')
            .next()
            .unwrap_or_default()
            .split_whitespace()
            .skip(11)
            .take(2)
            .filter_map(|ticks| ticks.parse::<u64>().ok())
            .sum();
        Duration::from_millis(ticks * 10)
    }
}

pub struct Memory {
    pub resident: u64,
    pub peak: u64,
}

impl Drop for Relay {
    fn drop(&mut self) {
        // The log is the first thing to look at; cargo shows it for failed tests only.
        if std::thread::panicking() {
            let said = self.said();
            let tail: Vec<&str> = said.lines().rev().take(60).collect();
            let tail: Vec<&str> = tail.into_iter().rev().collect();
            // Through `println`, which the test harness captures, unlike a write to stdout.
            #[allow(clippy::print_stdout)]
            {
                println!("--- relay {} said:\n{}", self.pid(), tail.join("\n"));
            }
        }
    }
}
