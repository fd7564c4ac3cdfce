//! A TCP proxy that forgets connections, as a firewall does that lost its table: what comes on
//! them is swallowed, in both directions, and nobody is told.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

pub struct Proxy {
    port: u16,
    shared: Arc<Shared>,
}

struct Shared {
    /// Connections numbered below this are forgotten.
    forgotten_below: AtomicUsize,
    made: AtomicUsize,
}

impl Proxy {
    /// In front of a port of this machine. Lives as long as the tests do.
    pub fn before(target: u16) -> Proxy {
        Proxy::on(
            TcpListener::bind("127.0.0.1:0").expect("a free port"),
            target,
        )
    }

    /// The same behind a listener that is there already.
    pub fn on(listener: TcpListener, target: u16) -> Proxy {
        let port = listener.local_addr().expect("it is bound").port();
        let shared = Arc::new(Shared {
            forgotten_below: AtomicUsize::new(0),
            made: AtomicUsize::new(0),
        });
        let state = Arc::clone(&shared);
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                // A server that is away refuses, and so do we.
                let Ok(server) = TcpStream::connect(("127.0.0.1", target)) else {
                    continue;
                };
                let number = state.made.fetch_add(1, Ordering::SeqCst);
                carry(&client, &server, number, &state);
                carry(&server, &client, number, &state);
            }
        });
        Proxy { port, shared }
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// Forgets the connections of now; new ones are carried. How many were forgotten.
    pub fn forget(&self) -> usize {
        let made = self.shared.made.load(Ordering::SeqCst);
        made - self.shared.forgotten_below.swap(made, Ordering::SeqCst)
    }
}

fn carry(from: &TcpStream, to: &TcpStream, number: usize, state: &Arc<Shared>) {
    let mut from = from.try_clone().expect("a socket can be cloned");
    let mut to = to.try_clone().expect("a socket can be cloned");
    let state = Arc::clone(state);
    thread::spawn(move || {
        let mut buffer = vec![0; 1 << 16];
        loop {
            let read = from.read(&mut buffer).unwrap_or(0);
            let is_forgotten = number < state.forgotten_below.load(Ordering::SeqCst);
            if read == 0 && is_forgotten {
                // Not even the end gets through. Both sockets stay open as long as the process.
                std::mem::forget((from, to));
                return;
            }
            if read == 0 {
                let _ = to.shutdown(Shutdown::Write);
                return;
            }
            if !is_forgotten && to.write_all(&buffer[..read]).is_err() {
                let _ = from.shutdown(Shutdown::Both);
                return;
            }
        }
    });
}
