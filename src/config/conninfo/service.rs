//! A connection service: words in a file, under a name.
//!
//! Source: the Postgres manual, "The Connection Service File".

use std::fs;
use std::path::{Path, PathBuf};

use super::super::layers::Surroundings;
use super::words::{Found, Word, known_key};
use crate::error::Failure;

/// Where the system's file is, unless `PGSYSCONFDIR` says so.
const SYSTEM_DIRS: [&str; 2] = ["/etc/postgresql-common", "/etc/sysconfig/pgsql"];
const SYSTEM_FILE: &str = "pg_service.conf";
const USER_FILE: &str = ".pg_service.conf";

/// The words of `service`: from the file that was named, or else from the first of the usual ones
/// that has it.
pub fn read(
    service: &Found,
    file: Option<&Found>,
    around: &Surroundings,
) -> Result<Vec<Word>, Failure> {
    let mut files: Vec<PathBuf> = Vec::new();
    match file {
        Some(found) => files.push(PathBuf::from(&found.value)),
        None => files.extend(around.home().map(|home| home.join(USER_FILE))),
    }
    match around.pg_variable("PGSYSCONFDIR") {
        Some(dir) => files.push(Path::new(dir).join(SYSTEM_FILE)),
        None => files.extend(SYSTEM_DIRS.map(|dir| Path::new(dir).join(SYSTEM_FILE))),
    }
    for path in &files {
        let text = match fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) => {
                if let Some(found) = file.filter(|found| Path::new(&found.value) == path) {
                    return Err(found.wrong(
                        &format!("cannot be read: {error}"),
                        "name a service file that this user can read",
                    ));
                }
                continue;
            }
        };
        if let Some(words) = section(&text, &service.value, path)? {
            return Ok(words);
        }
    }
    let looked: Vec<String> = files.iter().map(|f| f.display().to_string()).collect();
    Err(service.wrong(
        "is a service that no file defines",
        &format!("add [{}] to one of: {}", service.value, looked.join(", ")),
    ))
}

fn section(text: &str, name: &str, path: &Path) -> Result<Option<Vec<Word>>, Failure> {
    let mut words: Option<Vec<Word>> = None;
    for (number, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if let Some(title) = line.strip_prefix('[') {
            if words.is_some() {
                break;
            }
            if title.strip_suffix(']') == Some(name) {
                words = Some(Vec::new());
            }
            continue;
        }
        let Some(words) = &mut words else { continue };
        let place = format!("{}:{}", path.display(), number + 1);
        words.push(word(line, &place)?);
    }
    Ok(words)
}

/// No blanks around the `=`, no quotes: the value is what stands there.
fn word(line: &str, place: &str) -> Result<Word, Failure> {
    if line.starts_with("ldap") {
        return Err(Failure::usage(
            format!("{place}: a service that is looked up in LDAP cannot be honoured"),
            "write its words into the file: host=…, port=…",
        ));
    }
    let Some((name, value)) = line.split_once('=') else {
        return Err(Failure::usage(
            format!("{place}: a line that has no ="),
            "write key=value, one a line",
        ));
    };
    let key = known_key(name, place)?;
    if key == "service" || key == "servicefile" {
        return Err(Failure::usage(
            format!("{place}: a service within a service"),
            "write the words themselves",
        ));
    }
    Ok(Word {
        key,
        value: value.to_owned(),
        place: format!("{key} in {place}"),
    })
}
