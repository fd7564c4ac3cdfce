//! A way to the broker that can lose exactly what a test wants lost: it knows Kafka's frames.

use std::collections::HashSet;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use crate::kafka::{Broker, Jvm};
use crate::proc;

const PRODUCE: i16 = 0;
const OFFSET_COMMIT: i16 = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    Open,
    /// Records come to the broker; its acknowledgements come to nobody.
    SwallowsAcks,
    /// Records come to nobody.
    SwallowsRecords,
    /// The offsets that a consumer commits come to nobody.
    SwallowsOffsets,
}

pub struct Proxy {
    port: u16,
    shared: Arc<Shared>,
}

struct Shared {
    way: Mutex<Way>,
    swallowed: AtomicUsize,
}

/// A broker with two doors, and the proxy before the second: who comes in there is told no other.
pub fn broker_behind_a_proxy() -> (Broker, Proxy) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("the loopback has a free port");
    let port = listener.local_addr().expect("it is bound").port();
    let (direct, behind, controller) = (proc::free_port(), proc::free_port(), proc::free_port());
    let broker = Broker::made(
        Jvm::Small,
        &[
            &format!(
                "listeners=PLAINTEXT://127.0.0.1:{direct},PROXIED://127.0.0.1:{behind},\
                 CONTROLLER://127.0.0.1:{controller}"
            ),
            &format!(
                "advertised.listeners=PLAINTEXT://127.0.0.1:{direct},PROXIED://127.0.0.1:{port}"
            ),
            &format!("controller.quorum.voters=1@127.0.0.1:{controller}"),
            "listener.security.protocol.map=PLAINTEXT:PLAINTEXT,PROXIED:PLAINTEXT,CONTROLLER:PLAINTEXT",
        ],
        &[],
        direct,
    );
    let shared = Arc::new(Shared {
        way: Mutex::new(Way::Open),
        swallowed: AtomicUsize::new(0),
    });
    let theirs = Arc::clone(&shared);
    thread::spawn(move || {
        for client in listener.incoming().flatten() {
            if let Ok(server) = TcpStream::connect(("127.0.0.1", behind)) {
                let _ = join(client, server, &theirs);
            }
        }
    });
    (broker, Proxy { port, shared })
}

impl Proxy {
    pub fn bootstrap(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    pub fn set(&self, way: Way) {
        self.shared.swallowed.store(0, Ordering::SeqCst);
        *self
            .shared
            .way
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = way;
    }

    /// Frames that were swallowed since the way was set.
    pub fn swallowed(&self) -> usize {
        self.shared.swallowed.load(Ordering::SeqCst)
    }
}

impl Shared {
    /// Is this frame lost? Decided and counted under one lock.
    fn swallows(&self, what: Way) -> bool {
        let way = self.way.lock().unwrap_or_else(PoisonError::into_inner);
        let is_lost = *way == what;
        if is_lost {
            self.swallowed.fetch_add(1, Ordering::SeqCst);
        }
        is_lost
    }
}

fn join(client: TcpStream, server: TcpStream, shared: &Arc<Shared>) -> io::Result<()> {
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let produced: Arc<Mutex<HashSet<[u8; 4]>>> = Arc::default();
    let (from_client, to_client) = (client.try_clone()?, client);
    let (from_server, to_server) = (server.try_clone()?, server);
    let (asked, shared_up) = (Arc::clone(&produced), Arc::clone(shared));
    thread::spawn(move || {
        pump(from_client, to_server, |body| {
            // api_key, api_version, correlation_id
            let (Some(key), Some(id)) = (array::<2>(body, 0), array::<4>(body, 4)) else {
                return true;
            };
            match i16::from_be_bytes(key) {
                PRODUCE => {
                    asked
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .insert(id);
                    !shared_up.swallows(Way::SwallowsRecords)
                }
                OFFSET_COMMIT => !shared_up.swallows(Way::SwallowsOffsets),
                _ => true,
            }
        });
    });
    let shared_down = Arc::clone(shared);
    thread::spawn(move || {
        pump(from_server, to_client, |body| {
            let answers_produce = array::<4>(body, 0).is_some_and(|id| {
                let mut produced = produced.lock().unwrap_or_else(PoisonError::into_inner);
                produced.remove(&id)
            });
            !(answers_produce && shared_down.swallows(Way::SwallowsAcks))
        });
    });
    Ok(())
}

fn array<const N: usize>(body: &[u8], at: usize) -> Option<[u8; N]> {
    body.get(at..at + N)?.try_into().ok()
}

/// Frame by frame, until either side has gone; then both go.
fn pump(mut from: TcpStream, mut to: TcpStream, mut lets_pass: impl FnMut(&[u8]) -> bool) {
    let _ = (|| -> io::Result<()> {
        let mut body = Vec::new();
        loop {
            let mut length = [0; 4];
            from.read_exact(&mut length)?;
            let size = usize::try_from(u32::from_be_bytes(length)).map_err(io::Error::other)?;
            body.resize(size, 0);
            from.read_exact(&mut body)?;
            if lets_pass(&body) {
                to.write_all(&length)?;
                to.write_all(&body)?;
            }
        }
    })();
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}
