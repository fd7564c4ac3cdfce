//! How Kafka stands, seen from here: for `check`, for the start of `run`, and while deliveries fail.
//! First whether an address is reachable at all, then what the cluster says of itself, then whether
//! each broker can be reached where it says that it is; the words are in [`words`].

mod address;
mod ask;
mod tls;
mod words;

use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use super::Settings;
use crate::config::CreateTopics;
use crate::error::Failure;
use crate::finding::{self, Finding, State};
use address::{Address, Unreachable};
use words::{Heals, Said};

/// Opening a connection takes a round trip; a firewall that drops packets takes all of this.
const CONNECT_WITHIN: Duration = Duration::from_secs(3);

/// How the cluster stood at one look.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reach {
    pub findings: Vec<Finding>,
    /// What of it time does not heal: a wrong password, TLS against a listener that has none.
    definite: Vec<Finding>,
    /// What of it holds up deliveries as a whole. (An absent topic holds up its own events, and the
    /// relay says so itself.)
    trouble: Vec<Finding>,
}

impl Reach {
    /// What ends a start: only an operator can put it right. `None` where waiting may.
    #[must_use]
    pub fn definite(&self) -> Option<Failure> {
        finding::failure(&self.definite)
    }

    /// What is worth a line at a start, and does not hinder it.
    pub fn warnings(&self) -> impl Iterator<Item = &Finding> {
        let is_warning = |finding: &&Finding| finding.state == State::Warning;
        self.findings.iter().filter(is_warning)
    }

    /// What holds up deliveries and what to do about it, in a line each.
    #[must_use]
    pub fn trouble(&self) -> Option<(String, String)> {
        finding::failure(&self.trouble).map(|failure| (failure.causes.join("; "), failure.remedy))
    }

    #[cfg(test)]
    pub fn in_trouble(finding: Finding) -> Self {
        let mut reach = Reach::default();
        reach.add([finding.into()]);
        reach
    }

    fn add(&mut self, all: impl IntoIterator<Item = Said>) {
        for said in all {
            match said.heals {
                Heals::Never => self.definite.push(said.finding.clone()),
                Heals::WithTime | Heals::WithTheTopic => {}
            }
            match said.heals {
                Heals::Never | Heals::WithTime => self.trouble.push(said.finding.clone()),
                Heals::WithTheTopic => {}
            }
            self.findings.push(said.finding);
        }
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
    let mut reach = Reach::default();
    if settings.mock().is_some() {
        let found = "the built-in demo broker: simulated, in this process";
        reach.add([Finding::ok("kafka", found).into()]);
        return reach;
    }
    let until = Instant::now() + within;
    if let Some(token) = settings.token() {
        // A token command has ten seconds of its own.
        let _ = tokio::time::timeout(within, token.ready()).await;
        if let Err(why) = token.token() {
            reach.add([words::no_token(&why)]);
            return reach;
        }
    }
    let bootstrap = probe_all(&Address::list(settings.bootstrap()), until).await;
    if bootstrap.iter().all(|(_, reached)| reached.is_err()) {
        reach.add([words::nobody(&bootstrap)]);
        return reach;
    }
    let good: Vec<String> = bootstrap
        .iter()
        .filter(|(_, reached)| reached.is_ok())
        .map(|(address, _)| address.to_string())
        .collect();
    let heard = ask::all(settings, &good, topics, until).await;
    let nodes = match &heard.cluster {
        Some(Ok(nodes)) => nodes,
        Some(Err(_)) | None => {
            reach.add([words::no_answer(&good, &heard)]);
            return reach;
        }
    };
    let advertised: Vec<Address> = nodes.iter().map(ask::address_of).collect();
    let unknown: Vec<Address> = advertised
        .iter()
        .filter(|address| !good.contains(&address.to_string()))
        .cloned()
        .collect();
    let probed = probe_all(&unknown, until).await;
    reach.add(words::cluster(&bootstrap, nodes, &probed));
    for (found, remedy) in settings.exposures() {
        reach.add([Finding::warning("kafka", found, remedy).into()]);
    }
    reach.add(words::topics(topics, &heard, create_topics));
    reach
}

/// All at once, in the order given.
async fn probe_all(
    addresses: &[Address],
    until: Instant,
) -> Vec<(Address, Result<(), Unreachable>)> {
    let within = CONNECT_WITHIN.min(until.saturating_duration_since(Instant::now()));
    let mut probes = JoinSet::new();
    for (at, address) in addresses.iter().cloned().enumerate() {
        probes.spawn(async move {
            let reached = address.probe(within).await;
            (at, address, reached)
        });
    }
    let mut probed = probes.join_all().await;
    probed.sort_by_key(|(at, ..)| *at);
    probed
        .into_iter()
        .map(|(_, address, reached)| (address, reached))
        .collect()
}
