//! The consumer: reads the topic back on a thread of its own and shows records as they arrive.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde::Deserialize;

use super::shop::{Doors, parse_uuid};
use super::show::{self, Style};
use super::verdict::Received;
use crate::io::kafka::{self, Got, Reader};

/// More lines a second than that nobody reads.
pub const LINES_EACH_SECOND: u32 = 10;
const POLL: Duration = Duration::from_millis(50);
/// For the rest of the topic, once the relay has ended.
const END_WITHIN: Duration = Duration::from_secs(15);

#[derive(Default)]
struct Shared {
    received: AtomicUsize,
    is_last_round: AtomicBool,
}

pub struct Audience {
    shared: Arc<Shared>,
    thread: JoinHandle<Result<Heard, String>>,
}

/// All that the topic held.
#[derive(Debug, Default)]
pub struct Heard {
    /// In order of arrival.
    pub received: Vec<Received>,
    /// The broker had dropped records before the end.
    pub is_trimmed: bool,
}

#[derive(Deserialize)]
struct Payload {
    seq: u64,
    cents: i64,
}

impl Audience {
    /// Takes its place: whatever is sent from now on is seen.
    ///
    /// # Errors
    /// The topic cannot be read.
    pub async fn start(
        settings: kafka::Settings,
        topic: String,
        partitions: i32,
        doors: Arc<Doors>,
        style: Style,
    ) -> Result<Self, String> {
        let shared = Arc::new(Shared::default());
        let (tell, is_ready) = tokio::sync::oneshot::channel();
        let theirs = Arc::clone(&shared);
        let thread = thread::spawn(move || {
            let reader = match Reader::new(&settings, &topic, partitions) {
                Ok(reader) => reader,
                Err(error) => {
                    // Told twice, where nobody listens any more only once.
                    let _ = tell.send(Err(error.clone()));
                    return Err(error);
                }
            };
            let _ = tell.send(Ok(()));
            listen(&reader, &theirs, &doors, style)
        });
        match is_ready.await {
            Ok(ready) => ready.map(|()| Audience { shared, thread }),
            Err(_) => Err("the consumer's thread ended".to_owned()),
        }
    }

    pub fn received(&self) -> usize {
        self.shared.received.load(Ordering::Relaxed)
    }

    /// Reads what is left, to the very end of each partition.
    ///
    /// # Errors
    /// The end could not be reached, or not be told.
    pub async fn end(self) -> Result<Heard, String> {
        self.shared.is_last_round.store(true, Ordering::Relaxed);
        let joined = tokio::task::spawn_blocking(move || self.thread.join()).await;
        match joined {
            Ok(Ok(heard)) => heard,
            Ok(Err(_)) | Err(_) => Err("the consumer's thread broke".to_owned()),
        }
    }
}

fn listen(reader: &Reader, shared: &Shared, doors: &Doors, style: Style) -> Result<Heard, String> {
    let mut heard = Heard::default();
    // The next offset of each partition.
    let mut next: Vec<i64> = Vec::new();
    let mut line_at = Instant::now();
    let mut last_round = None;
    loop {
        if last_round.is_none() && shared.is_last_round.load(Ordering::Relaxed) {
            let extents = reader.extents()?;
            heard.is_trimmed = extents.iter().any(|extent| extent.first > 0);
            last_round = Some((extents, Instant::now() + END_WITHIN));
        }
        if let Some((extents, until)) = &last_round {
            let is_read = extents.iter().all(|extent| {
                let partition = usize::try_from(extent.partition).unwrap_or_default();
                next.get(partition).copied().unwrap_or_default() >= extent.end
            });
            if is_read {
                return Ok(heard);
            }
            if Instant::now() > *until {
                return Err("the end of the topic was not reached".to_owned());
            }
        }
        let got = match reader.poll(POLL) {
            Ok(Some(got)) => got,
            Ok(None) => continue,
            Err(error) => {
                // It goes on by itself, and may complain at once again.
                tracing::debug!(%error, "the consumer");
                thread::sleep(POLL);
                continue;
            }
        };
        let at = Instant::now();
        let partition = usize::try_from(got.partition).unwrap_or_default();
        if next.len() <= partition {
            next.resize(partition + 1, 0);
        }
        next[partition] = got.offset + 1;
        let (received, cents) = parse(&got, at);
        if at >= line_at {
            line_at = at + Duration::from_secs(1) / LINES_EACH_SECOND;
            let since = doors.committed(received.event_id);
            let latency = at.saturating_duration_since(since.unwrap_or(at));
            show::record(style, &got, cents, latency);
        }
        heard.received.push(received);
        shared
            .received
            .store(heard.received.len(), Ordering::Relaxed);
    }
}

/// What cannot be understood counts as an event that nobody wrote.
fn parse(got: &Got, at: Instant) -> (Received, i64) {
    let event_id = got.header("event_id").and_then(parse_uuid);
    let payload = serde_json::from_slice::<Payload>(&got.value);
    let payload = payload.unwrap_or(Payload { seq: 0, cents: 0 });
    let received = Received {
        event_id: event_id.unwrap_or_default(),
        key: String::from_utf8_lossy(&got.key).into_owned(),
        seq: payload.seq,
        at,
    };
    (received, payload.cents)
}
