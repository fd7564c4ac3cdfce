//! The walls of the house, checked on the sources: who may import whom, and what the rooms where
//! events can be lost or reordered must not know about.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

const LINES_MAX: usize = 900;

/// The files with `unsafe` code: librdkafka's wake-ups and its questions have no safe door.
const UNSAFE_FILES: [&str; 2] = ["src/io/kafka/native.rs", "src/io/kafka/native/admin.rs"];

/// What each room may name with `crate::`, itself apart.
fn may_import(room: &str) -> Option<&'static [&'static str]> {
    let allowed: &[&str] = match room {
        "lsn" => &[],
        "record" => &["lsn"],
        "tail" => &[],
        "dead_letter" => &["record", "lsn"],
        "error" => &["record", "lsn"],
        "fault" => &[],
        "finding" => &["error"],
        "gap" => &["lsn"],
        "wire" => &["lsn"],
        "relay" => &[
            "wire",
            "record",
            "tail",
            "dead_letter",
            "gap",
            "lsn",
            "error",
        ],
        "io" => &[
            "wire",
            "record",
            "tail",
            "dead_letter",
            "lsn",
            "config",
            "error",
            "fault",
            "finding",
            "gap",
        ],
        // How a topic is spelt and which columns make a record is parsed once, at the door.
        "config" => &[
            "cli",
            "dead_letter",
            "error",
            "gap",
            "lsn",
            "record",
            "relay::mapping",
            "relay::route",
        ],
        "cli" => &["config", "error"],
        "telemetry" => &["config", "dead_letter", "error", "finding", "lsn", "record"],
        "commands" => &[
            "io",
            "config",
            "dead_letter",
            "error",
            "finding",
            "lsn",
            "record",
            "telemetry",
        ],
        // It shows the very relay that `run` runs, in one process with the broker it shows it on.
        "commands/demo" => &["io", "config", "error", "service"],
        // Its relay is the one that `run` runs, with an end.
        "commands/drain" => &["io", "config", "error", "lsn", "service"],
        // The only file that sees both relay and io.
        "service" => &[
            "relay",
            "io",
            "wire",
            "record",
            "tail",
            "dead_letter",
            "lsn",
            "config",
            "error",
            "fault",
            "finding",
            "gap",
            "telemetry",
        ],
        "main" | "lib" => &[
            "cli",
            "commands",
            "config",
            "dead_letter",
            "error",
            "fault",
            "finding",
            "gap",
            "io",
            "lsn",
            "record",
            "relay",
            "service",
            "tail",
            "telemetry",
            "wire",
        ],
        _ => return None,
    };
    Some(allowed)
}

/// Words that the pure rooms must not contain: runtimes, clocks, chance, logs, metrics, sockets.
const IMPURE: [&str; 11] = [
    "tokio",
    "tokio_postgres",
    "rdkafka",
    "tracing",
    "prometheus",
    "rand",
    "Instant",
    "SystemTime",
    "TcpStream",
    "UnixStream",
    "fs",
];

const PURE_ROOMS: [&str; 3] = ["wire", "relay", "tail"];

#[test]
fn rooms_import_only_what_they_may() {
    expect_none(sources("src"), |path, code| bad_imports(&room(path), code));
}

#[test]
fn decisions_know_no_clock_no_runtime_no_log() {
    let pure = sources("src")
        .into_iter()
        .filter(|(path, _)| PURE_ROOMS.contains(&room(path).as_str()));
    expect_none(pure, |_, code| impure_words(code));
}

#[test]
fn no_file_is_longer_than_the_limit() {
    let all = ["src", "tests", "benches"].into_iter().flat_map(texts);
    expect_none(all, |_, text| too_long(text));
}

#[test]
fn nothing_is_left_unfinished_or_unwrapped() {
    let all = ["src", "tests", "benches"].into_iter().flat_map(sources);
    expect_none(all, |_, code| loose_ends(code));
}

#[test]
fn unsafe_code_stays_in_its_files() {
    let others = sources("src")
        .into_iter()
        .filter(|(path, _)| !UNSAFE_FILES.contains(&path.as_str()));
    expect_none(others, |_, code| unsafe_blocks(code));
}

fn expect_none(
    files: impl IntoIterator<Item = (String, String)>,
    rule: impl Fn(&str, &str) -> Vec<String>,
) {
    let mut complaints = Vec::new();
    let mut looked_at = 0;
    for (path, text) in files {
        looked_at += 1;
        complaints.extend(rule(&path, &text).iter().map(|c| format!("{path}: {c}")));
    }
    assert!(looked_at > 0, "the rule looked at no file");
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
}

// --- The rules, on text.

fn bad_imports(room: &str, code: &str) -> Vec<String> {
    let Some(allowed) = may_import(room) else {
        return vec![format!("the room {room} has no row in may_import")];
    };
    imports(code)
        .into_iter()
        .filter(|import| {
            let top = import.split("::").next().expect("a split has a first part");
            top != room
                && !allowed
                    .iter()
                    .any(|a| *a == top || import == a || import.starts_with(&format!("{a}::")))
        })
        .map(|import| format!("{room} must not import crate::{import}"))
        .collect()
}

fn impure_words(code: &str) -> Vec<String> {
    words(code)
        .into_iter()
        .filter(|word| IMPURE.contains(&word.as_str()))
        .map(|word| format!("{word} has no place in a pure room"))
        .collect()
}

fn too_long(text: &str) -> Vec<String> {
    let lines = text.lines().count();
    if lines <= LINES_MAX {
        return Vec::new();
    }
    vec![format!("{lines} lines, the limit is {LINES_MAX}")]
}

fn loose_ends(code: &str) -> Vec<String> {
    let packed: String = code.chars().filter(|c| !c.is_whitespace()).collect();
    [".unwrap()", "todo!(", "unimplemented!(", "dbg!("]
        .into_iter()
        .filter(|end| packed.contains(end))
        .map(|end| format!("{end} is left in it"))
        .collect()
}

fn unsafe_blocks(code: &str) -> Vec<String> {
    words(code)
        .into_iter()
        .filter(|word| word == "unsafe")
        .map(|_| "unsafe code".to_owned())
        .collect()
}

/// Every path after `crate::`, with the groups in braces opened: `crate::{a, b::{c, d}}` gives
/// `a`, `b::c` and `b::d`.
fn imports(code: &str) -> BTreeSet<String> {
    let packed: String = code
        .chars()
        .map(|c| if c.is_whitespace() { ' ' } else { c })
        .collect();
    let mut found = BTreeSet::new();
    for (at, _) in packed.match_indices("crate") {
        let before = packed[..at].chars().next_back();
        if before.is_some_and(|c| c.is_alphanumeric() || c == '_') {
            continue;
        }
        let rest = packed[at + "crate".len()..].trim_start();
        if let Some(rest) = rest.strip_prefix("::") {
            open(rest, "", &mut found);
        }
    }
    found
}

/// Reads one path or group at the start of `text`; what is left behind it.
fn open<'a>(text: &'a str, prefix: &str, found: &mut BTreeSet<String>) -> &'a str {
    let text = text.trim_start();
    if let Some(mut rest) = text.strip_prefix('{') {
        loop {
            rest = rest.trim_start();
            if let Some(after) = rest.strip_prefix('}') {
                return after;
            }
            if rest.is_empty() {
                return rest;
            }
            rest = open(rest, prefix, found);
            rest = rest.trim_start();
            // Past " as name," to the next of the group.
            let next = rest.find([',', '}']).unwrap_or(rest.len());
            rest = rest[next..].strip_prefix(',').unwrap_or(&rest[next..]);
        }
    }
    let end = text
        .find(|c: char| !(c.is_alphanumeric() || c == '_'))
        .unwrap_or(text.len());
    let (word, rest) = text.split_at(end);
    let path = if prefix.is_empty() {
        word.to_owned()
    } else {
        format!("{prefix}::{word}")
    };
    match rest.trim_start().strip_prefix("::") {
        Some(deeper) => open(deeper, &path, found),
        None => {
            let path = path.trim_end_matches(':').to_owned();
            if !path.is_empty() {
                found.insert(path);
            }
            rest
        }
    }
}

fn words(code: &str) -> Vec<String> {
    code.split(|c: char| !(c.is_alphanumeric() || c == '_'))
        .filter(|word| !word.is_empty())
        .map(str::to_owned)
        .collect()
}

/// The code alone: comments, strings and characters blanked out, lines kept.
fn code_only(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = String::with_capacity(text.len());
    let mut at = 0;
    while at < bytes.len() {
        let rest = &text[at..];
        let skip = comment(rest)
            .or_else(|| raw_string(rest, &out))
            .or_else(|| quoted(rest))
            .unwrap_or(0);
        if skip > 0 {
            out.push(' ');
            out.extend(rest[..skip].chars().filter(|c| *c == '\n'));
            at += skip;
        } else {
            let c = rest.chars().next().expect("not at the end");
            out.push(c);
            at += c.len_utf8();
        }
    }
    out
}

fn comment(rest: &str) -> Option<usize> {
    if rest.starts_with("//") {
        return Some(rest.find('\n').unwrap_or(rest.len()));
    }
    if !rest.starts_with("/*") {
        return None;
    }
    let mut depth = 0;
    let mut at = 0;
    while at < rest.len() {
        if rest[at..].starts_with("/*") {
            depth += 1;
            at += 2;
        } else if rest[at..].starts_with("*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return Some(at);
            }
        } else {
            at += rest[at..].chars().next().map_or(1, char::len_utf8);
        }
    }
    Some(rest.len())
}

fn raw_string(rest: &str, before: &str) -> Option<usize> {
    if before
        .chars()
        .next_back()
        .is_some_and(|c| c.is_alphanumeric() || c == '_')
        && !before.ends_with('b')
    {
        return None;
    }
    let body = rest.strip_prefix('r')?;
    let hashes = body.len() - body.trim_start_matches('#').len();
    let body = body[hashes..].strip_prefix('"')?;
    let close = format!("\"{}", "#".repeat(hashes));
    let end = body.find(&close).map_or(body.len(), |i| i + close.len());
    Some(1 + hashes + 1 + end)
}

/// A string, or a character; a lifetime is neither.
fn quoted(rest: &str) -> Option<usize> {
    let quote = rest.chars().next().filter(|c| *c == '"' || *c == '\'')?;
    if quote == '\'' {
        let mut chars = rest[1..].chars();
        let (first, second) = (chars.next()?, chars.next());
        if first != '\\' && second != Some('\'') {
            return None;
        }
    }
    let mut escaped = false;
    for (at, c) in rest.char_indices().skip(1) {
        if escaped {
            escaped = false;
        } else if c == '\\' {
            escaped = true;
        } else if c == quote {
            return Some(at + c.len_utf8());
        }
    }
    Some(rest.len())
}

// --- The files.

/// `src/relay/ledger.rs` and `src/relay.rs` are both of the room `relay`; the demo has one of its own.
fn room(path: &str) -> String {
    let inside = path.strip_prefix("src/").unwrap_or(path);
    if inside == "commands/demo.rs" || inside.starts_with("commands/demo/") {
        return "commands/demo".to_owned();
    }
    if inside == "commands/drain.rs" {
        return "commands/drain".to_owned();
    }
    let first = inside.split('/').next().expect("a split has a first part");
    first.trim_end_matches(".rs").to_owned()
}

fn sources(top: &str) -> Vec<(String, String)> {
    texts(top)
        .into_iter()
        .map(|(path, text)| (path, code_only(&text)))
        .collect()
}

fn texts(top: &str) -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    walk(&root.join(top), &mut files);
    files
        .into_iter()
        .map(|path| {
            let text = fs::read_to_string(&path).expect("a source file is UTF-8");
            let name = path.strip_prefix(root).expect("found below the root");
            (name.to_string_lossy().into_owned(), text)
        })
        .collect()
}

fn walk(dir: &Path, files: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(dir) else {
        return;
    };
    for entry in entries {
        let path = entry.expect("a readable directory").path();
        if path.is_dir() {
            walk(&path, files);
        } else if path.extension().is_some_and(|e| e == "rs") {
            files.push(path);
        }
    }
}

// --- Each rule can fail.

#[test]
fn a_wrong_import_is_seen_however_it_is_spelt() {
    for wrong in [
        "use crate::io::slot::Slot;",
        "use crate::{lsn::Lsn, io};",
        "use crate::{\n    lsn::{Lsn, Xid},\n    io::{slot as s, kafka},\n};",
        "fn f() -> crate :: io::Slot { x }",
        "pub(crate) use crate::io;",
    ] {
        let complaints = bad_imports("relay", &code_only(wrong));
        assert!(!complaints.is_empty(), "{wrong}");
        assert!(complaints[0].contains("crate::io"), "{complaints:?}");
    }
    let right = "use crate::{lsn::{Lsn, Xid as X}, record}; // crate::io\nlet s = \"crate::io\";";
    assert_eq!(bad_imports("relay", &code_only(right)), [""; 0]);
    assert!(!bad_imports("io", "use crate::relay::ledger::Ledger;").is_empty());
    assert!(!bad_imports("wire", "use crate::record::Record;").is_empty());
    assert!(!bad_imports("attic", "").is_empty());
    assert!(!bad_imports("commands", "use crate::service::run;").is_empty());
    assert!(
        bad_imports(
            &room("src/commands/demo/shop.rs"),
            "use crate::service::run;"
        )
        .is_empty()
    );
    assert!(bad_imports("config", "use crate::relay::route::Template;").is_empty());
    assert!(!bad_imports("config", "use crate::relay::ledger::Ledger;").is_empty());
    assert!(!bad_imports("config", "use crate::relay;").is_empty());
}

#[test]
fn clocks_and_runtimes_are_seen_in_code_and_not_in_comments() {
    assert_eq!(impure_words("use std::time::Instant;").len(), 1);
    assert_eq!(impure_words("tokio::spawn(x); tracing::info!(y)").len(), 2);
    let talk = code_only("/// No tokio here.\nlet a = r#\"Instant \"now\" \"#; let b = 'r';");
    assert!(impure_words(&talk).is_empty(), "{talk}");
    let code = code_only("fn f<'a>(x: &'a str) { let q = '\"'; Instant::now() }");
    assert_eq!(impure_words(&code).len(), 1, "{code}");
}

#[test]
fn loose_ends_and_long_files_are_seen() {
    assert_eq!(loose_ends("x\n    .unwrap()").len(), 1);
    assert_eq!(loose_ends("todo!()").len(), 1);
    assert!(loose_ends("x.unwrap_or_default()").is_empty());
    assert_eq!(unsafe_blocks("unsafe { f() }").len(), 1);
    assert!(unsafe_blocks(&code_only("// unsafe\n#![deny(unsafe_code)]")).is_empty());
    assert!(too_long(&"x\n".repeat(LINES_MAX)).is_empty());
    assert_eq!(too_long(&"x\n".repeat(LINES_MAX + 1)).len(), 1);
}
