//! A slot and a publication that another table has: most often the table was swapped. Pure.

use crate::config::{Source, TableName};
use crate::finding::Finding;
use crate::io::catalog::Publication;
use crate::io::registry::Registered;
use crate::io::sql::{quote_ident, quote_literal, quote_table, show_ident, show_table};

/// Publications and slots follow the oid: whoever takes a table's name does not take its stream.
#[derive(Clone, Copy, Debug)]
pub struct Swap<'a> {
    /// The name that was asked for.
    pub table: &'a TableName,
    /// Who bears it now.
    pub table_oid: Option<u32>,
    /// Of the table that slot and publication belong to.
    pub old_oid: u32,
    /// What that one is called now; `None`: it was dropped.
    pub old: Option<&'a TableName>,
    pub slot: &'a str,
    pub publication: &'a str,
    /// Somebody put the new table into the old one's publication.
    pub is_published: bool,
}

impl Swap<'_> {
    /// Loses nothing that can be kept. To put the new table into the old one's publication would:
    /// the relay that runs confirms past its rows.
    #[must_use]
    pub fn remedy(&self) -> String {
        let Some(oid) = self.table_oid else {
            return self.without_a_new_one();
        };
        let table = on_a_command_line(self.table);
        let own = own_name(self.slot, Some(oid));
        let back = match self.old {
            Some(old) if self.is_published => format!(
                "alter publication {} set table only {}; then ",
                quote_ident(self.publication),
                quote_table(old)
            ),
            Some(_) | None => String::new(),
        };
        format!(
            "{back}leave the relay that runs alone; beside it relay the new table through names of \
             its own: walrelay init --table {table} --slot {own} --publication {own} --existing leave, \
             and walrelay run with the same three names (rows that it held before are in no stream: \
             delete and insert them again, with the same event_id); {}",
            self.old_one()
        )
    }

    /// What becomes of the old table's slot.
    fn old_one(&self) -> String {
        let drained = match self.old {
            Some(old) => {
                let names = format!(
                    "--table {} --slot {} --publication {}",
                    on_a_command_line(old),
                    self.slot,
                    for_shell(&show_ident(self.publication))
                );
                format!(
                    "the old one's (stopped: walrelay run {names}) may go when nothing is written to \
                     {} any more and walrelay status {names} shows undelivered rows: none",
                    show_table(old)
                )
            }
            None => "the old one's (once stopped it cannot be started again, what it had not \
                     delivered of the dropped table is then given up) may go when walrelay status \
                     shows a confirmed_flush lag of next to nothing, and no event in flight or held"
                .to_owned(),
        };
        format!("{drained}: stop it, {}", self.let_go())
    }

    fn without_a_new_one(&self) -> String {
        match self.old {
            Some(old) => format!(
                "it has another name now: use --table {}, or rename it back",
                on_a_command_line(old)
            ),
            None => format!(
                "what is not delivered of the dropped table only a relay that still runs can deliver: \
                 leave it running until walrelay status shows no event in flight or held; then {}; \
                 and walrelay init",
                self.let_go()
            ),
        }
    }

    fn let_go(&self) -> String {
        format!(
            "select pg_drop_replication_slot({}); drop publication if exists {}; delete from \
             walrelay.relay where table_oid = {}",
            quote_literal(self.slot),
            quote_ident(self.publication),
            self.old_oid
        )
    }
}

/// The slot or the publication belongs to another table's row.
#[must_use]
pub fn another_table(
    source: &Source,
    table_oid: Option<u32>,
    publication: Option<&Publication>,
    other: &Registered,
    name: Option<&TableName>,
) -> Finding {
    let is_published = publication
        .is_some_and(|publication| publication.tables.iter().any(|t| Some(t.oid) == table_oid));
    let swap = Swap {
        table: &source.table,
        table_oid,
        old_oid: other.table_oid,
        old: name,
        slot: &other.slot,
        publication: &other.publication,
        is_published,
    };
    let shown = show_table(&source.table);
    let owner = owner(other, name);
    let publication = show_ident(&other.publication);
    let (has_slot, has_publication) = (
        other.slot == source.slot,
        other.publication == source.publication,
    );
    if has_slot && has_publication && is_swapped(source, other, name) {
        let found = match table_oid {
            Some(oid) if is_published => format!(
                "{shown} is a new table (oid {oid}); slot {} and publication {publication} are those \
                 of {owner}",
                other.slot
            ),
            Some(oid) => format!(
                "{shown} is a new table (oid {oid}), not in publication {publication}; the published \
                 one is {owner}, through slot {}",
                other.slot
            ),
            None => format!(
                "there is no table {shown}; slot {} and publication {publication} are those of {owner}",
                other.slot
            ),
        };
        return Finding::failed("registry", found, swap.remedy());
    }
    let what = match (has_slot, has_publication) {
        (true, true) => format!(
            "slot {} and publication {publication} are those",
            other.slot
        ),
        (true, false) => format!("slot {} is that", other.slot),
        (false, _) => format!("publication {publication} is that"),
    };
    let own = own_name(&source.slot, table_oid);
    let mut remedy = format!(
        "give {shown} a slot and a publication of its own: --slot {own} --publication {own}"
    );
    if name.is_none() {
        remedy.push_str(&format!(
            "; or, to give up what is not delivered of the table that is gone: {}",
            swap.let_go()
        ));
    }
    Finding::failed("registry", format!("{what} of {owner}"), remedy)
}

/// Whether the table that is asked for took the place of the other one. Where that has its own name
/// still, this is a second table, and nothing of the other's may go.
fn is_swapped(source: &Source, other: &Registered, name: Option<&TableName>) -> bool {
    name.is_none_or(|name| {
        show_table(name) != other.table_name && show_table(&source.table) == other.table_name
    })
}

/// The new table has names of its own by now, and the old one has still these.
#[must_use]
pub fn still_held(
    source: &Source,
    other: &Registered,
    name: Option<&TableName>,
) -> Option<Finding> {
    if !is_swapped(source, other, name) {
        return None;
    }
    let swap = Swap {
        table: &source.table,
        table_oid: None,
        old_oid: other.table_oid,
        old: name,
        slot: &other.slot,
        publication: &other.publication,
        is_published: false,
    };
    let found = format!("slot {} is that of {}", other.slot, owner(other, name));
    Some(Finding::failed("registry", found, swap.old_one()))
}

fn owner(other: &Registered, name: Option<&TableName>) -> String {
    name.map_or_else(
        || format!("a table that is gone (oid {})", other.table_oid),
        |name| format!("{} (oid {})", show_table(name), other.table_oid),
    )
}

/// A name that is free, for slot and publication.
fn own_name(slot: &str, table_oid: Option<u32>) -> String {
    // A slot's name has 63 bytes at most, all of them ASCII.
    let stem: String = slot.chars().take(50).collect();
    match table_oid {
        Some(oid) => format!("{stem}_{oid}"),
        None => format!("{stem}_2"),
    }
}

fn on_a_command_line(table: &TableName) -> String {
    for_shell(&show_table(table))
}

/// One word of a command line.
#[must_use]
pub fn for_shell(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.');
    if text.chars().all(is_plain) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', "'\\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(name: &str) -> TableName {
        TableName {
            schema: "public".into(),
            name: name.into(),
        }
    }

    #[test]
    fn the_new_table_is_never_put_into_the_stream_of_the_old_one() {
        let (new, old) = (name("outbox"), name("Old 'un"));
        let swap = Swap {
            table: &new,
            table_oid: Some(9),
            old_oid: 7,
            old: Some(&old),
            slot: "s",
            publication: "All",
            is_published: false,
        };
        let remedy = swap.remedy();
        assert!(!remedy.contains("alter publication"), "{remedy}");
        assert!(
            remedy.contains("walrelay init --table public.outbox --slot s_9 --publication s_9")
        );
        assert!(remedy.contains(
            "walrelay run --table 'public.\"Old '\\''un\"' --slot s --publication '\"All\"'"
        ));
        assert!(remedy.find("walrelay run --table") < remedy.find("pg_drop_replication_slot"));
        let undone = Swap {
            is_published: true,
            ..swap
        };
        let back = "alter publication \"All\" set table only \"public\".\"Old 'un\"; then ";
        assert_eq!(undone.remedy(), format!("{back}{remedy}"));
        let dropped = Swap { old: None, ..swap }.remedy();
        assert!(!dropped.contains("walrelay run --table"), "{dropped}");
        assert!(dropped.contains("cannot be started again"));
    }

    #[test]
    fn a_name_of_its_own_is_a_slot_s_name() {
        assert_eq!(own_name(&"a".repeat(63), Some(u32::MAX)).len(), 61);
        assert_eq!(own_name("walrelay", None), "walrelay_2");
    }
}
