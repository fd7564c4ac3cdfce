//! Child processes that never outlive the tests: each dies with this process (`setpriv
//! --pdeathsig`), and a watchdog removes the files when it is gone, however it went.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// What a child is sent when this process ends without stopping it.
#[derive(Clone, Copy)]
pub enum AtParentDeath {
    Kill,
    /// Postgres's immediate shutdown: its shared memory is given back.
    Quit,
}

/// Who a child runs as.
#[derive(Clone, Copy)]
pub enum RunAs {
    Me,
    /// Somebody who is not root, when we are: Postgres insists.
    Unprivileged,
}

/// A command that runs as `user` and dies with this process.
pub fn command(program: impl AsRef<Path>, user: RunAs, at_death: AtParentDeath) -> Command {
    let mut command = Command::new("setpriv");
    command.arg("--pdeathsig").arg(match at_death {
        AtParentDeath::Kill => "KILL",
        AtParentDeath::Quit => "QUIT",
    });
    if let (RunAs::Unprivileged, Some(user)) = (user, unprivileged()) {
        command.args(["--reuid", user, "--regid", "nogroup", "--clear-groups"]);
    }
    command.arg("--").arg(program.as_ref());
    command
}

/// The user that servers run as where we are root.
pub fn unprivileged() -> Option<&'static str> {
    rustix::process::geteuid().is_root().then_some("nobody")
}

/// A running child. Dropping it kills it.
pub struct Proc {
    child: Child,
    status: Option<ExitStatus>,
}

impl Proc {
    /// Starts `command`, with its output in `log`.
    pub fn start(mut command: Command, log: &Path) -> Proc {
        let out = OpenOptions::new()
            .create(true)
            .append(true)
            .open(log)
            .expect("the log file can be opened");
        let err = out.try_clone().expect("a file handle can be cloned");
        command.stdin(Stdio::null()).stdout(out).stderr(err);
        Proc::from_child(spawn(command))
    }

    pub fn from_child(child: Child) -> Proc {
        Proc {
            child,
            status: None,
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, signal: Signal) {
        if self.status.is_none() {
            send(self.pid(), signal);
        }
    }

    /// The exit status, once it has ended.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        if self.status.is_none() {
            self.status = self.child.try_wait().expect("our own child can be asked");
        }
        self.status
    }

    /// Waits for the end, at most until `deadline`.
    pub fn wait(&mut self, deadline: Duration) -> Option<ExitStatus> {
        let until = Instant::now() + deadline;
        loop {
            if let Some(status) = self.ended() {
                return Some(status);
            }
            if Instant::now() > until {
                return None;
            }
            thread::sleep(POLL);
        }
    }

    pub fn kill9(&mut self) {
        self.signal(Signal::KILL);
        self.wait(Duration::from_secs(10))
            .expect("a killed process ends");
    }
}

impl Drop for Proc {
    fn drop(&mut self) {
        if self.ended().is_none() {
            self.signal(Signal::KILL);
            self.wait(Duration::from_secs(10));
        }
    }
}

/// The exit code, or minus the signal that ended it.
pub fn code(status: ExitStatus) -> i32 {
    status
        .code()
        .unwrap_or_else(|| -status.signal().expect("no code, so there was a signal"))
}

/// Sends a signal to a process that may be gone already.
pub fn send(pid: u32, signal: Signal) {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let _ = kill_process(pid.expect("a process id"), signal);
}

/// Has a child of ours ended without anybody having waited for it?
pub fn ended_unnoticed(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The state follows the name in parentheses.
    stat.rsplit(')')
        .next()
        .is_some_and(|rest| rest.trim_start().starts_with('Z'))
}

/// The direct children of a process.
pub fn children(parent: u32) -> Vec<u32> {
    let path = format!("/proc/{parent}/task/{parent}/children");
    fs::read_to_string(path)
        .unwrap_or_default()
        .split_whitespace()
        .filter_map(|pid| pid.parse().ok())
        .collect()
}

const POLL: Duration = Duration::from_millis(5);

/// Asks again and again until `condition` gives something; panics with `what` after `deadline`.
#[track_caller]
pub fn eventually<T>(
    deadline: Duration,
    what: impl AsRef<str>,
    condition: impl FnMut() -> Option<T>,
) -> T {
    eventually_says(deadline, || what.as_ref().to_owned(), condition)
}

/// The same with words that are found when they are needed.
#[track_caller]
pub fn eventually_says<T>(
    deadline: Duration,
    what: impl Fn() -> String,
    mut condition: impl FnMut() -> Option<T>,
) -> T {
    let until = Instant::now() + deadline;
    let mut pause = POLL;
    loop {
        if let Some(found) = condition() {
            return found;
        }
        assert!(
            Instant::now() < until,
            "not within {deadline:?}: {}",
            what()
        );
        thread::sleep(pause);
        pause = (pause * 5 / 4).min(Duration::from_millis(100));
    }
}

/// Kernels tie "the parent dies" to the *thread* that forked, and a test's thread ends with its
/// test. So one thread that lives as long as the process forks for everybody.
fn spawn(command: Command) -> Child {
    type Job = (Command, Sender<std::io::Result<Child>>);
    static NURSERY: OnceLock<Mutex<Sender<Job>>> = OnceLock::new();
    let nursery = NURSERY.get_or_init(|| {
        let (jobs, inbox) = channel::<Job>();
        thread::spawn(move || {
            for (mut command, reply) in inbox {
                let _ = reply.send(command.spawn());
            }
        });
        Mutex::new(jobs)
    });
    let (reply, answer) = channel();
    let what = format!("{command:?}");
    nursery
        .lock()
        .expect("nobody panics while holding it")
        .send((command, reply))
        .expect("the nursery thread lives");
    let child = answer.recv().expect("the nursery thread answers");
    child.unwrap_or_else(|error| panic!("cannot start {what}: {error}"))
}

pub fn spawn_child(command: Command) -> Child {
    spawn(command)
}

/// Runs a command to its end; its output, or a panic with it.
pub fn output(mut command: Command) -> String {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let what = format!("{command:?}");
    let output = spawn(command)
        .wait_with_output()
        .expect("our own child can be waited for");
    let text = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(output.status.success(), "{what} failed:\n{text}");
    text
}

/// The directory of this run. `$WALRELAY_KEEP` leaves it for a look.
pub fn base() -> &'static Path {
    static BASE: OnceLock<PathBuf> = OnceLock::new();
    BASE.get_or_init(|| {
        // Not `TMPDIR`: socket paths have to stay short, and another user has to reach it.
        let dir = PathBuf::from(format!("/tmp/walrelay-live-{}", std::process::id()));
        fs::create_dir(&dir).expect("a directory of our own can be made in /tmp");
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o755)).expect("it is ours");
        if std::env::var_os("WALRELAY_KEEP").is_none() {
            remove_when_we_end(&dir);
        }
        dir
    })
}

/// A shell that waits for the end of our side of its standard input, which comes with the end of
/// this process whatever ends it.
fn remove_when_we_end(dir: &Path) {
    let mut command = Command::new("setsid");
    command
        .args(["sh", "-c"])
        .arg("cat; umount -l \"$0\"/disk-* 2>/dev/null; for i in 1 2 3 4 5 6 7 8 9 10; do rm -rf \"$0\" 2>/dev/null; [ -e \"$0\" ] || exit; sleep 1; done")
        .arg(dir)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let watchdog = spawn(command);
    // Neither waited for nor closed: its pipe is the signal.
    std::mem::forget(watchdog);
}

/// A new directory of this run.
pub fn dir(name: &str) -> PathBuf {
    let path = base().join(format!("{name}-{}", unique()));
    fs::create_dir(&path).expect("a new name");
    path
}

/// A small file system of our own, to be filled.
pub struct Disk {
    pub path: PathBuf,
}

impl Disk {
    /// `None` where this user may not mount one.
    pub fn of_megabytes(size: usize) -> Option<Disk> {
        let path = dir("disk");
        let mut mount = Command::new("mount");
        mount
            .args(["-t", "tmpfs", "-o", &format!("size={size}m"), "tmpfs"])
            .arg(&path)
            .stderr(Stdio::null());
        let is_mounted = mount.status().is_ok_and(|status| status.success());
        is_mounted.then_some(Disk { path })
    }

    /// Leaves room for nothing.
    pub fn fill(&self) {
        let mut filler = fs::File::create(self.path.join("filler")).expect("it has room");
        let block = vec![b'.'; 1 << 16];
        while filler.write_all(&block).is_ok() {}
        while filler.write_all(b".").is_ok() {}
    }

    pub fn clear(&self) {
        fs::remove_file(self.path.join("filler")).expect("we filled it");
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // Lazily: whoever still runs on it ends with its servers.
        let _ = Command::new("umount").arg("-l").arg(&self.path).status();
    }
}

/// A number that no one else in this process gets.
pub fn unique() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// A port that was free a moment ago.
pub fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .expect("the loopback has a free port")
        .port()
}

/// Where `tests/servers/fetch.sh` put the servers.
pub fn servers() -> PathBuf {
    let cache = std::env::var_os("WALRELAY_SERVERS").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/servers/cache"),
        PathBuf::from,
    );
    assert!(
        cache.exists(),
        "no servers in {}: run tests/servers/fetch.sh (make test does)",
        cache.display()
    );
    cache
}
