//! Whether a table can be an outbox, and whether a publication carries it and nothing else. Pure.

use super::{Needed, Use};
use crate::config::{Part, Source, TableName};
use crate::finding::Finding;
use crate::io::catalog::{Column, Publication, Published, Table};
use crate::io::sql::{quote_ident, quote_table, show_ident, show_table};

/// Columns missing, generated, or of a type that cannot be a payload; and relations that have no
/// stream.
#[must_use]
pub fn table_needs(name: &TableName, table: &Table, columns: &[Needed<'_>]) -> Vec<Finding> {
    let shown = show_table(name);
    if !matches!(table.kind, 'r' | 'p') {
        return vec![Finding::failed(
            "table",
            format!("{shown} is no table: views and foreign tables have no stream"),
            "name the table itself with --table",
        )];
    }
    let mut needs = Vec::new();
    if table.persistence != 'p' {
        needs.push(Finding::failed(
            "table",
            format!("table {shown} is unlogged or temporary: it is in no write-ahead log"),
            format!("alter table {} set logged", quote_table(name)),
        ));
    }
    needs.extend(column_needs(name, table, columns));
    needs
}

/// Columns that are missing, all in one need, and those that will not do.
#[must_use]
pub fn column_needs(name: &TableName, table: &Table, columns: &[Needed<'_>]) -> Vec<Finding> {
    let shown = show_table(name);
    let mut needs: Vec<Finding> = Vec::new();
    let mut missing: Vec<Needed<'_>> = Vec::new();
    for needed in columns {
        match table.columns.iter().find(|c| c.name == needed.name) {
            None if missing.iter().any(|m| m.name == needed.name) => {}
            None => missing.push(*needed),
            Some(column) => {
                let need = column_need(&shown, column, needed.used_as);
                needs.extend(need.filter(|need| !needs.contains(need)));
            }
        }
    }
    if !missing.is_empty() {
        needs.push(missing_need(&shown, table, &missing));
    }
    needs
}

fn missing_need(shown: &str, table: &Table, missing: &[Needed<'_>]) -> Finding {
    let names: Vec<String> = missing.iter().map(|m| show_ident(m.name)).collect();
    let steps: Vec<String> = missing.iter().map(|m| way_out(table, m)).collect();
    let has: Vec<String> = table.columns.iter().map(|c| show_ident(&c.name)).collect();
    Finding::failed(
        "columns",
        format!("table {shown} lacks the columns: {}", names.join(", ")),
        format!(
            "say which columns they are: {}; the table has {}; or add them \
             (migrations/0001_outbox.sql shows their types), or name another table with --table",
            steps.join(", "),
            has.join(", ")
        ),
    )
}

/// How one missing column is mapped, or left out.
fn way_out(table: &Table, missing: &Needed<'_>) -> String {
    let near = nearest(table, missing.name);
    let (column, meant) = match near {
        Some(near) => (show_ident(near), " (did you mean that one?)"),
        None => ("COLUMN".to_owned(), ""),
    };
    match missing.used_as {
        Use::Part(part) => {
            let none = if part.is_required() {
                String::new()
            } else {
                format!(" (--column {}= if there is none)", part.name())
            };
            format!("--column {}={column}{meant}{none}", part.name())
        }
        Use::Topic => format!("{{{column}}}{meant} in --topic"),
        Use::Header => format!("--header NAME={column}{meant}"),
    }
}

/// The column that a slip of the pen, or another idea of upper case, leads to.
fn nearest<'a>(table: &'a Table, name: &str) -> Option<&'a str> {
    let plain = |name: &str| -> String {
        let letters = name.chars().filter(|c| c.is_alphanumeric());
        letters.flat_map(char::to_lowercase).collect()
    };
    let wanted = plain(name);
    table
        .columns
        .iter()
        .map(|c| {
            (
                strsim::osa_distance(&plain(&c.name), &wanted),
                c.name.as_str(),
            )
        })
        .filter(|(distance, _)| *distance <= 1 + wanted.chars().count() / 8)
        .min()
        .map(|(_, name)| name)
}

fn column_need(table: &str, column: &Column, used_as: Use) -> Option<Finding> {
    let name = show_ident(&column.name);
    if column.generated {
        return Some(Finding::failed(
            format!("column {name}"),
            format!(
                "column {name} of {table} is generated; Postgres 17 and older do not publish it"
            ),
            format!("make {name} an ordinary column that the writer fills"),
        ));
    }
    let (part, accepted): (_, &[&str]) = match used_as {
        Use::Part(Part::Payload) => (
            "payload",
            &["json", "jsonb", "text", "bytea", "character varying"],
        ),
        Use::Part(Part::Headers) => (
            "column of headers",
            &["json", "jsonb", "text", "character varying"],
        ),
        Use::Part(Part::Timestamp) => (
            "timestamp",
            &[
                "timestamp with time zone",
                "timestamp without time zone",
                "date",
                "bigint",
            ],
        ),
        Use::Part(Part::Partition) => ("partition", &["bigint", "integer", "smallint"]),
        Use::Part(_) | Use::Topic | Use::Header => return None,
    };
    if accepted.contains(&column.base_type.as_str()) {
        return None;
    }
    let what = if column.type_name == column.base_type {
        column.type_name.clone()
    } else {
        format!("{} ({})", column.type_name, column.base_type)
    };
    let remedy = match used_as {
        Use::Part(Part::Timestamp) => {
            "name a column with --column timestamp= that is timestamptz, timestamp (taken as UTC), \
             date, or bigint (milliseconds since 1970)"
        }
        Use::Part(Part::Headers) => {
            "name a column with --column headers= that is json, jsonb or text and holds an object, \
             or none (--column headers=)"
        }
        Use::Part(Part::Partition) => "name a column of whole numbers with --column partition=",
        _ => "make the payload json, jsonb, text or bytea",
    };
    Some(Finding::failed(
        format!("column {name}"),
        format!("column {name} of {table} is of type {what}, which is no {part}"),
        remedy,
    ))
}

/// Children that inherit, and rows that may move between partitions.
#[must_use]
pub fn kin(name: &TableName, table: &Table) -> Vec<Finding> {
    let shown = show_table(name);
    let mut findings = Vec::new();
    if !table.children.is_empty() {
        findings.push(Finding::warning(
            "inheritance",
            format!(
                "rows of {} are not published: they inherit from {shown}, and only its own rows are",
                table.children.join(", ")
            ),
            format!("write events into {shown} itself"),
        ));
    }
    if !table.movers.is_empty() {
        findings.push(Finding::ok(
            "partition key",
            format!(
                "{} may update it: a row that an UPDATE moves to another partition is published again",
                table.movers.join(", ")
            ),
        ));
    }
    findings
}

/// A publication that is missing, covers something else or publishes something else.
#[must_use]
pub fn publication_needs(
    source: &Source,
    table: &Table,
    publication: Option<&Publication>,
) -> Vec<Finding> {
    let shown = show_ident(&source.publication);
    let quoted = quote_ident(&source.publication);
    let Some(publication) = publication else {
        return vec![Finding::failed(
            "publication",
            format!("publication {shown} does not exist in this database"),
            "run `walrelay init`, or name yours with --publication. If it was dropped under a \
             slot: what was written since then is in no stream",
        )];
    };
    let whole_cluster = publication.all_tables || !publication.schemas.is_empty();
    if whole_cluster {
        let what = if publication.all_tables {
            "all tables".to_owned()
        } else {
            format!("whole schemas ({})", publication.schemas.join(", "))
        };
        return vec![Finding::failed(
            "publication",
            format!("publication {shown} covers {what}; it must cover the outbox and nothing else"),
            format!(
                "use one of its own: --publication, with `create publication … for table only {} \
                 with (publish = 'insert', publish_via_partition_root = true)`",
                quote_table(&source.table)
            ),
        )];
    }
    let mut needs = coverage_needs(source, table, publication);
    let mut settings = Vec::new();
    if publication.publish != ["insert"] {
        settings.push("publish = 'insert'");
    }
    if !publication.via_partition_root && table.kind == 'p' {
        settings.push("publish_via_partition_root = true");
    }
    if !settings.is_empty() {
        let root = if publication.via_partition_root {
            ""
        } else {
            ", not via the partition root"
        };
        needs.push(Finding::failed(
            "publication",
            format!(
                "publication {shown} publishes {}{root}",
                publication.publish.join(", ")
            ),
            format!("alter publication {quoted} set ({})", settings.join(", ")),
        ));
    }
    needs
}

fn coverage_needs(source: &Source, table: &Table, publication: &Publication) -> Vec<Finding> {
    let shown = show_ident(&source.publication);
    let quoted = quote_ident(&source.publication);
    let outbox = quote_table(&source.table);
    let mut needs = Vec::new();
    let others: Vec<&Published> = publication
        .tables
        .iter()
        .filter(|t| t.oid != table.oid)
        .collect();
    let ours = publication.tables.iter().find(|t| t.oid == table.oid);
    match ours {
        None => needs.push(Finding::failed("publication", 
            format!(
                "publication {shown} does not cover {} (oid {}); it covers {}",
                show_table(&source.table),
                table.oid,
                list(&others)
            ),
            format!(
                "alter publication {quoted} set table only {outbox}; rows written before are in no stream"
            ),
        )),
        Some(ours) if ours.row_filter || ours.column_list => {
            let what = match (ours.row_filter, ours.column_list) {
                (true, true) => "a row filter and a column list",
                (true, false) => "a row filter",
                (false, _) => "a column list",
            };
            needs.push(Finding::failed("publication", 
                format!("publication {shown} has {what}: rows or columns of the outbox are left out"),
                format!("alter publication {quoted} set table only {outbox}"),
            ));
        }
        Some(_) => {}
    }
    if ours.is_some() && !others.is_empty() {
        needs.push(Finding::failed(
            "publication",
            format!(
                "publication {shown} covers {} beside {}",
                list(&others),
                show_table(&source.table)
            ),
            format!("alter publication {quoted} set table only {outbox}"),
        ));
    }
    needs
}

fn list(tables: &[&Published]) -> String {
    if tables.is_empty() {
        return "no table".to_owned();
    }
    let names: Vec<String> = tables.iter().map(|t| show_table(&t.name)).collect();
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Mapping;
    use crate::io::preflight::needed;

    fn source() -> Source {
        Source::sample("Pub")
    }

    fn table(kind: char) -> Table {
        let column = |name: &str, type_name: &str| Column {
            name: name.into(),
            type_name: type_name.into(),
            base_type: type_name.into(),
            generated: false,
        };
        Table {
            oid: 7,
            kind,
            persistence: 'p',
            owner: "u".into(),
            owned: true,
            children: Vec::new(),
            movers: Vec::new(),
            columns: vec![
                column("event_id", "uuid"),
                column("aggregate_type", "text"),
                column("aggregate_id", "text"),
                column("event_type", "text"),
                column("payload", "jsonb"),
                column("headers", "jsonb"),
            ],
        }
    }

    fn published(oid: u32, name: &str) -> Published {
        Published {
            oid,
            name: TableName {
                schema: "public".into(),
                name: name.into(),
            },
            row_filter: false,
            column_list: false,
        }
    }

    fn publication() -> Publication {
        Publication {
            all_tables: false,
            publish: vec!["insert".into()],
            via_partition_root: true,
            tables: vec![published(7, "outbox")],
            schemas: Vec::new(),
        }
    }

    fn needs_of(table: &Table, publication: &Publication) -> Vec<Finding> {
        publication_needs(&source(), table, Some(publication))
    }

    #[test]
    fn our_own_layout_needs_nothing() {
        let name = source().table;
        assert_eq!(
            table_needs(&name, &table('r'), &needed(&Mapping::default())),
            []
        );
        assert_eq!(needs_of(&table('p'), &publication()), []);
    }

    #[test]
    fn every_unfit_column_is_named_at_once() {
        let mut unfit = table('r');
        unfit.columns.retain(|c| c.name != "event_id");
        for column in &mut unfit.columns {
            match column.name.as_str() {
                "aggregate_id" => column.generated = true,
                "payload" => column.base_type = "integer".into(),
                _ => {}
            }
        }
        let needs = table_needs(&source().table, &unfit, &needed(&Mapping::default()));
        let causes: Vec<&str> = needs.iter().map(|n| n.found.as_str()).collect();
        assert!(
            causes
                .iter()
                .any(|c| c.contains("column aggregate_id") && c.contains("generated"))
        );
        assert!(
            causes
                .iter()
                .any(|c| c.contains("column payload") && c.contains("integer"))
        );
        assert!(
            causes
                .iter()
                .any(|c| c.ends_with("lacks the columns: event_id"))
        );
        assert_eq!(needs.len(), 3);
    }

    #[test]
    fn a_second_table_in_the_publication_is_named_with_the_statement_that_takes_it_out() {
        let mut two = publication();
        two.tables.push(published(8, "Other"));
        let needs = needs_of(&table('r'), &two);
        assert_eq!(needs.len(), 1);
        assert!(
            needs[0]
                .found
                .contains("public.\"Other\" beside public.outbox")
        );
        assert_eq!(
            needs[0].remedy.as_deref(),
            Some("alter publication \"Pub\" set table only \"public\".\"outbox\"")
        );
    }

    #[test]
    fn a_filter_and_a_column_list_leave_things_out() {
        let mut filtered = publication();
        filtered.tables[0].row_filter = true;
        filtered.tables[0].column_list = true;
        let needs = needs_of(&table('r'), &filtered);
        assert!(needs[0].found.contains("a row filter and a column list"));
    }

    #[test]
    fn updates_and_leaves_of_a_partitioned_table_are_switched_off_in_one_statement() {
        let mut loud = publication();
        loud.publish.push("update".into());
        loud.via_partition_root = false;
        assert_eq!(
            needs_of(&table('p'), &loud)[0].remedy.as_deref(),
            Some(
                "alter publication \"Pub\" set (publish = 'insert', publish_via_partition_root = true)"
            )
        );
        loud.publish.pop();
        assert_eq!(needs_of(&table('r'), &loud), []);
    }
}
