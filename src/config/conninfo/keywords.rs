//! `key = value`, `key='it\'s'`; blanks around `=` are allowed.

use super::super::layers::Given;
use super::words::{Word, known_key};
use crate::error::Failure;

pub fn parse(given: &Given) -> Result<Vec<Word>, Failure> {
    let malformed = |what: &str| {
        // Never quotes the string: it may hold a password.
        Failure::usage(
            format!("{}: {what}", given.origin),
            "write postgresql://user@host:5432/dbname or host=… port=… user=… dbname=…",
        )
    };
    if let Some((other, _)) = given.value.split_once("://")
        && other
            .chars()
            .all(|c| c.is_alphanumeric() || ":+-.".contains(c))
    {
        let other: String = other.chars().take(20).collect();
        return Err(malformed(&format!("{other}:// is not Postgres's scheme")));
    }
    let mut words = Vec::new();
    let mut rest = given.value.trim_start();
    while !rest.is_empty() {
        let end = rest
            .find(|c: char| c == '=' || c.is_whitespace())
            .ok_or_else(|| malformed("a word is followed by no ="))?;
        let (name, after) = rest.split_at(end);
        let after = after
            .trim_start()
            .strip_prefix('=')
            .ok_or_else(|| malformed("a word is followed by no ="))?;
        let key = known_key(name, &given.origin)?;
        let (value, after) = value(after.trim_start())
            .ok_or_else(|| malformed("a quote or a backslash is left open"))?;
        words.push(Word {
            key,
            value,
            place: format!("{key} in {}", given.origin),
        });
        rest = after.trim_start();
    }
    Ok(words)
}

fn value(text: &str) -> Option<(String, &str)> {
    let quoted = text.starts_with('\'');
    let mut value = String::new();
    let mut chars = text.char_indices().skip(usize::from(quoted));
    while let Some((at, c)) = chars.next() {
        match c {
            '\\' => value.push(chars.next()?.1),
            '\'' if quoted => return Some((value, &text[at + 1..])),
            c if !quoted && c.is_whitespace() => return Some((value, &text[at..])),
            c => value.push(c),
        }
    }
    (!quoted).then_some((value, ""))
}
