//! The files of `migrations/`, with the operator's names in them.

use crate::config::{Source, TableName};
use crate::io::sql::{quote_ident, quote_literal, quote_table, show_table};

const OUTBOX: &str = include_str!("../../../migrations/0001_outbox.sql");
const FUNCTIONS: &str = include_str!("../../../migrations/0002_functions.sql");
const WALRELAY: &str = include_str!("../../../migrations/0003_walrelay.sql");
const PUBLICATION: &str = include_str!("../../../migrations/0004_publication.sql");

/// The tables that [`walrelay`] makes.
pub const WALRELAY_TABLES: [&str; 4] = ["checkpoint", "dead_letter", "fence", "relay"];

/// The columns of the table that [`outbox`] makes.
pub const OUTBOX_COLUMNS: [&str; 9] = [
    "id",
    "event_id",
    "aggregate_type",
    "aggregate_id",
    "event_type",
    "payload",
    "headers",
    "created_at",
    "xid",
];

/// How the outbox is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    Plain,
    Partitioned,
}

pub fn outbox(table: &TableName) -> String {
    render(OUTBOX, table, None)
}

/// Makes both functions; where one is there already, Postgres says so.
pub fn functions(table: &TableName, layout: Layout) -> String {
    let sql = render(FUNCTIONS, table, None);
    match layout {
        Layout::Plain => sql,
        // There is no unique constraint on event_id alone; a statement that names one fails.
        Layout::Partitioned => sql.replacen(
            "on conflict (event_id) do nothing",
            "on conflict do nothing",
            1,
        ),
    }
}

pub fn walrelay() -> String {
    WALRELAY.to_owned()
}

pub fn publication(source: &Source) -> String {
    render(PUBLICATION, &source.table, Some(&source.publication))
}

/// The index that the table of ours has from the start, for one that came without.
pub fn index(table: &TableName) -> String {
    format!(
        "create index on {} using brin ((xid::text::bigint)) with (autosummarize = on);\n",
        quote_table(table)
    )
}

/// Commits to making a slot. Until the row describes the slot, every `init` begins with it anew.
pub fn intent(source: &Source, made_table: bool, existing: Option<&str>) -> String {
    let existing = existing.map_or("null".to_owned(), quote_literal);
    format!(
        "-- What is about to be made, so that a crash in between can be put right.\n\
         insert into walrelay.relay (table_oid, table_name, slot_name, publication, made_table, intent)\n\
         values ({}::regclass, {}, {}, {}, {made_table},\n  \
         jsonb_build_object('action', 'init', 'existing', {existing}::text, 'since', now()));\n",
        quote_literal(&quote_table(&source.table)),
        quote_literal(&show_table(&source.table)),
        quote_literal(&source.slot),
        quote_literal(&source.publication),
    )
}

/// The same where `walrelay drop` left the row: its dead letters and its generation stay.
pub fn intent_after_drop(source: &Source, existing: Option<&str>) -> String {
    let existing = existing.map_or("null".to_owned(), quote_literal);
    format!(
        "-- What is about to be made, so that a crash in between can be put right.\n\
         update walrelay.relay set table_name = {}, slot_name = {}, publication = {}, updated_at = now(),\n  \
         intent = jsonb_build_object('action', 'init', 'existing', {existing}::text, 'since', now())\n  \
         where table_oid = {}::regclass;\n",
        quote_literal(&show_table(&source.table)),
        quote_literal(&source.slot),
        quote_literal(&source.publication),
        quote_literal(&quote_table(&source.table)),
    )
}

/// Puts names in. Comments keep the default ones: a name with a line break would break out of them.
fn render(file: &str, table: &TableName, publication: Option<&str>) -> String {
    let schema = quote_ident(&table.schema);
    let table_quoted = quote_table(table);
    let mut out = String::with_capacity(file.len() + 256);
    for line in file.lines() {
        if line.trim_start().starts_with("--") {
            out.push_str(line);
        } else {
            out.push_str(&render_line(line, &schema, &table_quoted, publication));
        }
        out.push('\n');
    }
    // The body of a function ends at the next `$emit$`, were it part of a name.
    let names_hold_tag = table_quoted.contains("$emit$");
    if names_hold_tag {
        let mut tag = "$emit_$".to_owned();
        while table_quoted.contains(&tag) {
            tag.insert(tag.len() - 1, '_');
        }
        let (head, tail) = out.split_once("$emit$").unwrap_or((&out, ""));
        let (body, end) = tail.rsplit_once("$emit$").unwrap_or((tail, ""));
        return format!("{head}{tag}{body}{tag}{end}");
    }
    out
}

fn render_line(line: &str, schema: &str, table: &str, publication: Option<&str>) -> String {
    let mut out = String::with_capacity(line.len() + 64);
    let mut rest = line;
    while let Some(at) = rest.find("public.") {
        out.push_str(&rest[..at]);
        rest = &rest[at + "public.".len()..];
        let end = rest
            .find(|c: char| !c.is_ascii_alphanumeric() && c != '_')
            .unwrap_or(rest.len());
        if &rest[..end] == "outbox" {
            out.push_str(table);
        } else {
            out.push_str(schema);
            out.push('.');
            out.push_str(&rest[..end]);
        }
        rest = &rest[end..];
    }
    out.push_str(rest);
    match publication {
        Some(name) => out.replacen(
            "create publication walrelay ",
            &format!("create publication {} ", quote_ident(name)),
            1,
        ),
        None => out,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(schema: &str, name: &str) -> TableName {
        TableName {
            schema: schema.into(),
            name: name.into(),
        }
    }

    fn statements(sql: &str) -> String {
        sql.lines()
            .filter(|l| !l.trim_start().starts_with("--"))
            .collect::<Vec<_>>()
            .join("\n")
    }

    /// The server converts a statement to the database's encoding, comments included: LATIN1 has no
    /// ellipsis.
    #[test]
    fn the_files_are_ascii() {
        for file in [OUTBOX, FUNCTIONS, WALRELAY, PUBLICATION] {
            assert!(file.is_ascii());
        }
    }

    #[test]
    fn the_columns_are_those_of_the_file() {
        let body = OUTBOX
            .split_once("create table public.outbox (")
            .expect("it is there");
        let body = body.1.split_once("\n);").expect("it ends").0;
        let columns: Vec<&str> = body
            .lines()
            .filter_map(|line| line.split_whitespace().next())
            .collect();
        assert_eq!(columns, OUTBOX_COLUMNS);
    }

    #[test]
    fn every_name_is_replaced_and_quoted() {
        let odd = table("a.b", "Out \"box\"");
        let sql = statements(&outbox(&odd)) + &statements(&functions(&odd, Layout::Plain));
        assert!(!sql.contains("public."), "{sql}");
        assert!(sql.contains("create table \"a.b\".\"Out \"\"box\"\"\" ("));
        assert!(sql.contains("create function \"a.b\".outbox_emit("));
        assert!(sql.contains("insert into \"a.b\".\"Out \"\"box\"\"\" (event_id"));
    }

    #[test]
    fn a_partitioned_table_has_no_event_id_to_conflict_on() {
        let sql = statements(&functions(&table("s", "t"), Layout::Partitioned));
        assert!(sql.contains("on conflict do nothing"));
        assert!(!sql.contains("on conflict ("));
    }

    #[test]
    fn a_name_cannot_end_the_function_body() {
        let sql = statements(&functions(&table("s", "x$emit$y$emit_$"), Layout::Plain));
        assert_eq!(sql.matches("$emit__$").count(), 2, "{sql}");
    }

    #[test]
    fn a_publication_named_like_a_keyword_is_quoted() {
        let source_sql = render(PUBLICATION, &table("public", "outbox"), Some("All"));
        assert!(
            source_sql.contains("create publication \"All\" for table only \"public\".\"outbox\"")
        );
    }
}
