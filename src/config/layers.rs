//! The three places that a setting comes from, in order: flag, environment, file.

use std::collections::HashMap;
use std::io::{IsTerminal, Read};
use std::path::{Path, PathBuf};

use crate::error::Failure;

/// What the process finds around itself. An argument, so that tests can make one up.
#[derive(Clone, Debug, Default)]
pub struct Surroundings {
    pub env: HashMap<String, String>,
    /// The effective user's name.
    pub os_user: Option<String>,
    /// The directory where a local server would have its socket, if there is one.
    pub socket_dir: Option<String>,
    /// Is stderr a terminal?
    pub terminal: bool,
}

/// A value and where it was found: messages name the place that the operator has to edit.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Given {
    pub value: String,
    pub origin: String,
}

/// Every key of the file; some are [`TABLES`].
const KEYS: [&str; 24] = [
    "brokers",
    "columns",
    "create_topics",
    "database_url",
    "deadline",
    "headers",
    "http",
    "in_flight_bytes",
    "kafka",
    "kafka_token_command",
    "lock_timeout",
    "log",
    "on_gap",
    "on_poison",
    "publication",
    "retention",
    "shutdown_timeout",
    "slot",
    "stall_timeout",
    "table",
    "timestamp",
    "topic",
    "topic_grace",
    "topics",
];
/// Settings that are names: a bare number there is a slip.
const NAMES: [&str; 7] = [
    "brokers",
    "database_url",
    "kafka_token_command",
    "publication",
    "slot",
    "table",
    "topic",
];
/// No configuration is larger.
const FILE_BYTES_MAX: u64 = 1 << 20;
const TABLES: [&str; 4] = ["columns", "headers", "kafka", "topics"];

pub(super) struct Layers<'a> {
    around: &'a Surroundings,
    file: Option<File>,
}

struct File {
    path: PathBuf,
    settings: HashMap<&'static str, String>,
    tables: HashMap<&'static str, Vec<(String, String)>>,
}

impl Surroundings {
    /// The real ones.
    #[must_use]
    pub fn of_process() -> Self {
        let env: HashMap<String, String> = std::env::vars_os()
            .map(|(name, value)| {
                let text = |os: std::ffi::OsString| os.to_string_lossy().into_owned();
                (text(name), text(value))
            })
            .collect();
        // The password database before $USER, as libpq does: runuser and su keep $USER.
        let os_user = name_of_uid(rustix::process::geteuid().as_raw())
            .or_else(|| env.get("USER").filter(|user| !user.is_empty()).cloned());
        Surroundings {
            os_user,
            env,
            socket_dir: ["/var/run/postgresql", "/tmp"]
                .into_iter()
                .find(|dir| Path::new(dir).is_dir())
                .map(str::to_owned),
            terminal: std::io::stderr().is_terminal(),
        }
    }

    /// Where the user's own files are.
    pub(super) fn home(&self) -> Option<&Path> {
        self.pg_variable("HOME").map(Path::new)
    }

    /// A variable that is set and not empty (libpq takes an empty one for unset).
    pub(super) fn pg_variable(&self, name: &str) -> Option<&str> {
        self.env
            .get(name)
            .map(String::as_str)
            .filter(|value| !value.is_empty())
    }
}

fn name_of_uid(uid: u32) -> Option<String> {
    let passwd = std::fs::read_to_string("/etc/passwd").ok()?;
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)?.parse() == Ok(uid)).then(|| name.to_owned())
    })
}

impl Given {
    pub fn default_of(key: &str, value: &str) -> Self {
        Given {
            value: value.to_owned(),
            origin: format!("default of {key}"),
        }
    }

    /// A usage failure that shows the value: not for secrets.
    pub fn wrong(&self, what: &str, remedy: &str) -> Failure {
        Failure::usage(format!("{}: {:?} {what}", self.origin, self.value), remedy)
    }
}

impl<'a> Layers<'a> {
    /// Reads the file that `--config` or `WALRELAY_CONFIG` names, if any.
    pub fn read(around: &'a Surroundings, flag: Option<&Path>) -> Result<Self, Failure> {
        let path = flag.map(Path::to_path_buf).or_else(|| {
            let value = around.env.get("WALRELAY_CONFIG")?;
            Some(PathBuf::from(value))
        });
        check_variables(around)?;
        let file = match path {
            None => None,
            Some(path) => {
                let text = read_bounded(&path).map_err(|error| {
                    Failure::usage(
                        format!("--config: cannot read {}: {error}", path.display()),
                        "name a TOML file that this user can read",
                    )
                })?;
                Some(File::parse(path, &text)?)
            }
        };
        Ok(Layers { around, file })
    }

    /// The value of `key` from the first place that has one.
    pub fn get(&self, key: &'static str, flag: Option<String>) -> Result<Option<Given>, Failure> {
        assert!(KEYS.contains(&key), "{key} is not in the list of keys");
        let variable = variable_of(key);
        let given = if let Some(value) = flag {
            Given {
                value,
                origin: flag_of(key),
            }
        } else if let Some(value) = self.around.env.get(&variable) {
            Given {
                value: value.clone(),
                origin: variable,
            }
        } else if let Some(file) = &self.file
            && let Some(value) = file.settings.get(key)
        {
            Given {
                value: value.clone(),
                origin: format!("{key} in {}", file.path.display()),
            }
        } else {
            return Ok(None);
        };
        not_empty(given).map(Some)
    }

    /// What the environment holds under any name.
    pub fn variable(&self, name: &str) -> Option<String> {
        self.around.env.get(name).cloned()
    }

    /// A value that only a flag may give.
    pub fn flag_only(&self, key: &'static str, value: String) -> Result<Option<String>, Failure> {
        not_empty(Given {
            value,
            origin: flag_of(key),
        })
        .map(|given| Some(given.value))
    }

    /// The pairs of `key`: the file's, then the environment's (one `KEY=VALUE` a line), then the
    /// flags'; the later one wins.
    pub fn pairs(
        &self,
        key: &'static str,
        flag: &str,
        flags: &[String],
    ) -> Result<Vec<(String, String)>, Failure> {
        let mut pairs: Vec<(String, String)> = Vec::new();
        if let Some(file) = &self.file {
            pairs.extend(file.tables.get(key).cloned().unwrap_or_default());
        }
        let variable = variable_of(key);
        if let Some(lines) = self.around.env.get(&variable) {
            let lines = lines.lines().filter(|line| !line.trim().is_empty());
            lay_over(&mut pairs, &variable, lines)?;
        }
        lay_over(&mut pairs, flag, flags.iter().map(String::as_str))?;
        Ok(pairs)
    }
}

fn flag_of(key: &str) -> String {
    format!("--{}", key.replace('_', "-"))
}

/// A variable that is nearly one of ours is a slip. Others are not ours to judge: Kubernetes makes
/// `WALRELAY_PORT` and the like for a service of that name.
fn check_variables(around: &Surroundings) -> Result<(), Failure> {
    let ours: Vec<String> = KEYS.into_iter().map(variable_of).collect();
    let written = around
        .env
        .keys()
        .filter(|name| name.starts_with("WALRELAY_"));
    for name in written {
        let nearest = ours.iter().find(|own| strsim::osa_distance(own, name) == 1);
        if let Some(own) = nearest.filter(|_| !ours.contains(name)) {
            return Err(Failure::usage(
                format!("there is no variable {name}"),
                format!("did you mean {own}?"),
            ));
        }
    }
    Ok(())
}

fn variable_of(key: &str) -> String {
    format!("WALRELAY_{}", key.to_ascii_uppercase())
}

/// An empty value is a template that was not filled in; taking the default instead could send
/// events elsewhere.
fn not_empty(given: Given) -> Result<Given, Failure> {
    if given.value.trim().is_empty() {
        return Err(Failure::usage(
            format!("{} is empty", given.origin),
            "give it a value, or leave it out",
        ));
    }
    Ok(given)
}

/// The same key twice in one layer is a slip; in two layers it is the rule.
fn lay_over<'l>(
    pairs: &mut Vec<(String, String)>,
    origin: &str,
    layer: impl Iterator<Item = &'l str>,
) -> Result<(), Failure> {
    let mut seen: Vec<&str> = Vec::new();
    for pair in layer {
        let (name, value) = match pair.split_once('=') {
            Some((name, value)) if !name.trim().is_empty() => (name.trim(), value),
            // Not shown: what was to be a value may be a password.
            _ => {
                return Err(Failure::usage(
                    format!("{origin}: a pair has no name before an ="),
                    format!("write {origin} NAME=VALUE"),
                ));
            }
        };
        if seen.contains(&name) {
            return Err(Failure::usage(
                format!("{origin}: {name} is given twice"),
                "give it once",
            ));
        }
        seen.push(name);
        put(pairs, name, value);
    }
    Ok(())
}

/// A file of settings, not whatever the path happens to lead to.
fn read_bounded(path: &Path) -> std::io::Result<String> {
    let mut text = String::new();
    let file = std::fs::File::open(path)?;
    file.take(FILE_BYTES_MAX + 1).read_to_string(&mut text)?;
    if text.len() as u64 > FILE_BYTES_MAX {
        return Err(std::io::Error::other("it is larger than 1 MiB"));
    }
    Ok(text)
}

fn put(pairs: &mut Vec<(String, String)>, name: &str, value: &str) {
    match pairs.iter_mut().find(|(known, _)| known == name) {
        Some(pair) => value.clone_into(&mut pair.1),
        None => pairs.push((name.to_owned(), value.to_owned())),
    }
}

impl File {
    fn parse(path: PathBuf, text: &str) -> Result<Self, Failure> {
        let table: toml::Table = text.parse().map_err(|error: toml::de::Error| {
            let line = error
                .span()
                .and_then(|span| text.get(..span.start))
                .map_or(1, |before| before.matches('\n').count() + 1);
            Failure::usage(
                format!("{}:{line}: not TOML: {}", path.display(), error.message()),
                "put the line right; text values stand in quotes",
            )
        })?;
        let mut file = File {
            path,
            settings: HashMap::new(),
            tables: HashMap::new(),
        };
        for (written, value) in table {
            file.take(&written, &value)?;
        }
        Ok(file)
    }

    fn take(&mut self, written: &str, value: &toml::Value) -> Result<(), Failure> {
        let folded = written.replace('-', "_");
        let Some(key) = KEYS.into_iter().find(|key| *key == folded) else {
            return Err(self.unknown(written, &folded));
        };
        if self.settings.contains_key(key) || self.tables.contains_key(key) {
            return Err(Failure::usage(
                format!("{}: {key} is given twice", self.path.display()),
                "give it once",
            ));
        }
        if TABLES.contains(&key) {
            let toml::Value::Table(table) = value else {
                return Err(self.mistyped(key, value, "a table", &format!("write [{key}]")));
            };
            let mut pairs = Vec::new();
            self.flatten(key, "", table, &mut pairs)?;
            self.tables.insert(key, pairs);
            return Ok(());
        }
        let text = match value {
            toml::Value::String(text) => text.clone(),
            // A number, where one is (a count) or where the missing unit is the better complaint.
            toml::Value::Integer(number) if !NAMES.contains(&key) => number.to_string(),
            _ => return Err(self.mistyped(key, value, "text", &format!("write {key} = \"…\""))),
        };
        self.settings.insert(key, text);
        Ok(())
    }

    /// `security.protocol = "SSL"` without quotes is a table in a table to TOML, and a property to
    /// whoever wrote it.
    fn flatten(
        &self,
        key: &str,
        prefix: &str,
        table: &toml::Table,
        pairs: &mut Vec<(String, String)>,
    ) -> Result<(), Failure> {
        for (name, value) in table {
            let name = if prefix.is_empty() {
                name.clone()
            } else {
                format!("{prefix}.{name}")
            };
            if let toml::Value::Table(inner) = value {
                self.flatten(key, &name, inner, pairs)?;
            } else if pairs.iter().any(|(known, _)| *known == name) {
                return Err(Failure::usage(
                    format!("{}: {key}: {name} is given twice", self.path.display()),
                    "give it once (with quotes or without, it is the same name)",
                ));
            } else if let Some(text) = scalar(value) {
                put(pairs, &name, &text);
            } else {
                let full = format!("{key}.{name}");
                return Err(self.mistyped(&full, value, "text", "write it in quotes"));
            }
        }
        Ok(())
    }

    fn unknown(&self, written: &str, folded: &str) -> Failure {
        let nearest = KEYS
            .into_iter()
            .map(|key| (strsim::jaro_winkler(key, folded), key))
            .max_by(|a, b| a.0.total_cmp(&b.0))
            .filter(|(likeness, _)| *likeness > 0.7);
        let remedy = match nearest {
            Some((_, key)) => format!("did you mean {key}?"),
            None => format!("the keys are {}", KEYS.join(", ")),
        };
        Failure::usage(
            format!("{}: unknown key {written}", self.path.display()),
            remedy,
        )
    }

    fn mistyped(&self, key: &str, value: &toml::Value, want: &str, remedy: &str) -> Failure {
        Failure::usage(
            format!(
                "{}: {key} is {} {}, not {want}",
                self.path.display(),
                if matches!(value.type_str(), "array" | "integer") {
                    "an"
                } else {
                    "a"
                },
                value.type_str()
            ),
            remedy,
        )
    }
}

/// A number or a boolean is taken as its text, which the setting's own parser then judges (a
/// duration of `10` has no unit, a property of `true` is fine).
fn scalar(value: &toml::Value) -> Option<String> {
    match value {
        toml::Value::String(text) => Some(text.clone()),
        toml::Value::Integer(number) => Some(number.to_string()),
        toml::Value::Float(number) => Some(number.to_string()),
        toml::Value::Boolean(truth) => Some(truth.to_string()),
        toml::Value::Datetime(_) | toml::Value::Array(_) | toml::Value::Table(_) => None,
    }
}
