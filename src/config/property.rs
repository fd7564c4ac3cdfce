//! A property of the Kafka client as it was given: a name, and a value in which `${env:NAME}` and
//! `${file:PATH}` stand for what is there (Kafka's own spelling), so that no secret need stand on a
//! command line or in a file of settings.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::error::Failure;

/// No password and no certificate is larger.
const FILE_BYTES_MAX: u64 = 1 << 20;

#[derive(Clone, PartialEq, Eq)]
pub struct Property {
    pub name: String,
    parts: Vec<Part>,
}

#[derive(Clone, PartialEq, Eq)]
enum Part {
    Text(String),
    /// What the variable held when the process started.
    Variable(String),
    /// Read each time anew.
    File(PathBuf),
}

impl Property {
    /// `variable`: what the environment holds under a name.
    ///
    /// # Errors
    /// Usage: a reference that is not closed, a variable that is not set or empty. Never with the
    /// value.
    pub fn parse(
        name: String,
        text: &str,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, Failure> {
        let mut parts = Vec::new();
        let mut rest = text;
        while let Some(at) = ["${env:", "${file:"]
            .iter()
            .filter_map(|r| rest.find(r))
            .min()
        {
            let (before, reference) = rest.split_at(at);
            if !before.is_empty() {
                parts.push(Part::Text(before.to_owned()));
            }
            let Some((inside, after)) = reference["${".len()..].split_once('}') else {
                return Err(Failure::usage(
                    format!("the Kafka property {name}: a ${{ is not closed"),
                    "write ${env:NAME} or ${file:/path}",
                ));
            };
            parts.push(match inside.split_once(':') {
                Some(("env", variable_name)) => {
                    let value = variable(variable_name).filter(|value| !value.is_empty());
                    Part::Variable(value.ok_or_else(|| {
                        Failure::usage(
                            format!(
                                "the Kafka property {name}: the environment variable \
                                 {variable_name} is not set, or is empty"
                            ),
                            format!("set {variable_name}, or write ${{file:/path}}"),
                        )
                    })?)
                }
                Some((_, path)) => Part::File(PathBuf::from(path)),
                None => Part::Text(inside.to_owned()),
            });
            rest = after;
        }
        if !rest.is_empty() || parts.is_empty() {
            parts.push(Part::Text(rest.to_owned()));
        }
        Ok(Property { name, parts })
    }

    /// A value that stands there as it is.
    #[must_use]
    pub fn plain(name: &str, value: &str) -> Self {
        Property {
            name: name.to_owned(),
            parts: vec![Part::Text(value.to_owned())],
        }
    }

    /// Whoever keeps a value elsewhere does not want it to be seen.
    #[must_use]
    pub fn is_indirect(&self) -> bool {
        self.parts.iter().any(|part| !matches!(part, Part::Text(_)))
    }

    /// The value as it is now: files are read.
    ///
    /// # Errors
    /// Usage: a file that cannot be read, is empty, or larger than 1 MiB. Never with what is in it.
    pub fn read(&self) -> Result<String, Failure> {
        let mut value = String::new();
        for part in &self.parts {
            match part {
                Part::Text(text) | Part::Variable(text) => value.push_str(text),
                Part::File(path) => value.push_str(&read(path).map_err(|why| {
                    Failure::usage(
                        format!(
                            "the Kafka property {}: cannot read {}: {why}",
                            self.name,
                            path.display()
                        ),
                        "name a file that holds the value alone and that this user may read",
                    )
                })?),
            }
        }
        Ok(value)
    }
}

/// A file's content, without the newline that an editor ends it with.
fn read(path: &Path) -> Result<String, String> {
    let mut text = String::new();
    let file = File::open(path).map_err(|error| error.to_string())?;
    file.take(FILE_BYTES_MAX + 1)
        .read_to_string(&mut text)
        .map_err(|error| error.to_string())?;
    if text.len() as u64 > FILE_BYTES_MAX {
        return Err("it is larger than 1 MiB".to_owned());
    }
    if text.ends_with('\n') {
        text.pop();
        if text.ends_with('\r') {
            text.pop();
        }
    }
    if text.is_empty() {
        return Err("it is empty".to_owned());
    }
    Ok(text)
}

/// The name only: the value may be a password.
impl fmt::Debug for Property {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Exit;

    fn property(text: &str) -> Result<Property, Failure> {
        Property::parse("sasl.password".to_owned(), text, |name| match name {
            "PASSWORD" => Some("s3cr3t ${env:OTHER}".to_owned()),
            "EMPTY" => Some(String::new()),
            _ => None,
        })
    }

    fn value(text: &str) -> String {
        property(text).and_then(|p| p.read()).expect("right")
    }

    #[track_caller]
    fn refused(text: &str, words: &[&str]) {
        let failure = property(text).and_then(|p| p.read()).expect_err("wrong");
        assert_eq!(failure.exit, Exit::Usage);
        let said = failure.to_string();
        assert!(said.contains("sasl.password"), "{said}");
        for word in words {
            assert!(said.contains(word), "{word:?} is not in {said}");
        }
    }

    #[test]
    fn references_are_replaced_and_everything_else_stays() {
        for text in [
            "",
            "a=b c",
            "pa$$word",
            "${x}",
            "${vault:a}",
            "}{",
            "${",
            "$env:A",
        ] {
            assert_eq!(value(text), text);
            assert!(!property(text).expect("right").is_indirect());
        }
        // What a variable holds is a value, not another reference.
        assert_eq!(value("${env:PASSWORD}"), "s3cr3t ${env:OTHER}");
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), "from file\n").expect("written");
        let text = format!("<${{file:{}}}|${{env:PASSWORD}}>", file.path().display());
        assert_eq!(value(&text), "<from file|s3cr3t ${env:OTHER}>");
        let indirect = property(&text).expect("right");
        assert!(indirect.is_indirect());
        // Credentials are rotated under a running relay.
        std::fs::write(file.path(), "rotated\r\n").expect("written");
        assert_eq!(
            indirect.read().expect("right"),
            "<rotated|s3cr3t ${env:OTHER}>"
        );
        std::fs::write(file.path(), "two\nlines\n\n").expect("written");
        assert!(
            indirect
                .read()
                .expect("right")
                .starts_with("<two\nlines\n|")
        );
    }

    #[test]
    fn what_is_not_there_is_named() {
        refused("${env:MISSING}", &["MISSING", "not set"]);
        refused("${env:EMPTY}", &["EMPTY"]);
        refused("${file:/no/such/file}", &["/no/such/file", "cannot read"]);
        refused("${file:/dev/null}", &["it is empty"]);
        refused("${env:PASSWORD", &["not closed"]);
    }

    #[test]
    fn nothing_of_a_value_is_shown() {
        let property = property("hunter2${env:PASSWORD}").expect("right");
        assert_eq!(format!("{property:?}"), "sasl.password");
    }
}
