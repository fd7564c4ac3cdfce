//! How `check` and `status` show what they found, for people and for programs.

use std::io::{self, IsTerminal, Write};

use serde::Serialize;

use crate::error::{Exit, Failure};
use crate::finding::{Finding, Group, State};

/// Where lines end unless the terminal is narrower.
const WIDTH: usize = 100;

/// Beside a subject longer than this the next column begins on its own line.
const SUBJECT_WIDTH_MAX: usize = 28;

/// Writes to standard output.
///
/// # Errors
/// It cannot be written to. A reader who has seen enough is no error.
pub fn write_out(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        Err(e) => Err(Failure::new(
            Exit::Unexpected,
            format!("cannot write to standard output: {e}"),
            "look at where the output goes",
        )),
        Ok(()) => Ok(()),
    }
}

/// Asks on the terminal. `wants` is what a yes is wanted for, `yes_when` when --yes may be said.
///
/// # Errors
/// There is no terminal to ask on (exit 2), or it cannot be read.
pub fn is_confirmed(wants: &str, question: &str, yes_when: &str) -> Result<bool, Failure> {
    let stdin = io::stdin();
    if !stdin.is_terminal() {
        return Err(Failure::usage(
            format!("{wants} wants a yes, and there is no terminal to ask on"),
            format!("add --yes, once you know that {yes_when}"),
        ));
    }
    write_out(&format!("{question} Type yes: "))?;
    let mut answer = String::new();
    stdin.read_line(&mut answer).map_err(|e| {
        Failure::new(
            Exit::Unexpected,
            format!("cannot read the answer: {e}"),
            "add --yes",
        )
    })?;
    Ok(answer.trim() == "yes")
}

/// JSON with a newline at its end.
///
/// # Errors
/// Never for what we put into it.
pub fn json<T: Serialize>(value: &T) -> Result<String, Failure> {
    let mut text = serde_json::to_string_pretty(value)
        .map_err(|e| Failure::new(Exit::Unexpected, e.to_string(), "report this as a bug"))?;
    text.push('\n');
    Ok(text)
}

/// A finding for a program.
#[derive(Serialize)]
pub struct Entry<'a> {
    group: &'a str,
    subject: &'a str,
    state: State,
    found: &'a str,
    remedy: Option<&'a str>,
}

/// Every finding with the name of its group.
#[must_use]
pub fn entries(groups: &[Group]) -> Vec<Entry<'_>> {
    let of = |group: &'static str, finding| -> Entry<'_> {
        let finding: &Finding = finding;
        Entry {
            group,
            subject: &finding.subject,
            state: finding.state,
            found: &finding.found,
            remedy: finding.remedy.as_deref(),
        }
    };
    groups
        .iter()
        .flat_map(|group| group.findings.iter().map(move |f| of(group.name, f)))
        .collect()
}

/// What the screen is like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Screen {
    pub width: usize,
    pub has_colour: bool,
}

impl Screen {
    /// Standard output's.
    #[must_use]
    pub fn of_stdout() -> Screen {
        let out = io::stdout();
        if !out.is_terminal() {
            return Screen {
                width: WIDTH,
                has_colour: false,
            };
        }
        let width =
            rustix::termios::tcgetwinsize(&out).map_or(WIDTH, |size| usize::from(size.ws_col));
        Screen {
            width: width.clamp(60, WIDTH),
            has_colour: std::env::var_os("NO_COLOR").is_none(),
        }
    }
}

/// Findings as a table: a heading a group, a line a finding, its remedy below.
#[must_use]
pub fn table(groups: &[Group], screen: Screen) -> String {
    let subjects = groups.iter().flat_map(|group| &group.findings);
    let subject_width = subjects
        .map(|finding| finding.subject.chars().count())
        .filter(|width| *width <= SUBJECT_WIDTH_MAX)
        .max()
        .unwrap_or(0);
    let mut text = String::new();
    for group in groups {
        text.push_str(&format!("{}\n", group.name));
        for finding in &group.findings {
            line(&mut text, finding, subject_width, screen);
        }
    }
    text
}

fn line(text: &mut String, finding: &Finding, subject_width: usize, screen: Screen) {
    let state = word(finding.state);
    let (on, off) = if screen.has_colour {
        (colour(finding.state), "\x1b[0m")
    } else {
        ("", "")
    };
    let indent = 2 + 9 + subject_width + 2;
    let head = format!(
        "  {on}{state:<7}{off}  {:<subject_width$}  ",
        finding.subject
    );
    let room = screen.width.saturating_sub(indent).max(20);
    let mut begins = head;
    if finding.subject.chars().count() > subject_width {
        begins = format!("{}\n{:indent$}", begins.trim_end(), "");
    }
    text.push_str(&begins);
    text.push_str(&wrapped(&finding.found, room, indent));
    if let (Some(remedy), State::Warning | State::Failed) = (&finding.remedy, finding.state) {
        text.push_str(&format!("{:indent$}", ""));
        text.push_str(&wrapped(&format!("remedy: {remedy}"), room, indent));
    }
}

fn word(state: State) -> &'static str {
    match state {
        State::Ok => "ok",
        State::Unknown => "unknown",
        State::Warning => "warning",
        State::Failed => "failed",
    }
}

fn colour(state: State) -> &'static str {
    match state {
        State::Ok => "\x1b[32m",
        State::Unknown => "\x1b[36m",
        State::Warning => "\x1b[33m",
        State::Failed => "\x1b[31m",
    }
}

/// Words in lines of at most `room`, all but the first indented. Ends with a newline.
fn wrapped(words: &str, room: usize, indent: usize) -> String {
    let mut text = String::new();
    let mut used = 0;
    for word in words.split_whitespace() {
        let width = word.chars().count();
        if used > 0 && used + 1 + width > room {
            text.push_str(&format!("\n{:indent$}", ""));
            used = 0;
        }
        if used > 0 {
            text.push(' ');
            used += 1;
        }
        text.push_str(word);
        used += width;
    }
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn groups() -> Vec<Group> {
        vec![
            Group::new("server", vec![Finding::ok("wal_level", "logical")]),
            Group::new(
                "slot",
                vec![Finding::failed(
                    "slot",
                    "a long tale ".repeat(12),
                    "do this and that",
                )],
            ),
        ]
    }

    #[test]
    fn the_table_keeps_to_its_width_and_aligns_what_it_found() {
        let screen = Screen {
            width: 60,
            has_colour: false,
        };
        let text = table(&groups(), screen);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines.iter().all(|l| l.chars().count() <= 60), "{text}");
        assert_eq!(lines[1], "  ok       wal_level  logical");
        assert_eq!(lines[3].find("a long"), lines[1].find("logical"));
        let last = lines.last().expect("it has lines");
        assert_eq!(last.find("remedy: do this"), lines[1].find("logical"));
    }

    #[test]
    fn colours_are_for_terminals_that_want_them() {
        let with = |has_colour| {
            let screen = Screen {
                width: 100,
                has_colour,
            };
            table(&groups(), screen).contains('\x1b')
        };
        assert!(with(true));
        assert!(!with(false));
    }
}
