//! Where a record goes: the topic's name from a template over columns, the partition from the key.
//!
//! # Invariants
//! A topic's name is never repaired: an illegal one is an error, for a replacement character would
//! merge two topics. The partition is the Java client's for the same key and count.

use std::collections::HashMap;
use std::fmt;

/// A topic name with `{column}` in it, e.g. `outbox.event.{aggregate_type}`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template {
    text: String,
    parts: Vec<Part>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Literal(String),
    Column(String),
}

/// Why a text is no template.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    #[error("the topic template is empty")]
    Empty,
    #[error("the topic template {0:?} has an opening brace without a closing one")]
    Unclosed(String),
    #[error("the topic template {0:?} has a closing brace without an opening one")]
    Unopened(String),
    #[error("the topic template {0:?} has empty braces: write a column's name between them")]
    NoColumn(String),
    #[error("{1:?} in the topic template {0:?} is not legal in a topic's name")]
    IllegalCharacter(String, char),
}

/// Where nothing else is said.
pub const TOPIC_DEFAULT: &str = "outbox.event.{aggregate_type}";

impl Default for Template {
    fn default() -> Self {
        Template::parse(TOPIC_DEFAULT).expect("a test parses it")
    }
}

impl Template {
    /// # Errors
    /// Unbalanced braces, an empty column name, a character that no topic name may have.
    pub fn parse(text: &str) -> Result<Self, TemplateError> {
        if text.is_empty() {
            return Err(TemplateError::Empty);
        }
        let mut parts = Vec::new();
        let mut rest = text;
        while !rest.is_empty() {
            let open = rest.find('{').unwrap_or(rest.len());
            if open > 0 {
                parts.push(literal(text, &rest[..open])?);
            }
            if open == rest.len() {
                break;
            }
            let (column, after) = braced(&rest[open + 1..])
                .ok_or_else(|| TemplateError::Unclosed(text.to_owned()))?;
            if column.is_empty() {
                return Err(TemplateError::NoColumn(text.to_owned()));
            }
            parts.push(Part::Column(column));
            rest = after;
        }
        Ok(Template {
            text: text.to_owned(),
            parts,
        })
    }

    /// The columns that the template needs, in the order of their use.
    pub fn columns(&self) -> impl Iterator<Item = &str> {
        self.parts.iter().filter_map(|part| match part {
            Part::Literal(_) => None,
            Part::Column(name) => Some(name.as_str()),
        })
    }

    /// The same template over other names.
    ///
    /// # Errors
    /// What `name` says of one.
    pub fn over<E>(self, mut name: impl FnMut(&str) -> Result<String, E>) -> Result<Self, E> {
        let parts = self.parts.into_iter().map(|part| match part {
            Part::Literal(text) => Ok(Part::Literal(text)),
            Part::Column(column) => name(&column).map(Part::Column),
        });
        Ok(Template {
            parts: parts.collect::<Result<_, E>>()?,
            text: self.text,
        })
    }

    /// Writes the topic's name for these column values (in the order of [`Template::columns`]).
    /// `exceptions` replace what the template gives, legal or not.
    ///
    /// # Errors
    /// The name would be illegal; the error quotes it and the rule.
    pub fn render<'a>(
        &self,
        mut values: impl Iterator<Item = Option<&'a [u8]>>,
        exceptions: &HashMap<String, String>,
        topic: &mut String,
    ) -> Result<(), IllegalTopic> {
        topic.clear();
        for part in &self.parts {
            match part {
                Part::Literal(text) => topic.push_str(text),
                Part::Column(name) => match values.next().flatten() {
                    Some(value) => topic.push_str(&String::from_utf8_lossy(value)),
                    None => return Err(IllegalTopic::NullColumn(name.clone())),
                },
            }
        }
        if !exceptions.is_empty()
            && let Some(meant) = exceptions.get(topic.as_str())
        {
            meant.clone_into(topic);
        }
        check_topic(topic)
    }
}

/// The name up to the closing brace, and what follows. In double quotes, as in SQL, it may hold
/// braces.
fn braced(text: &str) -> Option<(String, &str)> {
    if let Some(quoted) = text.strip_prefix('"') {
        let (name, after) = quoted_name(quoted)?;
        return Some((name, after.strip_prefix('}')?));
    }
    let (name, after) = text.split_once('}')?;
    Some((name.to_owned(), after))
}

/// The identifier up to its closing quote (a doubled one is a quote in the name), and what follows.
#[must_use]
pub fn quoted_name(text: &str) -> Option<(String, &str)> {
    let mut name = String::new();
    let mut rest = text;
    loop {
        let (before, after) = rest.split_once('"')?;
        name.push_str(before);
        match after.strip_prefix('"') {
            Some(next) => {
                name.push('"');
                rest = next;
            }
            None => return Some((name, after)),
        }
    }
}

/// # Errors
/// No broker takes a topic of this name; the error quotes it and the rule.
pub fn check_topic(topic: &str) -> Result<(), IllegalTopic> {
    if is_legal_topic(topic) {
        Ok(())
    } else {
        Err(IllegalTopic::Name(topic.to_owned()))
    }
}

impl fmt::Display for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

fn literal(whole: &str, part: &str) -> Result<Part, TemplateError> {
    if part.contains('}') {
        return Err(TemplateError::Unopened(whole.to_owned()));
    }
    match part.chars().find(|c| !is_topic_char(*c)) {
        Some(c) => Err(TemplateError::IllegalCharacter(whole.to_owned(), c)),
        None => Ok(Part::Literal(part.to_owned())),
    }
}

/// A topic name that no broker would take.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IllegalTopic {
    #[error(
        "{0:?} is not a legal topic name: ASCII letters, digits, '.', '_' and '-', at most 249, not \".\" or \"..\""
    )]
    Name(String),
    #[error("the topic template needs column {0:?}, which is null in this row")]
    NullColumn(String),
}

/// Kafka's limit on the length of a topic name, in characters.
const TOPIC_LENGTH_MAX: usize = 249;

fn is_topic_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-')
}

fn is_legal_topic(topic: &str) -> bool {
    !topic.is_empty()
        && topic.len() <= TOPIC_LENGTH_MAX
        && topic != "."
        && topic != ".."
        && topic.bytes().all(|byte| is_topic_char(char::from(byte)))
}

/// A row that asks for a partition which its topic does not have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it asks for partition {asked}, and topic {topic} has {partitions} (0 to {})", partitions - 1)]
pub struct NoPartition {
    pub asked: i64,
    pub topic: String,
    pub partitions: i32,
}

/// The partition that the row asks for, else the key's.
///
/// # Errors
/// The topic has none of that number.
pub fn choose(
    asked: Option<i64>,
    key: &[u8],
    topic: &str,
    partitions: i32,
) -> Result<i32, NoPartition> {
    let Some(asked) = asked else {
        return Ok(partition(key, partitions));
    };
    i32::try_from(asked)
        .ok()
        .filter(|asked| (0..partitions).contains(asked))
        .ok_or_else(|| NoPartition {
            asked,
            topic: topic.to_owned(),
            partitions,
        })
}

/// The Java client's partition for a key: `(murmur2(key) & 0x7fffffff) % partitions`.
#[must_use]
pub fn partition(key: &[u8], partitions: i32) -> i32 {
    let positive = murmur2(key) & 0x7fff_ffff;
    let count = u32::try_from(partitions.max(1)).expect("at least one");
    i32::try_from(positive % count).expect("below an i32")
}

/// `MurmurHash2`, 32 bits, with the seed of Kafka's Java client.
#[must_use]
pub fn murmur2(data: &[u8]) -> u32 {
    const SEED: u32 = 0x9747_b28c;
    const M: u32 = 0x5bd1_e995;
    const R: u32 = 24;
    let length = u32::try_from(data.len()).unwrap_or(u32::MAX);
    let mut h = SEED ^ length;
    let mut chunks = data.chunks_exact(4);
    for chunk in &mut chunks {
        let mut k = u32::from_le_bytes(chunk.try_into().expect("chunks of four"));
        k = k.wrapping_mul(M);
        k ^= k >> R;
        k = k.wrapping_mul(M);
        h = h.wrapping_mul(M) ^ k;
    }
    let tail = chunks.remainder();
    for (i, byte) in tail.iter().enumerate() {
        h ^= u32::from(*byte) << (8 * i);
    }
    if !tail.is_empty() {
        h = h.wrapping_mul(M);
    }
    h ^= h >> 13;
    h = h.wrapping_mul(M);
    h ^ (h >> 15)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rendered(template: &str, value: &str) -> Result<String, IllegalTopic> {
        let template = Template::parse(template).expect("a template");
        let mut topic = String::new();
        template.render(
            [Some(value.as_bytes())].into_iter(),
            &HashMap::new(),
            &mut topic,
        )?;
        Ok(topic)
    }

    #[test]
    fn illegal_names_are_refused_and_never_repaired() {
        let default = "outbox.event.{aggregate_type}";
        assert!(rendered(default, "a b/c").is_err());
        assert!(rendered(default, "né").is_err());
        assert!(rendered(default, &"a".repeat(237)).is_err());
        assert_eq!(
            rendered(default, &"a".repeat(236)).map(|t| t.len()),
            Ok(249)
        );
        assert_eq!(rendered(default, ".").as_deref(), Ok("outbox.event.."));
        for name in [".", "..", ""] {
            assert!(rendered("{aggregate_type}", name).is_err());
        }
    }

    #[test]
    fn templates_say_what_is_wrong_with_them() {
        for bad in ["", "a.{b", "a.b}", "a.{}", "a b"] {
            assert!(Template::parse(bad).is_err(), "{bad:?}");
        }
        let two = Template::parse("{a}.{b}-x").expect("a template");
        assert_eq!(two.columns().collect::<Vec<_>>(), ["a", "b"]);
    }

    #[test]
    fn a_column_of_any_name_fits_into_braces() {
        let columns = |text| {
            let template = Template::parse(text).expect("a template");
            template.columns().map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(columns("{Agg Type}.{é日本}"), ["Agg Type", "é日本"]);
        assert_eq!(columns(r#"a.{"}x""{"}-{b}"#), ["}x\"{", "b"]);
        for bad in [r#"{"a}"#, r#"{"a"b}"#, r#"{""}"#] {
            assert!(Template::parse(bad).is_err(), "{bad}");
        }
        assert_eq!(Template::default().columns().count(), 1);
    }

    #[test]
    fn exceptions_come_before_the_rule_of_names() {
        let exceptions = HashMap::from([("e.a b".to_owned(), "spaced".to_owned())]);
        let template = Template::parse("e.{x}").expect("a template");
        let mut topic = String::new();
        let mut name = |value: &str| {
            template.render(
                [Some(value.as_bytes())].into_iter(),
                &exceptions,
                &mut topic,
            )?;
            Ok(topic.clone())
        };
        assert_eq!(name("a b"), Ok("spaced".to_owned()));
        assert_eq!(name("ab"), Ok("e.ab".to_owned()));
        let error: IllegalTopic = name("a c").expect_err("illegal");
        assert_eq!(error, IllegalTopic::Name("e.a c".to_owned()));
    }

    #[test]
    fn a_partition_that_is_asked_for_must_be_there() {
        assert_eq!(choose(Some(0), b"k", "t", 3), Ok(0));
        assert_eq!(choose(Some(2), b"k", "t", 3), Ok(2));
        assert_eq!(choose(None, b"order-1", "t", 6), Ok(4));
        for asked in [-1, 3, i64::MAX, i64::MIN] {
            let error = choose(Some(asked), b"k", "t", 3).expect_err("no such partition");
            let text = error.to_string();
            assert!(
                text.contains(&asked.to_string()) && text.contains("has 3 (0 to 2)"),
                "{text}"
            );
        }
    }

    #[test]
    fn known_keys_land_where_java_puts_them() {
        assert_eq!(partition(b"order-1", 6), 4);
        assert_eq!(partition(b"order-1", 12), 10);
        assert_eq!(partition(b"order-2", 12), 3);
        assert_eq!(partition(b"", 6), 3);
        assert_eq!(partition("a\tb\n\"q\" \u{1F600}é".as_bytes(), 6), 0);
        assert_eq!(partition(b"-5", 6), 3);
    }
}
