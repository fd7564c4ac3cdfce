//! Can an address be reached from here? Asked of the resolver and of TCP themselves: the client
//! library says no more than "all brokers down" for most of what can be wrong.

use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::time::timeout;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Address {
    /// A name, an IPv4 address, or an IPv6 address without its brackets.
    pub host: String,
    pub port: u16,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unreachable {
    NotResolved,
    Refused,
    TimedOut,
    Other(String),
}

impl Address {
    /// From a list that was checked already; what is no address is left out.
    pub fn list(brokers: &str) -> Vec<Address> {
        brokers
            .split(',')
            .filter_map(|broker| {
                let (host, port) = broker.trim().rsplit_once(':')?;
                let host = host.trim_start_matches('[').trim_end_matches(']');
                Some(Address {
                    host: host.to_owned(),
                    port: port.parse().ok()?,
                })
            })
            .collect()
    }

    /// Resolves the name and opens a connection, which is closed again.
    ///
    /// # Errors
    /// What stands in the way; `TimedOut` after `within`.
    pub async fn probe(&self, within: Duration) -> Result<(), Unreachable> {
        match timeout(within, self.connect()).await {
            Ok(reached) => reached,
            Err(_) => Err(Unreachable::TimedOut),
        }
    }

    async fn connect(&self) -> Result<(), Unreachable> {
        let mut last = Unreachable::NotResolved;
        for address in self.resolve().await? {
            match TcpStream::connect(address).await {
                Ok(_) => return Ok(()),
                Err(error) => last = Unreachable::of(&error),
            }
        }
        Err(last)
    }

    /// On a thread that nobody joins: a resolver without servers takes its time, and the end of the
    /// process must not wait for it.
    async fn resolve(&self) -> Result<Vec<SocketAddr>, Unreachable> {
        let (tell, told) = oneshot::channel();
        let (host, port) = (self.host.clone(), self.port);
        let spawned = std::thread::Builder::new()
            .name("kafka-resolve".into())
            .spawn(move || {
                let found = (host.as_str(), port).to_socket_addrs();
                // Nobody listens any more: it took too long.
                let _ = tell.send(found.map(|addresses| addresses.collect::<Vec<_>>()));
            });
        if let Err(error) = spawned {
            return Err(Unreachable::Other(format!("no thread to ask: {error}")));
        }
        match told.await {
            Ok(Ok(addresses)) => Ok(addresses),
            Ok(Err(_)) | Err(_) => Err(Unreachable::NotResolved),
        }
    }
}

impl Unreachable {
    fn of(error: &std::io::Error) -> Self {
        match error.kind() {
            std::io::ErrorKind::ConnectionRefused => Unreachable::Refused,
            std::io::ErrorKind::TimedOut => Unreachable::TimedOut,
            _ => Unreachable::Other(error.to_string()),
        }
    }
}

/// As it stands in `--brokers`.
impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn probe(host: &str, port: u16) -> Result<(), Unreachable> {
        let address = Address {
            host: host.to_owned(),
            port,
        };
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime")
            .block_on(address.probe(Duration::from_secs(10)))
    }

    #[test]
    fn addresses_are_read_and_shown_as_they_are_written() {
        let list = "a:1, [::1]:9092,10.0.0.1:2";
        let addresses = Address::list(list);
        let shown: Vec<String> = addresses.iter().map(ToString::to_string).collect();
        assert_eq!(shown, ["a:1", "[::1]:9092", "10.0.0.1:2"]);
        assert_eq!(addresses[1].host, "::1");
    }

    #[test]
    fn what_stands_in_the_way_is_told_apart() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = listener.local_addr().expect("bound").port();
        assert_eq!(probe("127.0.0.1", port), Ok(()));
        drop(listener);
        assert_eq!(probe("127.0.0.1", port), Err(Unreachable::Refused));
        assert_eq!(
            probe("no-such-host.invalid", 9092),
            Err(Unreachable::NotResolved)
        );
    }
}
