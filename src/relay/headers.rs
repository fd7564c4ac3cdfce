//! The headers that a row brings itself: the members of a JSON object.
//!
//! # Invariants
//! A name that a column has given is never replaced, and the order is the row's.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use crate::record::Header;

/// What is wrong with a row's headers, to stand behind the column's name.
pub(super) type BadHeaders = String;

/// Adds the members of a JSON object as headers: a string as its text, null as null, everything
/// else as Postgres printed it. Returns how many forged names were dropped.
pub(super) fn read_headers<'a>(
    json: &'a [u8],
    headers: &mut Vec<Header<'a>>,
) -> Result<usize, BadHeaders> {
    let Ok(text) = std::str::from_utf8(json) else {
        return read_byte_headers(json, headers);
    };
    read_text_headers(text, headers)
}

/// A SQL_ASCII database holds whatever bytes a client wrote. They are read as if each were a
/// character, and written as bytes again: what is not ASCII passes as it is.
fn read_byte_headers(json: &[u8], headers: &mut Vec<Header<'_>>) -> Result<usize, BadHeaders> {
    let text: String = json.iter().map(|byte| char::from(*byte)).collect();
    let mut found = Vec::new();
    let mut forged = read_text_headers(&text, &mut found)?;
    let columns = headers.len();
    for header in found {
        if headers[..columns].iter().any(|h| h.name == header.name) {
            forged += 1;
            continue;
        }
        if !header.name.is_ascii() {
            return Err("has a name that is not UTF-8".to_owned());
        }
        headers.push(Header {
            name: Cow::Owned(header.name.into_owned()),
            value: header.value.map(|value| Cow::Owned(bytes_again(&value))),
        });
    }
    Ok(forged)
}

/// The inverse of reading each byte as a character. (A `\u` escape beyond them stays UTF-8.)
fn bytes_again(value: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(value.len());
    for c in String::from_utf8_lossy(value).chars() {
        match u8::try_from(u32::from(c)) {
            Ok(byte) => bytes.push(byte),
            Err(_) => bytes.extend(c.encode_utf8(&mut [0; 4]).bytes()),
        }
    }
    bytes
}

fn read_text_headers<'a>(
    json: &'a str,
    headers: &mut Vec<Header<'a>>,
) -> Result<usize, BadHeaders> {
    let members: Members<'a> =
        serde_json::from_str(json).map_err(|_| "is not a JSON object".to_owned())?;
    // Those before are made of columns, and columns count.
    let columns = headers.len();
    let mut forged = 0;
    for (name, raw) in members.0 {
        if headers[..columns].iter().any(|h| h.name == name) {
            forged += 1;
            continue;
        }
        if name.contains('\0') {
            return Err("has a name with a NUL in it".to_owned());
        }
        let value = match raw.get() {
            "null" => None,
            text if text.starts_with('"') => {
                let text: JsonText<'a> =
                    serde_json::from_str(text).map_err(|e| format!("has a bad string: {e}"))?;
                Some(match text.0 {
                    Cow::Borrowed(text) => Cow::Borrowed(text.as_bytes()),
                    Cow::Owned(text) => Cow::Owned(text.into_bytes()),
                })
            }
            text => Some(Cow::Borrowed(text.as_bytes())),
        };
        headers.push(Header { name, value });
    }
    Ok(forged)
}

/// An object's members in the order in which they stand, their values unread.
struct Members<'a>(Vec<(Cow<'a, str>, &'a RawValue)>);

impl<'de> Deserialize<'de> for Members<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct InOrder;
        impl<'de> Visitor<'de> for InOrder {
            type Value = Members<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Members<'de>, A::Error> {
                let mut members = Vec::new();
                while let Some((JsonText(name), value)) = map.next_entry()? {
                    members.push((name, value));
                }
                Ok(Members(members))
            }
        }
        deserializer.deserialize_map(InOrder)
    }
}

/// A JSON string, borrowed where it has no escapes.
struct JsonText<'a>(Cow<'a, str>);

impl<'de> Deserialize<'de> for JsonText<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;
        impl<'de> Visitor<'de> for Text {
            type Value = JsonText<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }
            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<JsonText<'de>, E> {
                Ok(JsonText(Cow::Borrowed(text)))
            }
            fn visit_str<E>(self, text: &str) -> Result<JsonText<'de>, E> {
                Ok(JsonText(Cow::Owned(text.to_owned())))
            }
        }
        deserializer.deserialize_str(Text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn column(name: &'static str, value: &'static [u8]) -> Header<'static> {
        Header {
            name: Cow::Borrowed(name),
            value: Some(Cow::Borrowed(value)),
        }
    }

    fn headers(json: &str) -> Result<Vec<(String, Option<String>)>, BadHeaders> {
        let mut headers = Vec::new();
        read_headers(json.as_bytes(), &mut headers)?;
        Ok(headers
            .into_iter()
            .map(|h| {
                let value = h
                    .value
                    .map(|v| String::from_utf8(v.into_owned()).expect("UTF-8"));
                (h.name.into_owned(), value)
            })
            .collect())
    }

    #[test]
    fn header_values_are_what_postgres_prints() {
        let found = headers(
            r#"{"b": true, "e": "", "n": 1.10, "o": {"x": 1}, "s": "é", "z": null, "q": "a\"b"}"#,
        );
        let expected = [
            ("b", Some("true")),
            ("e", Some("")),
            ("n", Some("1.10")),
            ("o", Some(r#"{"x": 1}"#)),
            ("s", Some("é")),
            ("z", None),
            ("q", Some("a\"b")),
        ]
        .map(|(n, v)| (n.to_owned(), v.map(str::to_owned)));
        assert_eq!(found, Ok(expected.to_vec()));
    }

    #[test]
    fn headers_that_are_no_object_are_refused() {
        for json in ["[1]", "\"x\"", "null", "1"] {
            let error = headers(json).expect_err(json);
            assert!(error.contains("not a JSON object"), "{error}");
        }
    }

    #[test]
    fn a_row_cannot_forge_a_mapped_header() {
        let mapped = || column("created", b"column");
        for json in [
            &b"{\"created\": \"row\", \"x\": \"1\"}"[..],
            b"{\"created\": \"\xff\", \"x\": \"1\"}",
        ] {
            let mut found = vec![mapped()];
            assert_eq!(read_headers(json, &mut found), Ok(1));
            assert_eq!((found.len(), &found[0]), (2, &mapped()));
        }
    }

    #[test]
    fn bytes_of_no_encoding_pass_as_they_are() {
        let mut found = vec![column("event_id", b"1")];
        let forged = read_headers(
            b"{\"a\": \"x\xff\xe9\", \"event_id\": \"\xe9\"}",
            &mut found,
        );
        assert_eq!(forged, Ok(1));
        assert_eq!(found[1].value.as_deref(), Some(&b"x\xff\xe9"[..]));
    }

    #[test]
    fn a_row_cannot_forge_the_dedupe_key() {
        let mut found = vec![column("event_id", b"1")];
        let forged = read_headers(br#"{"event_id": "x", "traceparent": "y"}"#, &mut found);
        assert_eq!((forged, found.len()), (Ok(1), 2));
    }
}
