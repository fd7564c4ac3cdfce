//! One requirement, as it was found: the words of `check`, of a refused start, and of health.

use serde::Serialize;

use crate::error::{Exit, Failure};

/// How a requirement stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    Ok,
    /// It could not be looked at; `found` says why.
    Unknown,
    /// The relay runs, and something that its operator counts on is missing.
    Warning,
    /// The relay does not run like this.
    Failed,
}

/// One requirement and how it stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What was looked at, in the field's own words: `wal_level`, `publication`, `topic payments`.
    pub subject: String,
    pub state: State,
    /// What is there.
    pub found: String,
    /// What to do; `None` where nothing needs doing.
    pub remedy: Option<String>,
    /// How a start ends on it. `Refused` unless a decision is missing (`Halted`).
    pub exit: Exit,
    /// Rows are in no stream any more: `--on-gap` says what becomes of it.
    pub is_gap: bool,
}

impl Finding {
    fn new(subject: impl Into<String>, state: State, found: impl Into<String>) -> Self {
        Finding {
            subject: subject.into(),
            state,
            found: found.into(),
            remedy: None,
            exit: Exit::Refused,
            is_gap: false,
        }
    }

    pub fn ok(subject: impl Into<String>, found: impl Into<String>) -> Self {
        Finding::new(subject, State::Ok, found)
    }

    pub fn unknown(subject: impl Into<String>, why: impl Into<String>) -> Self {
        Finding::new(subject, State::Unknown, why)
    }

    pub fn warning(
        subject: impl Into<String>,
        found: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Finding {
            remedy: Some(remedy.into()),
            ..Finding::new(subject, State::Warning, found)
        }
    }

    pub fn failed(
        subject: impl Into<String>,
        found: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Finding {
            remedy: Some(remedy.into()),
            ..Finding::new(subject, State::Failed, found)
        }
    }

    /// A gap: exit code 4, unless the policy is another.
    #[must_use]
    pub fn gap(self) -> Self {
        Finding {
            is_gap: true,
            ..self.halted()
        }
    }

    /// A decision is missing, not a grant: exit code 4.
    #[must_use]
    pub fn halted(self) -> Self {
        Finding {
            exit: Exit::Halted,
            ..self
        }
    }
}

/// Findings about one thing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    pub name: &'static str,
    pub findings: Vec<Finding>,
}

impl Group {
    #[must_use]
    pub fn new(name: &'static str, findings: Vec<Finding>) -> Self {
        Group { name, findings }
    }
}

/// Every failed finding as one message: each cause a line, each remedy a step of the last line. Exit
/// 4 only where nothing but a decision is missing. `None` where nothing failed.
#[must_use]
pub fn failure<'a>(findings: impl IntoIterator<Item = &'a Finding>) -> Option<Failure> {
    let failed: Vec<&Finding> = findings
        .into_iter()
        .filter(|finding| finding.state == State::Failed)
        .collect();
    if failed.is_empty() {
        return None;
    }
    let exit = if failed.iter().all(|f| f.exit == Exit::Halted) {
        Exit::Halted
    } else {
        Exit::Refused
    };
    let mut steps: Vec<&str> = Vec::new();
    for remedy in failed.iter().filter_map(|f| f.remedy.as_deref()) {
        if !steps.contains(&remedy) {
            steps.push(remedy);
        }
    }
    Some(Failure {
        exit,
        causes: failed.iter().map(|f| f.found.clone()).collect(),
        remedy: steps.join("; then "),
    })
}
