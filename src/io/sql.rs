//! Names and texts as SQL wants them. Parameters are better; commands that take none need these.

use crate::config::TableName;

/// An identifier in double quotes. Always quoted: which words are reserved differs by version.
#[must_use]
pub fn quote_ident(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// A text in single quotes. Right whatever `standard_conforming_strings` says: a backslash makes it
/// an escape string.
#[must_use]
pub fn quote_literal(text: &str) -> String {
    let quoted = text.replace('\'', "''");
    if quoted.contains('\\') {
        format!("E'{}'", quoted.replace('\\', "\\\\"))
    } else {
        format!("'{quoted}'")
    }
}

/// A table's name for a statement.
#[must_use]
pub fn quote_table(table: &TableName) -> String {
    format!(
        "{}.{}",
        quote_ident(&table.schema),
        quote_ident(&table.name)
    )
}

/// A name for a person: quoted only where it must be.
#[must_use]
pub fn show_ident(name: &str) -> String {
    let plain = name.starts_with(|c: char| c.is_ascii_lowercase() || c == '_')
        && name
            .chars()
            .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
    if plain {
        name.to_owned()
    } else {
        quote_ident(name)
    }
}

/// A table's name for a person.
#[must_use]
pub fn show_table(table: &TableName) -> String {
    format!("{}.{}", show_ident(&table.schema), show_ident(&table.name))
}

/// The condition that a row is not visible in a snapshot; both are SQL texts. The index is over the
/// number: below the snapshot's xmin every row is visible.
#[must_use]
pub fn outside_of(xid: &str, snapshot: &str) -> String {
    format!(
        "({xid}::text::bigint) >= pg_catalog.pg_snapshot_xmin({snapshot})::text::bigint \
         and not pg_catalog.pg_visible_in_snapshot({xid}, {snapshot})"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_quotes_and_dots_stays_one_name() {
        assert_eq!(quote_ident("Out\"box"), "\"Out\"\"box\"");
        let table = TableName {
            schema: "a.b".into(),
            name: "Out box".into(),
        };
        assert_eq!(quote_table(&table), "\"a.b\".\"Out box\"");
        assert_eq!(show_table(&table), "\"a.b\".\"Out box\"");
    }

    #[test]
    fn a_literal_cannot_end_early() {
        assert_eq!(quote_literal("it's"), "'it''s'");
        assert_eq!(quote_literal("a\\'b"), "E'a\\\\''b'");
    }

    #[test]
    fn a_plain_name_is_shown_plain() {
        assert_eq!(show_ident("outbox_2"), "outbox_2");
        assert_eq!(show_ident("2outbox"), "\"2outbox\"");
        assert_eq!(show_ident(""), "\"\"");
    }
}
