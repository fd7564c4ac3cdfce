//! Finds a Postgres server's binaries, and the account that may run them.

use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::{Exit, Failure};

const VERSIONS: std::ops::RangeInclusive<u32> = 15..=18;

/// Where packages put servers: a directory, what its entries begin with, what is below them.
const USUAL_PLACES: [(&str, &str); 5] = [
    ("/usr/lib/postgresql", ""),
    ("/usr", "pgsql-"),
    ("/usr/local", "pgsql"),
    ("/opt/homebrew/opt", "postgresql@"),
    ("/usr/local/opt", "postgresql@"),
];

/// Postgres refuses to run as root.
const ACCOUNTS: [&str; 2] = ["postgres", "nobody"];

/// A user and its group.
#[derive(Clone, Copy, Debug)]
pub struct Account {
    pub uid: u32,
    pub gid: u32,
}

#[derive(Debug)]
pub struct Binaries {
    dir: PathBuf,
    /// As `postgres --version` gives it: `18.1`.
    pub version: String,
    /// Who runs them, where it is not us.
    pub account: Option<Account>,
}

impl Binaries {
    /// Those in `pg_bin`; else the first on PATH, else the newest in the usual places.
    ///
    /// # Errors
    /// There are none that this user can run, or only of unsupported versions.
    pub fn find(pg_bin: Option<&Path>) -> Result<Self, Failure> {
        let account = account()?;
        if let Some(dir) = pg_bin {
            return look(dir, account).map_err(|why| {
                Failure::refused(
                    format!("--pg-bin: {why}"),
                    "name the directory that holds initdb and postgres, of Postgres 15 to 18, \
                     where any user can reach it",
                )
            });
        }
        let mut unusable = Vec::new();
        for dir in on_path() {
            match look(&dir, account) {
                Ok(found) => return Ok(found),
                Err(why) => unusable.push(why),
            }
        }
        let mut newest: Option<(u32, Binaries)> = None;
        for dir in usual_places() {
            match look(&dir, account) {
                Ok(found) => {
                    let major = major(&found.version).unwrap_or_default();
                    if newest.as_ref().is_none_or(|(known, _)| major > *known) {
                        newest = Some((major, found));
                    }
                }
                Err(why) => unusable.push(why),
            }
        }
        newest
            .map(|(_, found)| found)
            .ok_or_else(|| none(&unusable))
    }

    /// A command that runs one of them as the account, in a process group of its own: a Ctrl-C at
    /// the terminal is for us, and would take the server away before the relay has drained.
    pub fn command(&self, name: &str) -> Command {
        command(&self.dir, name, self.account)
    }
}

fn none(unusable: &[String]) -> Failure {
    let mut failure = Failure::refused(
        "no Postgres server of version 15 to 18 was found: not on PATH, and not in \
         /usr/lib/postgresql/*/bin, /usr/pgsql-*/bin, /usr/local/pgsql/bin or Homebrew's places",
        "install one (Debian: apt-get install postgresql), name its directory with --pg-bin, or \
         let `make demo` fetch one",
    );
    for why in unusable {
        failure = failure.because(why);
    }
    failure
}

fn command(dir: &Path, name: &str, account: Option<Account>) -> Command {
    let mut command = Command::new(dir.join(name));
    // Its own settings only; and a directory that the account can enter.
    command
        .current_dir("/")
        .env_remove("PGDATA")
        .env_remove("PGPORT")
        .process_group(0);
    if let Some(account) = account {
        command.uid(account.uid).gid(account.gid);
    }
    command
}

/// Binaries of a supported version that the account can run, or why they are not.
fn look(dir: &Path, account: Option<Account>) -> Result<Binaries, String> {
    // Relative to where the operator is, and not to where the command runs.
    let dir = std::path::absolute(dir).unwrap_or_else(|_| dir.to_path_buf());
    let mut version = String::new();
    for name in ["initdb", "postgres"] {
        let path = dir.join(name);
        let said = command(&dir, name, account).arg("--version").output();
        let said = said.map_err(|error| format!("cannot run {}: {error}", path.display()))?;
        let text = String::from_utf8_lossy(&said.stdout);
        if !said.status.success() {
            let words = String::from_utf8_lossy(&said.stderr);
            let words = words.lines().next().unwrap_or_default();
            return Err(format!("{} does not run: {words}", path.display()));
        }
        // "postgres (PostgreSQL) 15.14 (Debian 15.14-0+deb12u1)"
        let number = text
            .split_whitespace()
            .find(|word| word.starts_with(|c: char| c.is_ascii_digit()));
        version = number.unwrap_or_default().to_owned();
    }
    match major(&version) {
        Some(major) if VERSIONS.contains(&major) => Ok(Binaries {
            dir,
            version,
            account,
        }),
        Some(_) | None => Err(format!(
            "{} holds Postgres {version}, and {} to {} are supported",
            dir.display(),
            VERSIONS.start(),
            VERSIONS.end()
        )),
    }
}

/// The number before the first dot (or before `beta1`).
fn major(version: &str) -> Option<u32> {
    let end = version.find(|c: char| !c.is_ascii_digit());
    version[..end.unwrap_or(version.len())].parse().ok()
}

fn on_path() -> Vec<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .filter(|dir| has_server(dir))
        .collect()
}

fn usual_places() -> Vec<PathBuf> {
    let mut found = Vec::new();
    for (parent, prefix) in USUAL_PLACES {
        for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
            let name = entry.file_name();
            if name.to_string_lossy().starts_with(prefix) {
                found.push(entry.path().join("bin"));
            }
        }
    }
    found.retain(|dir| has_server(dir));
    found
}

fn has_server(dir: &Path) -> bool {
    ["initdb", "postgres"]
        .iter()
        .all(|name| dir.join(name).is_file())
}

/// Who runs the server: we do, unless we are root.
fn account() -> Result<Option<Account>, Failure> {
    if !rustix::process::geteuid().is_root() {
        return Ok(None);
    }
    let passwd = fs::read_to_string("/etc/passwd").unwrap_or_default();
    let found = ACCOUNTS.iter().find_map(|name| account_of(&passwd, name));
    found.map(Some).ok_or_else(|| {
        Failure::new(
            Exit::Refused,
            "Postgres does not run as root, and there is neither a user postgres nor a nobody",
            "run the demo as another user than root",
        )
    })
}

fn account_of(passwd: &str, name: &str) -> Option<Account> {
    let line = passwd
        .lines()
        .find(|line| line.split(':').next() == Some(name))?;
    let mut fields = line.split(':').skip(2);
    Some(Account {
        uid: fields.next()?.parse().ok()?,
        gid: fields.next()?.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_major_version_is_read_from_every_kind_of_version() {
        assert_eq!(major("15.14"), Some(15));
        assert_eq!(major("18beta1"), Some(18));
        assert_eq!(major(""), None);
    }

    #[test]
    fn an_account_is_found_by_its_whole_name() {
        let passwd = "root:x:0:0:::\npostgres2:x:7:7:::\npostgres:x:106:114:,,,:/var/lib:/bin/sh\n";
        let found = account_of(passwd, "postgres").expect("it is there");
        assert_eq!((found.uid, found.gid), (106, 114));
        assert!(account_of(passwd, "nobody").is_none());
    }

    #[test]
    fn a_directory_without_a_server_is_refused_with_its_name() {
        let failure = Binaries::find(Some(Path::new("/nowhere/bin"))).expect_err("nothing there");
        assert_eq!(failure.exit, Exit::Refused);
        assert!(
            failure.causes[0].contains("/nowhere/bin/initdb"),
            "{failure}"
        );
    }
}
