//! SIGTERM and SIGINT, as every command that runs for long listens to them.

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::error::{Exit, Failure};

/// From its making on neither signal ends the process by itself.
pub struct Termination {
    terminate: Signal,
    interrupt: Signal,
}

impl Termination {
    /// # Errors
    /// The system lets us listen to none.
    pub fn listen() -> Result<Self, Failure> {
        let listen = |kind| {
            signal(kind).map_err(|error| {
                Failure::new(
                    Exit::Unexpected,
                    format!("cannot listen for signals: {error}"),
                    "report this with the kernel's version",
                )
            })
        };
        Ok(Termination {
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
        })
    }

    /// Either of them. Cancel-safe.
    pub async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
