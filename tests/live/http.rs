//! The smallest HTTP client that will do, and rude ones.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::relay::Relay;

const PATIENCE: Duration = Duration::from_secs(15);

pub struct Reply {
    pub status: u16,
    pub head: String,
    pub body: String,
    pub took: Duration,
}

/// Where this relay listens, from its log.
pub fn address(relay: &mut Relay) -> String {
    let said = "http listening on ";
    let line = relay.wait_for_text(said, PATIENCE);
    let message = line.text("message");
    message
        .split_once(said)
        .map(|(_, address)| address.to_owned())
        .expect("the text was there")
}

/// Sends these bytes and reads to the end; what came, which may be nothing.
pub fn raw(address: &str, bytes: &[u8]) -> String {
    let mut stream = connect(address);
    // A server that has had enough closes while we still write.
    let _ = stream.write_all(bytes);
    let _ = stream.shutdown(Shutdown::Write);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

pub fn connect(address: &str) -> TcpStream {
    let stream = TcpStream::connect(address).expect("it listens");
    stream
        .set_read_timeout(Some(PATIENCE))
        .expect("a timeout above zero");
    stream
}

pub fn ask(address: &str, request: &str) -> Reply {
    let started = Instant::now();
    let text = raw(address, request.as_bytes());
    let took = started.elapsed();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
    let status = head.split_whitespace().nth(1).and_then(|s| s.parse().ok());
    Reply {
        status: status.unwrap_or(0),
        head: head.to_ascii_lowercase(),
        body: body.to_owned(),
        took,
    }
}

pub fn get(address: &str, path: &str) -> Reply {
    ask(
        address,
        &format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n"),
    )
}

/// What `/readyz` said.
pub struct Ready {
    pub status: u16,
    pub body: Value,
}

impl Ready {
    pub fn of(address: &str) -> Ready {
        let reply = get(address, "/readyz");
        Ready {
            status: reply.status,
            body: serde_json::from_str(&reply.body)
                .unwrap_or_else(|error| panic!("{error} in {}", reply.body)),
        }
    }

    pub fn condition(&self, name: &str) -> &Value {
        let conditions = self.body["conditions"].as_array().expect("a list");
        let found = conditions.iter().find(|c| c["name"] == name);
        found.unwrap_or_else(|| panic!("no condition {name} in {}", self.body))
    }

    /// `ok`, `false` or unknown.
    pub fn holds(&self, name: &str) -> Option<bool> {
        self.condition(name)["ok"].as_bool()
    }

    pub fn number(&self, name: &str) -> Option<f64> {
        let value = &self.body["progress"][name];
        assert!(
            value.is_null() || value.is_number(),
            "{name} is {value} in {}",
            self.body
        );
        value.as_f64()
    }
}

/// Every series of `/metrics` by its name with its labels.
pub fn metrics(address: &str) -> HashMap<String, f64> {
    let reply = get(address, "/metrics");
    assert_eq!(reply.status, 200, "{}", reply.body);
    reply
        .body
        .lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| {
            let (name, value) = line.rsplit_once(' ')?;
            Some((name.to_owned(), value.parse().ok()?))
        })
        .collect()
}
