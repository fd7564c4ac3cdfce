//! What the program says while it runs: log lines, one live line on a terminal, and `Progress`,
//! the one place where progress, lag and latency are computed, whoever reads them.
//!
//! # Invariants
//! - The live line and log lines never share a line of the terminal.

pub mod health;
mod progress;

use std::io::{self, IsTerminal, Write};
use std::panic::PanicHookInfo;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

use tracing_subscriber::filter::{EnvFilter, LevelFilter};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::FormatTime;

use crate::config::LogFormat;
use crate::error::{Exit, Failure};

pub use progress::{Amount, Gauges, Leader, Peer, Progress, name};

static LIVE: AtomicBool = AtomicBool::new(false);
static SCREEN: Mutex<Screen> = Mutex::new(Screen {
    line: String::new(),
});

/// How much of the screen is ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Voice {
    /// INFO and above, and a live line on a terminal.
    Full,
    /// Something else is shown there: warnings only, and no live line.
    Aside,
}

/// Sets up logging to stderr; `RUST_LOG` filters.
///
/// # Errors
/// `Exit::Usage` when `RUST_LOG` is malformed.
pub fn init(format: LogFormat, voice: Voice) -> Result<(), Failure> {
    let level = match voice {
        Voice::Full => LevelFilter::INFO,
        Voice::Aside => LevelFilter::WARN,
    };
    let filter = EnvFilter::builder()
        .with_default_directive(level.into())
        .from_env()
        .map_err(|error| {
            Failure::usage(
                format!("RUST_LOG: {error}"),
                "write a level (info, debug) or target=level,…",
            )
        })?;
    let terminal = io::stderr().is_terminal();
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_timer(UtcMillis)
        .with_writer(StderrBesideLine)
        .with_ansi(terminal && std::env::var_os("NO_COLOR").is_none());
    let set = match format {
        LogFormat::Text => builder.with_target(false).try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
    set.map_err(|error| {
        Failure::new(
            Exit::Unexpected,
            format!("logging: {error}"),
            "report this: walrelay set its logging up twice",
        )
    })?;
    let has_live_line = terminal && format == LogFormat::Text && voice == Voice::Full;
    LIVE.store(has_live_line, Ordering::Relaxed);
    Ok(())
}

/// Is there a terminal that a live line can be shown on?
#[must_use]
pub fn live_is_on() -> bool {
    LIVE.load(Ordering::Relaxed)
}

/// Shows `line` in place of the last one. Nothing happens where there is no terminal.
pub fn show_live(line: &str) {
    if live_is_on() {
        let width = rustix::termios::tcgetwinsize(io::stderr())
            .map_or(80, |size| usize::from(size.ws_col.max(20)));
        with_screen(|screen, out| screen.show(out, line, width));
    }
}

/// Takes the live line away, for good or until the next `show_live`.
pub fn clear_live() {
    with_screen(Screen::clear);
}

/// A message for whoever started the program, on lines of its own.
pub fn say(message: &str) {
    with_screen(|screen, out| {
        screen.clear(out)?;
        writeln!(out, "{message}")
    });
}

/// The panic hook: a panic is our bug, is never silent, and ends the process with exit code 1
/// (`main` sees to its own thread; in any other the process would live on, half of it gone).
pub fn report_panic(info: &PanicHookInfo<'_>) {
    let payload = info.payload();
    let what = payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message");
    let place = info.location().map(ToString::to_string);
    let message = format!(
        "error: panic at {}: {what}\n\
         remedy: this is a bug in walrelay {}: report it with the line above; walrelay can be \
         started again, for nothing is confirmed that was not delivered\n",
        place.as_deref().unwrap_or("an unknown place"),
        env!("CARGO_PKG_VERSION")
    );
    // Not `say`: this thread may be the one that holds the screen.
    let mut out = io::stderr().lock();
    if let Ok(mut screen) = SCREEN.try_lock() {
        let _ = screen.clear(&mut out);
    }
    let _ = out.write_all(message.as_bytes());
    if std::thread::current().name() != Some("main") {
        std::process::exit(Exit::Unexpected as i32);
    }
}

fn with_screen(draw: impl FnOnce(&mut Screen, &mut dyn Write) -> io::Result<()>) {
    let mut out = io::stderr().lock();
    let mut screen = SCREEN.lock().unwrap_or_else(PoisonError::into_inner);
    // A terminal that went away is no reason to stop relaying.
    let _ = draw(&mut screen, &mut out);
}

/// What stands on the terminal's last line.
struct Screen {
    line: String,
}

impl Screen {
    /// To the line's start, and the line is blank.
    const ERASE: &[u8] = b"\r\x1b[2K";

    fn show(&mut self, out: &mut dyn Write, line: &str, width: usize) -> io::Result<()> {
        // One column is left free: some terminals wrap when the last one is written.
        self.line = line.chars().take(width - 1).collect();
        out.write_all(&[Self::ERASE, self.line.as_bytes()].concat())?;
        out.flush()
    }

    fn clear(&mut self, out: &mut dyn Write) -> io::Result<()> {
        if self.line.is_empty() {
            return Ok(());
        }
        self.line.clear();
        out.write_all(Self::ERASE)?;
        out.flush()
    }

    /// A log line, above the live line. `bytes` ends with a line feed.
    fn log(&self, out: &mut dyn Write, bytes: &[u8]) -> io::Result<()> {
        if self.line.is_empty() {
            return out.write_all(bytes);
        }
        out.write_all(&[Self::ERASE, bytes, self.line.as_bytes()].concat())?;
        out.flush()
    }
}

/// Where log lines go: one write a line.
struct StderrBesideLine;

impl Write for StderrBesideLine {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        with_screen(|screen, out| screen.log(out, bytes));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for StderrBesideLine {
    type Writer = StderrBesideLine;

    fn make_writer(&self) -> StderrBesideLine {
        StderrBesideLine
    }
}

struct UtcMillis;

impl FormatTime for UtcMillis {
    fn format_time(&self, writer: &mut Writer<'_>) -> std::fmt::Result {
        write!(
            writer,
            "{}",
            humantime::format_rfc3339_millis(SystemTime::now())
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_line_never_stands_beside_the_live_line() {
        let mut out = Vec::new();
        let mut screen = Screen {
            line: String::new(),
        };
        let to = &mut out;
        screen.log(to, b"one\n").expect("a Vec takes all");
        screen.show(to, "live line", 6).expect("a Vec takes all");
        screen.log(to, b"two\n").expect("a Vec takes all");
        screen.clear(to).expect("a Vec takes all");
        screen.log(to, b"three\n").expect("a Vec takes all");
        assert_eq!(
            String::from_utf8_lossy(&out),
            "one\n\r\x1b[2Klive \r\x1b[2Ktwo\nlive \r\x1b[2Kthree\n"
        );
    }
}
