//! The hosts: names, addresses and ports, as three lists that go side by side.

use std::net::IpAddr;

use super::super::Host;
use super::words::{Found, Words};
use crate::error::Failure;

const PORT_DEFAULT: u16 = 5432;

pub fn parse(words: &Words<'_>) -> Result<Vec<Host>, Failure> {
    let usual = || {
        let socket = words.around.socket_dir.clone();
        socket.unwrap_or_else(|| "localhost".to_owned())
    };
    let (names, addresses) = (words.find("host"), words.find("hostaddr"));
    let list = |found: &Option<Found>| -> Vec<String> {
        let value = found.as_ref().map(|found| found.value.as_str());
        let parts = value.map(|value| value.split(',').map(str::trim).map(str::to_owned));
        parts.map(Iterator::collect).unwrap_or_default()
    };
    let (name_list, address_list) = (list(&names), list(&addresses));
    if let (Some(names), Some(addresses)) = (&names, &addresses)
        && name_list.len() != address_list.len()
    {
        return Err(Failure::usage(
            format!(
                "{} has {} entries, and {} has {}",
                names.place,
                name_list.len(),
                addresses.place,
                address_list.len()
            ),
            "name as many addresses as hosts, in the same order",
        ));
    }
    let count = name_list.len().max(address_list.len()).max(1);
    let ports = ports(words.find("port"), count)?;
    let mut hosts = Vec::with_capacity(count);
    for (at, port) in ports.into_iter().enumerate() {
        let written = address_list.get(at).filter(|text| !text.is_empty());
        let address = written
            .zip(addresses.as_ref())
            .map(|(text, found)| address(text, found))
            .transpose()?;
        let name = name_list.get(at).filter(|name| !name.is_empty()).cloned();
        hosts.push(Host {
            name: name.or_else(|| written.cloned()).unwrap_or_else(usual),
            address,
            port,
        });
    }
    Ok(hosts)
}

fn address(text: &str, found: &Found) -> Result<IpAddr, Failure> {
    text.parse().map_err(|_| {
        found.wrong(
            "is no address",
            "write addresses, as 10.0.0.1 or fd00::1; names go into host",
        )
    })
}

/// One port counts for every host.
fn ports(found: Option<Found>, hosts: usize) -> Result<Vec<u16>, Failure> {
    let Some(found) = found else {
        return Ok(vec![PORT_DEFAULT; hosts]);
    };
    let mut ports = Vec::new();
    for text in found.value.split(',').map(str::trim) {
        let port = match text {
            "" => Some(PORT_DEFAULT),
            text => text.parse().ok().filter(|port| *port > 0),
        };
        ports.push(port.ok_or_else(|| {
            Failure::usage(
                format!("{}: {text:?} is no port", found.place),
                "write a number from 1 to 65535",
            )
        })?);
    }
    if ports.len() == 1 {
        return Ok(vec![ports[0]; hosts]);
    }
    if ports.len() != hosts {
        return Err(found.wrong(
            &format!("has {} entries for {hosts} hosts", ports.len()),
            "name one port for all hosts, or one for each",
        ));
    }
    Ok(ports)
}
