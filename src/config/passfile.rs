//! The password file: `host:port:database:user:password`, one a line.
//!
//! Source: the Postgres manual, "The Password File".

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use super::Host;

/// Directories that a server's socket is in when nobody says otherwise: in the file such a host is
/// `localhost`.
const SOCKET_DIRS: [&str; 3] = ["/var/run/postgresql", "/run/postgresql", "/tmp"];

/// Why a password file that is there is not used, as a sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ignored(pub String);

/// The password of the first line that matches. Bytes, for it need not be UTF-8.
///
/// # Errors
/// The file can be read by others, or is no file, or cannot be read.
pub fn find(
    path: &Path,
    host: &Host,
    dbname: &str,
    user: &str,
) -> Result<Option<Vec<u8>>, Ignored> {
    let ignored = |why: &str| {
        Ignored(format!(
            "password file {} is ignored: {why}",
            path.display()
        ))
    };
    let Ok(metadata) = fs::metadata(path) else {
        return Ok(None);
    };
    if !metadata.is_file() {
        return Err(ignored("it is no plain file"));
    }
    if metadata.permissions().mode() & 0o077 != 0 {
        return Err(ignored(
            "group or others may read it; its mode must be 0600 or less (chmod 0600)",
        ));
    }
    let text = fs::read(path).map_err(|error| ignored(&error.to_string()))?;
    Ok(look_up(&text, host, dbname, user))
}

fn look_up(text: &[u8], host: &Host, dbname: &str, user: &str) -> Option<Vec<u8>> {
    let port = host.port.to_string();
    let mut names = vec![host.name.as_str()];
    if host.is_socket() && SOCKET_DIRS.contains(&host.name.as_str()) {
        names.push("localhost");
    }
    text.split(|byte| *byte == b'\n')
        .filter(|line| !line.starts_with(b"#"))
        .find_map(|line| {
            let line = line.strip_suffix(b"\r").unwrap_or(line);
            let rest = names.iter().find_map(|name| matching(line, name))?;
            let rest = matching(rest, &port)?;
            let rest = matching(rest, dbname)?;
            let rest = matching(rest, user)?;
            (!rest.is_empty()).then(|| unescaped(rest))
        })
}

/// What follows the first field and its colon, if the field is `wanted` or `*`.
fn matching<'a>(line: &'a [u8], wanted: &str) -> Option<&'a [u8]> {
    let mut at = 0;
    while *line.get(at)? != b':' {
        at += if line[at] == b'\\' { 2 } else { 1 };
    }
    let field = &line[..at];
    (field == b"*" || unescaped(field) == wanted.as_bytes()).then(|| &line[at + 1..])
}

/// `\:` and `\\` without their backslash.
fn unescaped(field: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field.iter();
    while let Some(byte) = rest.next() {
        match byte {
            b'\\' => bytes.extend(rest.next().copied()),
            byte => bytes.push(*byte),
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(name: &str, port: u16) -> Host {
        Host {
            name: name.to_owned(),
            address: None,
            port,
        }
    }

    fn found(text: &str, name: &str, port: u16) -> Option<String> {
        look_up(text.as_bytes(), &host(name, port), "app", "u")
            .map(|bytes| String::from_utf8(bytes).expect("the tests are UTF-8"))
    }

    /// Case C06.
    #[test]
    fn a_hard_password_needs_its_colon_escaped_and_nothing_else() {
        let line = "db:5432:app:u:p@ss\\:w/rd#1%?é \n";
        assert_eq!(found(line, "db", 5432).as_deref(), Some("p@ss:w/rd#1%?é "));
        assert_eq!(
            found("db:5432:app:u:a:b\\\\c\r\n", "db", 5432).as_deref(),
            Some("a:b\\c")
        );
    }

    #[test]
    fn the_first_line_that_matches_counts() {
        let text =
            "# db:1:app:u:comment\nother:*:*:*:no\ndb:2:*:*:two\n*:*:app:u:any\ndb:*:*:*:late";
        assert_eq!(found(text, "db", 1).as_deref(), Some("any"));
        assert_eq!(found(text, "db", 2).as_deref(), Some("two"));
        assert_eq!(found(text, "other", 9).as_deref(), Some("no"));
        assert_eq!(
            found("db:1:app:other:no\ndb:1:other:u:no\nshort:1\n", "db", 1),
            None
        );
    }

    #[test]
    fn a_usual_socket_is_localhost() {
        let text = "localhost:5432:app:u:here\n/srv/pg:5432:app:u:there";
        assert_eq!(
            found(text, "/var/run/postgresql", 5432).as_deref(),
            Some("here")
        );
        assert_eq!(found(text, "/srv/pg", 5432).as_deref(), Some("there"));
        assert_eq!(
            found("[\\:\\:1]:1:app:u:x\n\\:\\:1:1:app:u:six", "::1", 1).as_deref(),
            Some("six")
        );
    }

    /// Case C07.
    #[test]
    fn a_file_that_others_can_read_is_ignored_and_named() {
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        fs::write(file.path(), "*:*:*:*:secret").expect("it can be written");
        let set = |mode| {
            fs::set_permissions(file.path(), fs::Permissions::from_mode(mode)).expect("it is ours");
        };
        set(0o644);
        let Err(Ignored(why)) = find(file.path(), &host("h", 1), "d", "u") else {
            panic!("it is ignored");
        };
        assert!(
            why.contains("0600") && why.contains(&*file.path().to_string_lossy()),
            "{why}"
        );
        assert!(!why.contains("secret"));
        set(0o600);
        assert_eq!(
            find(file.path(), &host("h", 1), "d", "u"),
            Ok(Some(b"secret".to_vec()))
        );
        assert_eq!(
            find(Path::new("/no/such"), &host("h", 1), "d", "u"),
            Ok(None)
        );
        assert!(find(Path::new("/tmp"), &host("h", 1), "d", "u").is_err());
    }
}
