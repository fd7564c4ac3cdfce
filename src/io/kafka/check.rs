//! How Kafka stands, seen from here: for `check`, for the start of `run`, and while deliveries fail.

use std::time::Duration;

use super::Settings;
use crate::config::CreateTopics;
use crate::error::Failure;
use crate::finding::{self, Finding, State};

/// How the cluster stood at one look.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reach {
    pub findings: Vec<Finding>,
    /// Those of the failed findings that time does not heal: a wrong password, TLS against a
    /// listener that has none.
    definite: Vec<usize>,
}

impl Reach {
    /// What ends a start: only an operator can put it right. `None` where waiting may.
    #[must_use]
    pub fn definite(&self) -> Option<Failure> {
        let findings: Vec<Finding> = self
            .definite
            .iter()
            .filter_map(|at| self.findings.get(*at).cloned())
            .collect();
        finding::failure(&findings)
    }

    /// What fails and what to do about it, in a line each; `None` where nothing fails.
    #[must_use]
    pub fn trouble(&self) -> Option<(String, String)> {
        let failed = |finding: &&Finding| finding.state == State::Failed;
        let failed: Vec<Finding> = self.findings.iter().filter(failed).cloned().collect();
        finding::failure(&failed).map(|failure| (failure.causes.join("; "), failure.remedy))
    }
}

/// Every requirement of Kafka's side, each as a finding. Takes `within` at most.
pub async fn look(
    settings: &Settings,
    topics: &[String],
    create_topics: Option<CreateTopics>,
    within: Duration,
) -> Vec<Finding> {
    reach(settings, topics, create_topics, within)
        .await
        .findings
}

/// As [`look`], and which of it time does not heal.
pub async fn reach(
    settings: &Settings,
    topics: &[String],
    create_topics: Option<CreateTopics>,
    within: Duration,
) -> Reach {
    let _ = (settings, topics, create_topics, within);
    Reach::default()
}
