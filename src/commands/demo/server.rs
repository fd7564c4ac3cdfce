//! A Postgres that lives as long as this value: its own directory, a Unix socket in it, no port.
//!
//! # Invariants
//! - Whatever ends this process, server and directory go: dropping the value does it, and where
//!   nothing is dropped any more (kill -9, a panic in a thread) a shell that waits for the end of
//!   our pipe does.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::{DirBuilderExt as _, chown};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::binaries::Binaries;
use crate::config::Database;
use crate::error::{Exit, Failure};
use crate::io::side::Side;

const READY_WITHIN: Duration = Duration::from_secs(60);
/// For each of: asked to stop, told to, killed.
const STOP_WITHIN: Duration = Duration::from_secs(10);
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Waits for the end of its input, then ends the server and removes the directory, which is `$0`.
/// An initdb that is cut off mid-way may still write there: hence again and again.
const WATCHDOG: &str = r#"
cat >/dev/null
n=0
while [ -d "$0" ] && [ $n -lt 80 ]; do
    pid=$(head -n 1 "$0/data/postmaster.pid" 2>/dev/null)
    pid=${pid#-}
    signal=QUIT
    [ $n -lt 40 ] || signal=KILL
    if [ -z "$pid" ] || ! kill -$signal "$pid" 2>/dev/null; then
        rm -rf "$0" 2>/dev/null
    fi
    n=$((n + 1))
    sleep 0.25
done
"#;

pub struct Server {
    dir: PathBuf,
    /// Behind the directory's making, so that it never waits for one that is not there.
    watchdog: Option<Child>,
    postmaster: Option<Child>,
}

impl Server {
    /// Makes a cluster and starts it. When this future is dropped, all is gone.
    ///
    /// # Errors
    /// What initdb or the server said.
    pub async fn start(binaries: &Binaries) -> Result<Self, Failure> {
        let mut server = Server {
            dir: make_dir(binaries)?,
            watchdog: None,
            postmaster: None,
        };
        server.watchdog = Some(watch(&server.dir)?);
        server.initdb(binaries).await?;
        server.launch(binaries).await?;
        Ok(server)
    }

    /// Starts the server and waits until it answers.
    async fn launch(&mut self, binaries: &Binaries) -> Result<(), Failure> {
        let log = self.dir.join("log");
        let out = OpenOptions::new().create(true).append(true).open(&log);
        let out = out.map_err(|error| broken("cannot write its log", &error))?;
        let err = out
            .try_clone()
            .map_err(|error| broken("cannot write its log", &error))?;
        let mut postgres = binaries.command("postgres");
        postgres.arg("-D").arg(self.data());
        for setting in [
            "wal_level=logical",
            "listen_addresses=",
            "shared_buffers=32MB",
            "max_slot_wal_keep_size=4GB",
            "cluster_name=walrelay-demo",
        ] {
            postgres.arg("-c").arg(setting);
        }
        postgres.arg("-k").arg(&self.dir);
        let child = postgres
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(err)
            .spawn()
            .map_err(|error| broken("postgres cannot be started", &error))?;
        self.postmaster = Some(child);
        self.wait_ready(&log).await
    }

    /// SIGKILL to the postmaster and all its children at one blow.
    pub fn kill9(&mut self) {
        let Some(mut postmaster) = self.postmaster.take() else {
            return;
        };
        let id = postmaster.id();
        let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children"));
        let _ = postmaster.kill();
        let _ = postmaster.wait();
        for child in children.unwrap_or_default().split_whitespace() {
            if let Some(pid) = child.parse().ok().and_then(Pid::from_raw) {
                let _ = kill_process(pid, Signal::KILL);
            }
        }
    }

    /// Starts it again on what is on disk.
    ///
    /// # Errors
    /// What the server said.
    pub async fn restart(&mut self, binaries: &Binaries) -> Result<(), Failure> {
        let until = Instant::now() + READY_WITHIN;
        loop {
            match self.launch(binaries).await {
                Ok(()) => return Ok(()),
                Err(failure) if Instant::now() > until => return Err(failure),
                // Its shared memory is in use until the last of its children has gone.
                Err(_) => tokio::time::sleep(LOOK_EVERY).await,
            }
        }
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// How to reach it, as its superuser.
    pub fn database(&self) -> Database {
        Database::plain(&self.dir.to_string_lossy(), 5432, "postgres", "postgres")
    }

    fn data(&self) -> PathBuf {
        self.dir.join("data")
    }

    async fn initdb(&self, binaries: &Binaries) -> Result<(), Failure> {
        let mut initdb = binaries.command("initdb");
        initdb
            .args(["--no-sync", "-A", "trust", "-U", "postgres", "-E", "UTF8"])
            .args(["--locale=C", "-D"])
            .arg(self.data())
            .stdin(Stdio::null());
        let done = tokio::process::Command::from(initdb)
            .kill_on_drop(true)
            .output()
            .await
            .map_err(|error| broken("initdb cannot be started", &error))?;
        if done.status.success() {
            return Ok(());
        }
        let words = String::from_utf8_lossy(&done.stderr);
        let mut failure = Failure::refused(
            "initdb could not make the throw-away cluster",
            "put right what it says, or name another server with --pg-bin",
        );
        for line in words.lines().filter(|line| !line.is_empty()) {
            failure = failure.because(line);
        }
        Err(failure)
    }

    async fn wait_ready(&mut self, log: &Path) -> Result<(), Failure> {
        let until = Instant::now() + READY_WITHIN;
        let database = self.database();
        loop {
            let Err(error) = Side::connect(&database, None).await else {
                return Ok(());
            };
            let ended = match &mut self.postmaster {
                Some(child) => child.try_wait().ok().flatten(),
                None => None,
            };
            if ended.is_some() || Instant::now() > until {
                let said = fs::read_to_string(log).unwrap_or_default();
                let mut failure = Failure::refused(
                    format!("the throw-away Postgres does not answer: {error}"),
                    "put right what it says, or name another server with --pg-bin",
                );
                for line in said.lines().rev().take(5).collect::<Vec<_>>().iter().rev() {
                    failure = failure.because(*line);
                }
                return Err(failure);
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(mut postmaster) = self.postmaster.take() {
            // Fast, immediate, and at last without asking.
            for signal in [Signal::INT, Signal::QUIT, Signal::KILL] {
                if stopped(&mut postmaster, signal) {
                    break;
                }
            }
        }
        // What cannot be removed now, the watchdog tries again.
        let _ = fs::remove_dir_all(&self.dir);
        if let Some(mut watchdog) = self.watchdog.take() {
            drop(watchdog.stdin.take());
            let _ = watchdog.wait();
        }
    }
}

fn stopped(postmaster: &mut Child, signal: Signal) -> bool {
    let until = Instant::now() + STOP_WITHIN;
    let pid = i32::try_from(postmaster.id()).ok().and_then(Pid::from_raw);
    while postmaster.try_wait().is_ok_and(|ended| ended.is_none()) {
        if Instant::now() > until {
            return false;
        }
        if let Some(pid) = pid {
            let _ = kill_process(pid, signal);
        }
        thread::sleep(LOOK_EVERY);
    }
    true
}

/// In /tmp before $TMPDIR: the path of a Unix socket is short (107 bytes), and another user must
/// reach it.
fn make_dir(binaries: &Binaries) -> Result<PathBuf, Failure> {
    let name = format!("walrelay-demo-{}", std::process::id());
    let mut last = None;
    for parent in [PathBuf::from("/tmp"), std::env::temp_dir()] {
        for attempt in 0..10 {
            let dir = match attempt {
                0 => parent.join(&name),
                _ => parent.join(format!("{name}-{attempt}")),
            };
            let made = fs::DirBuilder::new().mode(0o700).create(&dir);
            let made = made.and_then(|()| match binaries.account {
                Some(account) => chown(&dir, Some(account.uid), Some(account.gid)),
                None => Ok(()),
            });
            match made {
                Ok(()) => return Ok(dir),
                Err(error) => last = Some((dir, error)),
            }
        }
    }
    let (dir, error) = last.expect("the loops turned at least once");
    Err(broken(&format!("cannot make {}", dir.display()), &error))
}

fn watch(dir: &Path) -> Result<Child, Failure> {
    Command::new("sh")
        .args(["-c", WATCHDOG])
        .arg(dir)
        .current_dir("/")
        // Ctrl-C at the terminal is not for it.
        .process_group(0)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| {
            let _ = fs::remove_dir(dir);
            broken("sh cannot be started", &error)
        })
}

fn broken(what: &str, error: &std::io::Error) -> Failure {
    Failure::new(
        Exit::Refused,
        format!("the throw-away Postgres: {what}: {error}"),
        "see that /tmp can be written and has room for 60 MB",
    )
}
