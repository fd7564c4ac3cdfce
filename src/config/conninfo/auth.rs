//! How the server may ask us who we are: `require_auth` and `channel_binding`.

use super::super::{Auth, ChannelBinding, Method, Methods};
use super::words::{Found, Words};
use crate::error::Failure;

const SPOKEN: [Method; 4] = [
    Method::None,
    Method::Password,
    Method::Md5,
    Method::ScramSha256,
];
/// libpq's, which we do not speak: allowing them allows nothing.
const NOT_SPOKEN: [&str; 3] = ["gss", "sspi", "oauth"];

pub fn parse(words: &Words<'_>) -> Result<Auth, Failure> {
    if let Some(found) = words.find("gssencmode") {
        // `prefer` encrypts by GSSAPI only where there are credentials, and we have none.
        found
            .one_of(&[("disable", ()), ("prefer", ())])
            .map_err(|_| {
                found.wrong(
                    "cannot be honoured",
                    "write gssencmode=disable; GSSAPI is not spoken here, TLS is (sslmode)",
                )
            })?;
    }
    if let Some(found) = words.find("min_protocol_version") {
        found.one_of(&[("3.0", ())]).map_err(|_| {
            found.wrong(
                "cannot be honoured",
                "leave it out: protocol 3.0 is spoken, which every server understands",
            )
        })?;
    }
    let channel_binding =
        words
            .find("channel_binding")
            .map_or(Ok(ChannelBinding::Prefer), |found| {
                found.one_of(&[
                    ("disable", ChannelBinding::Disable),
                    ("prefer", ChannelBinding::Prefer),
                    ("require", ChannelBinding::Require),
                ])
            })?;
    Ok(Auth {
        channel_binding,
        methods: words
            .find("require_auth")
            .as_ref()
            .map(methods)
            .transpose()?,
    })
}

fn methods(found: &Found) -> Result<Methods, Failure> {
    let entries: Vec<&str> = found.value.split(',').map(str::trim).collect();
    let forbids = entries[0].starts_with('!');
    let mut named = Vec::new();
    for entry in entries {
        if entry.starts_with('!') != forbids {
            return Err(found.wrong(
                "both allows and forbids",
                "write methods that are allowed, or !methods that are not",
            ));
        }
        let name = entry.strip_prefix('!').unwrap_or(entry);
        match SPOKEN.into_iter().find(|method| method.word() == name) {
            Some(method) => named.push(method),
            None if NOT_SPOKEN.contains(&name) => {}
            None => {
                return Err(found.wrong(
                    "has a method that is not known",
                    "use scram-sha-256, md5, password, none",
                ));
            }
        }
    }
    let allowed: Vec<Method> = SPOKEN
        .into_iter()
        .filter(|method| named.contains(method) != forbids)
        .collect();
    if allowed.is_empty() {
        return Err(found.wrong(
            "leaves no method that is spoken here",
            "allow one of scram-sha-256, md5, password, none",
        ));
    }
    Ok(Methods {
        written: found.value.clone(),
        clear_password: !forbids && named.contains(&Method::Password),
        allowed,
    })
}
