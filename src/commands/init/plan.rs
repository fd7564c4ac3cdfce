//! From what is there to what is to be done, or why not. Pure.

use super::migrations::{self, Layout};
use super::survey::{Rows, Seen, WalrelaySchema};
use crate::config::{Existing, Mapping, Source};
use crate::error::Failure;
use crate::finding::{self, Finding, State};
use crate::io::catalog::Table;
use crate::io::preflight::{self, SlotSeen};
use crate::io::registry::{Dropped, Registered, SlotState};
use crate::io::sql::{quote_ident, quote_table, show_ident, show_table};

/// What `init` would do.
#[derive(Debug)]
pub struct Plan {
    /// One transaction, the intent its last statement.
    pub statements: Vec<Statement>,
    pub slot: SlotWork,
    /// What needs nothing done, for a person.
    pub already: Vec<Item>,
    /// Worth saying, no obstacle.
    pub notes: Vec<String>,
    /// What stands in the way of running it, not of printing it.
    pub needs: Vec<Finding>,
    /// Rows that are in the table at the slot's snapshot stay unpublished.
    pub existing: Option<Existing>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Statement {
    /// `None`: nothing that an operator would look for.
    pub makes: Option<Item>,
    pub sql: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    pub object: &'static str,
    pub name: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotWork {
    AlreadyThere,
    Make,
    /// A run before this one committed its intent and made the slot, but got no further.
    MakeAgain,
}

impl Plan {
    pub fn changes_nothing(&self) -> bool {
        self.statements.is_empty() && self.slot == SlotWork::AlreadyThere
    }
}

/// # Errors
/// Conflicts that no statement of ours can settle, all of them.
pub fn plan(
    source: &Source,
    mapping: &Mapping,
    seen: &Seen,
    existing: Option<Existing>,
) -> Result<Plan, Failure> {
    if existing == Some(Existing::Publish) {
        return Err(Failure::usage(
            "--existing publish comes with healing, which is not built yet",
            "use --existing leave: rows that are in the table stay unpublished",
        ));
    }
    if seen.server.in_recovery {
        // A standby has slots of its own: what they lack says nothing of the primary's.
        let needs = preflight::server_findings(&seen.server);
        return Err(finding::failure(&needs).expect("recovery is refused"));
    }
    let mut planner = Planner::new(source, mapping, seen, existing);
    let slot = planner.plan();
    if !planner.conflicts.is_empty() {
        let all = planner.needs.iter().chain(&planner.conflicts);
        return Err(finding::failure(all).expect("a conflict is a refusal"));
    }
    Ok(Plan {
        statements: planner.statements,
        slot,
        already: planner.already,
        notes: planner.notes,
        needs: planner.needs,
        existing: planner.existing,
    })
}

/// What a first `init` would be refused for.
pub fn obstacles(source: &Source, mapping: &Mapping, seen: &Seen) -> Vec<Finding> {
    let mut planner = Planner::new(source, mapping, seen, None);
    planner.plan();
    let mut obstacles = planner.needs;
    obstacles.extend(planner.conflicts);
    obstacles
}

struct Planner<'a> {
    source: &'a Source,
    mapping: &'a Mapping,
    seen: &'a Seen,
    existing: Option<Existing>,
    statements: Vec<Statement>,
    already: Vec<Item>,
    notes: Vec<String>,
    needs: Vec<Finding>,
    conflicts: Vec<Finding>,
    /// A statement makes something in the table's schema.
    creates_in_schema: bool,
}

impl<'a> Planner<'a> {
    fn new(
        source: &'a Source,
        mapping: &'a Mapping,
        seen: &'a Seen,
        existing: Option<Existing>,
    ) -> Self {
        let remembered = seen
            .row
            .as_ref()
            .filter(|row| row.intent)
            .and_then(|row| row.intent_existing.as_deref());
        let remembered = (remembered == Some("leave")).then_some(Existing::Leave);
        Planner {
            source,
            mapping,
            seen,
            existing: existing.or(remembered),
            statements: Vec::new(),
            already: Vec::new(),
            notes: preflight::warnings(&preflight::server_findings(&seen.server)),
            needs: Vec::new(),
            conflicts: Vec::new(),
            creates_in_schema: false,
        }
    }

    fn plan(&mut self) -> SlotWork {
        let slot = self.slot();
        self.table();
        self.walrelay();
        self.publication();
        self.intent();
        if slot != SlotWork::AlreadyThere {
            self.environment(slot);
        }
        if slot != SlotWork::AlreadyThere || self.creates_in_schema {
            self.schema_rights();
        }
        slot
    }

    fn make(&mut self, object: &'static str, name: String, sql: String) {
        self.statements.push(Statement {
            makes: Some(Item { object, name }),
            sql,
        });
    }

    fn already(&mut self, object: &'static str, name: String) {
        self.already.push(Item { object, name });
    }

    /// The registry's row, once the slot that it describes was made.
    fn complete_row(&self) -> Option<&'a Registered> {
        self.seen.row.as_ref().filter(|row| !row.intent)
    }

    fn table(&mut self) {
        let name = show_table(&self.source.table);
        let Some(table) = &self.seen.table else {
            self.own_columns();
            self.make("table", name, migrations::outbox(&self.source.table));
            if !self.seen.table_schema_exists {
                self.conflicts.push(Finding::failed(
                    "schema",
                    format!(
                        "schema {} does not exist",
                        show_ident(&self.source.table.schema)
                    ),
                    format!(
                        "create schema {} authorization {}",
                        quote_ident(&self.source.table.schema),
                        quote_ident(&self.seen.role.name)
                    ),
                ));
            }
            self.creates_in_schema = true;
            self.helpers();
            return;
        };
        self.already("table", name);
        let columns = preflight::needed(self.mapping);
        let needs = preflight::table_needs(&self.source.table, table, &columns);
        self.conflicts.extend(needs);
        if is_our_layout(table) {
            self.index(table);
            self.helpers();
        } else {
            self.notes.push(
                "the table differs from migrations/0001_outbox.sql: nothing in it is changed, and it \
                 gets no helper functions and no index"
                    .to_owned(),
            );
        }
        let kin = preflight::kin(&self.source.table, table).into_iter();
        let kin = kin.filter(|finding| finding.state == State::Warning);
        let later = preflight::later_columns(&self.source.table, table, self.mapping);
        for finding in kin.chain(later) {
            let remedy = finding.remedy.unwrap_or_default();
            self.notes.push(format!("{}; {remedy}", finding.found));
        }
    }

    /// The table that is about to be made must have what the mapping names.
    fn own_columns(&mut self) {
        let mut lacking: Vec<String> = Vec::new();
        for needed in preflight::needed(self.mapping) {
            let shown = show_ident(needed.name);
            if !migrations::OUTBOX_COLUMNS.contains(&needed.name) && !lacking.contains(&shown) {
                lacking.push(shown);
            }
        }
        if !lacking.is_empty() {
            self.conflicts.push(Finding::failed(
                "table",
                format!(
                    "table {} does not exist, and the one that init would make has no column {}",
                    show_table(&self.source.table),
                    lacking.join(", ")
                ),
                "name the table that has them with --table, or make it first; for the table of our \
                 own leave --column, --topic and --header away",
            ));
        }
    }

    fn schema_rights(&mut self) {
        let (schema, role) = (
            quote_ident(&self.source.table.schema),
            quote_ident(&self.seen.role.name),
        );
        let may_create = self.seen.may_create_in_schema || !self.creates_in_schema;
        let (lacks, rights) = match (self.seen.may_use_schema, may_create) {
            (true, true) => return,
            (true, false) => (format!("may not create in schema {schema}"), "create"),
            (false, true) => (format!("may not use schema {schema}"), "usage"),
            (false, false) => (
                format!("may neither use schema {schema} nor create in it"),
                "usage, create",
            ),
        };
        if self.seen.table_schema_exists {
            self.needs.push(Finding::failed(
                "schema",
                format!("role {role} {lacks} (42501)"),
                format!("grant {rights} on schema {schema} to {role}"),
            ));
        }
    }

    /// An index over rows that are there blocks their writers while it is built: not done unasked.
    fn index(&mut self, table: &Table) {
        let on = format!("brin (xid) on {}", show_table(&self.source.table));
        if self.seen.brin_index {
            self.already("index", on);
        } else if self.seen.rows == Rows::Exactly(0) {
            self.make("index", on, migrations::index(&self.source.table));
            self.creates_in_schema = true;
            self.need_ownership(table);
        } else {
            self.notes.push(format!(
                "the index that retention and gap recovery go by is missing; make it when it suits: \
                 create index concurrently on {} using brin ((xid::text::bigint)) with \
                 (autosummarize = on)",
                quote_table(&self.source.table)
            ));
        }
    }

    fn helpers(&mut self) {
        let helpers = self.seen.helpers;
        let schema = show_ident(&self.source.table.schema);
        let names = format!("{schema}.outbox_event_id, {schema}.outbox_emit");
        match (helpers.event_id, helpers.emit) {
            (true, true) => {
                self.already("functions", names);
                if !helpers.emit_is_ours {
                    self.notes.push(format!(
                        "{schema}.outbox_emit writes to another table: left as it is"
                    ));
                }
            }
            (false, false) => {
                let partitioned = self.seen.table.as_ref().is_some_and(|t| t.kind == 'p');
                let layout = if partitioned {
                    Layout::Partitioned
                } else {
                    Layout::Plain
                };
                let sql = migrations::functions(&self.source.table, layout);
                self.make("functions", names, sql);
                self.creates_in_schema = true;
            }
            (true, false) | (false, true) => self.notes.push(format!(
                "one of the functions {names} exists and the other does not: both are left as they \
                 are; migrations/0002_functions.sql has them"
            )),
        }
    }

    fn walrelay(&mut self) {
        match &self.seen.walrelay {
            WalrelaySchema::Absent => {
                self.make("schema", "walrelay".to_owned(), migrations::walrelay());
                self.need_create_in_database();
            }
            WalrelaySchema::Incomplete(missing) => self.conflicts.push(Finding::failed(
                "schema walrelay",
                format!("schema walrelay exists, but lacks {}", missing.join(", ")),
                "if nobody else uses the name: drop schema walrelay cascade; else rename it",
            )),
            WalrelaySchema::Complete { may_write } => {
                self.already("schema", "walrelay".to_owned());
                if !may_write && self.complete_row().is_none() {
                    let role = quote_ident(&self.seen.role.name);
                    self.needs.push(Finding::failed(
                        "schema walrelay",
                        format!("role {role} may not read and write schema walrelay (42501)"),
                        format!(
                            "grant usage on schema walrelay to {role}; grant select, insert, \
                             update, delete on all tables in schema walrelay to {role}"
                        ),
                    ));
                }
            }
        }
    }

    fn need_create_in_database(&mut self) {
        if self.seen.may_create_in_database {
            return;
        }
        let (database, role) = (
            quote_ident(&self.seen.role.database),
            quote_ident(&self.seen.role.name),
        );
        let need = Finding::failed(
            "database",
            format!("role {role} may not create in database {database} (42501)"),
            format!("grant create on database {database} to {role}"),
        );
        if !self.needs.contains(&need) {
            self.needs.push(need);
        }
    }

    fn need_ownership(&mut self, table: &Table) {
        if table.owned {
            return;
        }
        let role = quote_ident(&self.seen.role.name);
        let need = Finding::failed(
            "table",
            format!(
                "table {} belongs to {}; only its owner may index and publish it (42501)",
                show_table(&self.source.table),
                quote_ident(&table.owner)
            ),
            format!(
                "run init as {0}, or: grant {0} to {role}",
                quote_ident(&table.owner)
            ),
        );
        if !self.needs.contains(&need) {
            self.needs.push(need);
        }
    }

    fn publication(&mut self) {
        let name = show_ident(&self.source.publication);
        let registered = self.standing_row();
        if registered.is_some_and(|row| row.publication != self.source.publication) {
            // The slot's part has said so.
            return;
        }
        let Some(publication) = &self.seen.publication else {
            if let Some(row) = self.complete_row() {
                self.conflicts.push(Finding::failed(
                    "publication",
                    format!(
                        "publication {name} is gone, though the registry says that it was made: \
                         what was written since is in no stream"
                    ),
                    preflight::start_over(row),
                ));
                return;
            }
            self.make("publication", name, migrations::publication(self.source));
            self.need_create_in_database();
            if let Some(table) = &self.seen.table {
                self.need_ownership(table);
            }
            return;
        };
        let is_registered = self
            .seen
            .row
            .as_ref()
            .is_some_and(|row| row.publication == self.source.publication);
        if !is_registered {
            if self.seen.rival.is_none() {
                self.conflicts.push(Finding::failed("publication", 
                    format!("publication {name} exists, but walrelay did not make it"),
                    format!(
                        "use another name (--publication), or, if nobody needs it: drop publication {}",
                        quote_ident(&self.source.publication)
                    ),
                ));
            }
            return;
        }
        if let Some(table) = &self.seen.table {
            let needs = preflight::publication_needs(self.source, table, Some(publication));
            if needs.is_empty() {
                self.already("publication", name);
            }
            self.conflicts.extend(needs);
        }
    }

    /// The registry's row, unless `walrelay drop` has ended what it described.
    fn standing_row(&self) -> Option<&'a Registered> {
        let row = self.seen.row.as_ref();
        row.filter(|row| row.dropped.is_none())
    }

    fn intent(&mut self) {
        if self.standing_row().is_some() {
            return;
        }
        let existing = self.existing.map(|existing| match existing {
            Existing::Leave => "leave",
            Existing::Publish => "publish",
        });
        let made_table = self.seen.table.is_none();
        let sql = match &self.seen.row {
            Some(_) => migrations::intent_after_drop(self.source, existing),
            None => migrations::intent(self.source, made_table, existing),
        };
        self.statements.push(Statement { makes: None, sql });
    }

    /// What becomes of the slot; finds everything that forbids to make one.
    fn slot(&mut self) -> SlotWork {
        let found = SlotSeen {
            source: self.source,
            server: &self.seen.server,
            database: &self.seen.role.database,
            slot: self.seen.slot.as_ref(),
            holder: self.seen.slot_holder.as_ref(),
        };
        if let Some((rival, name)) = &self.seen.rival {
            let oid = self.seen.table.as_ref().map(|table| table.oid);
            self.conflicts.push(preflight::another_table(
                self.source,
                oid,
                self.seen.publication.as_ref(),
                rival,
                name.as_ref(),
            ));
            return SlotWork::Make;
        }
        let slot = self.seen.slot.as_ref();
        let Some(row) = &self.seen.row else {
            if slot.is_some() {
                self.conflicts.push(found.without_a_row());
            }
            return SlotWork::Make;
        };
        if let Some(dropped) = &row.dropped {
            return self.after_drop(&found, row, dropped);
        }
        let otherwise = found.named_otherwise(row);
        if !otherwise.is_empty() {
            self.conflicts.extend(otherwise);
            return SlotWork::AlreadyThere;
        }
        match (row.intent, slot) {
            (true, None) => SlotWork::Make,
            (true, Some(slot)) => {
                self.half_made(&found, slot);
                SlotWork::MakeAgain
            }
            (false, _) => {
                self.conflicts.extend(found.needs_of_registered(row));
                self.already("slot", self.source.slot.clone());
                SlotWork::AlreadyThere
            }
        }
    }

    /// There was a slot, and `walrelay drop` took it away: whoever makes the next one is told.
    fn after_drop(
        &mut self,
        found: &SlotSeen<'_>,
        row: &Registered,
        dropped: &Dropped,
    ) -> SlotWork {
        self.notes.push(format!(
            "{}: what it had not delivered then is in no stream",
            preflight::dropped(row, dropped)
        ));
        match found.slot {
            None => SlotWork::Make,
            Some(slot) if dropped.is_half_done && row.slot == self.source.slot => {
                self.half_made(found, slot);
                SlotWork::MakeAgain
            }
            Some(_) => {
                self.conflicts.push(found.without_a_row());
                SlotWork::Make
            }
        }
    }

    /// The slot that an interrupted `init` left. It may only be dropped when it is surely that one,
    /// and nobody reads it.
    fn half_made(&mut self, found: &SlotSeen<'_>, slot: &SlotState) {
        if let Some(pid) = slot.active_pid {
            let holder = self
                .seen
                .slot_holder
                .as_ref()
                .map_or_else(|| format!("pid {pid}"), ToString::to_string);
            self.conflicts.push(Finding::failed("slot", 
                format!(
                    "slot {} is left from an interrupted init, and in use ({holder})",
                    self.source.slot
                ),
                format!(
                    "wait until that session has ended, or select pg_terminate_backend({pid}); then \
                     run init again"
                ),
            ));
        }
        // A lost one is about to be dropped anyway.
        let unlost = SlotState {
            wal_status: None,
            ..slot.clone()
        };
        self.conflicts.extend(found.slot_unfit(&unlost));
    }

    /// What must hold on the server before a slot can be made.
    fn environment(&mut self, slot: SlotWork) {
        let mut surroundings = preflight::server_findings(&self.seen.server);
        surroundings.push(preflight::role_finding(&self.seen.role));
        self.needs.extend(preflight::only_failed(surroundings));
        let slots = &self.seen.slots;
        if slot == SlotWork::Make && slots.used >= slots.max {
            self.needs
                .push(preflight::no_slot_left(&slots.idle, slots.max));
        }
        if slots.wal_senders_max == 0 {
            self.needs.push(preflight::no_wal_senders());
        }
        // With names that are another table's there will be another init.
        if self.existing.is_some() || self.seen.rival.is_some() {
            return;
        }
        self.conflicts
            .extend(rows_need(self.source, self.seen.rows));
        if self.seen.rows == Rows::Unknown && self.seen.table.is_some() {
            self.needs.push(Finding::failed("table", 
                format!(
                    "role {} may not read all of {} (42501): whether it holds rows is not known",
                    quote_ident(&self.seen.role.name),
                    show_table(&self.source.table)
                ),
                "run init as the table's owner; under forced row level security as a role with bypassrls, or \
                 say --existing leave",
            ));
        }
    }
}

/// Rows that were there before the first slot are in no stream: somebody must say what becomes of
/// them.
pub fn rows_need(source: &Source, rows: Rows) -> Option<Finding> {
    if matches!(rows, Rows::Unknown | Rows::Exactly(0)) {
        return None;
    }
    Some(Finding::failed(
        "table",
        format!(
            "table {} holds {rows} from before the slot, which no stream will carry",
            show_table(&source.table)
        ),
        "say what becomes of them: --existing leave leaves them unpublished for ever (--existing \
         publish comes with healing, which is not built yet)",
    ))
}

/// The columns and types of migrations/0001_outbox.sql, whatever else there is.
fn is_our_layout(table: &Table) -> bool {
    let ours = [
        ("event_id", "uuid"),
        ("aggregate_type", "text"),
        ("aggregate_id", "text"),
        ("event_type", "text"),
        ("payload", "jsonb"),
        ("headers", "jsonb"),
        ("xid", "xid8"),
    ];
    ours.iter().all(|(name, type_name)| {
        table
            .columns
            .iter()
            .any(|c| c.name == *name && c.type_name == *type_name)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::init::survey::{Helpers, Slots};
    use crate::error::Exit;
    use crate::io::catalog::Role;
    use crate::io::registry::Server;
    use crate::lsn::PgTimestamp;

    fn source() -> Source {
        Source::sample("walrelay")
    }

    /// An empty database in which everything is allowed.
    fn empty() -> Seen {
        Seen {
            server: Server {
                version_num: 180_006,
                encoding: "UTF8".into(),
                in_recovery: false,
                wal_level: "logical".into(),
                fsync: true,
                system_identifier: Some("1".into()),
                timeline: Some(1),
                started: PgTimestamp(0),
            },
            role: Role {
                name: "u".into(),
                may_replicate: true,
                database: "d".into(),
            },
            table_schema_exists: true,
            may_use_schema: true,
            may_create_in_schema: true,
            may_create_in_database: true,
            table: None,
            rows: Rows::Unknown,
            brin_index: false,
            helpers: Helpers::default(),
            walrelay: WalrelaySchema::Absent,
            row: None,
            rival: None,
            publication: None,
            slot: None,
            slot_holder: None,
            slots: Slots {
                used: 0,
                max: 10,
                idle: Vec::new(),
                wal_senders_max: 10,
            },
        }
    }

    fn slot() -> SlotState {
        SlotState {
            plugin: Some("pgoutput".into()),
            slot_type: "logical".into(),
            database: Some("d".into()),
            temporary: false,
            two_phase: false,
            active_pid: None,
            confirmed_flush: None,
            restart_lsn: None,
            wal_status: Some("reserved".into()),
            failover: Some(true),
            synced: Some(false),
        }
    }

    /// The registry's row while a slot is being made.
    fn intent() -> Registered {
        Registered {
            table_oid: 7,
            table_name: "public.outbox".into(),
            slot: "walrelay".into(),
            publication: "walrelay".into(),
            system_identifier: None,
            timeline: None,
            generation: 0,
            consistent_point: None,
            leader: None,
            stop: None,
            halted: None,
            intent: true,
            intent_existing: None,
            dropped: None,
            made_table: true,
            heals: false,
        }
    }

    #[test]
    fn the_intent_is_the_last_statement_before_the_slot() {
        let plan =
            plan(&source(), &Mapping::default(), &empty(), None).expect("nothing is in the way");
        assert_eq!(plan.slot, SlotWork::Make);
        assert_eq!(plan.needs, []);
        let made: Vec<Option<&str>> = plan
            .statements
            .iter()
            .map(|s| s.makes.as_ref().map(|item| item.object))
            .collect();
        assert_eq!(
            made,
            [
                Some("table"),
                Some("functions"),
                Some("schema"),
                Some("publication"),
                None
            ]
        );
    }

    #[test]
    fn a_standby_is_told_nothing_but_that_it_is_one() {
        let mut seen = empty();
        seen.server.in_recovery = true;
        seen.row = Some(Registered {
            intent: false,
            ..intent()
        });
        let failure = plan(&source(), &Mapping::default(), &seen, None).expect_err("a standby");
        assert_eq!(failure.exit, Exit::Refused);
        assert_eq!(failure.causes.len(), 1);
    }

    #[test]
    fn a_slot_of_the_intent_is_made_anew_unless_somebody_reads_it() {
        let mut seen = empty();
        seen.row = Some(intent());
        seen.slot = Some(slot());
        let anew = plan(&source(), &Mapping::default(), &seen, None).expect("nobody reads it");
        assert_eq!(anew.slot, SlotWork::MakeAgain);
        seen.slot = Some(SlotState {
            active_pid: Some(42),
            ..slot()
        });
        let failure = plan(&source(), &Mapping::default(), &seen, None).expect_err("it is read");
        assert!(failure.to_string().contains("pid 42"), "{failure}");
        // The same name in another database is another slot.
        seen.slot = Some(SlotState {
            database: Some("e".into()),
            ..slot()
        });
        let failure = plan(&source(), &Mapping::default(), &seen, None).expect_err("not ours");
        assert!(failure.to_string().contains("database \"e\""), "{failure}");
    }

    #[test]
    fn every_right_that_is_missing_is_named_once() {
        let mut seen = empty();
        seen.may_create_in_schema = false;
        seen.may_create_in_database = false;
        seen.role.may_replicate = false;
        seen.server.wal_level = "replica".into();
        seen.slots.used = 10;
        let plan = plan(&source(), &Mapping::default(), &seen, None).expect("it can be printed");
        assert_eq!(plan.needs.len(), 5, "{:#?}", plan.needs);
    }

    #[test]
    fn what_the_interrupted_run_was_told_about_rows_still_holds() {
        let mut seen = empty();
        seen.row = Some(Registered {
            intent_existing: Some("leave".into()),
            ..intent()
        });
        seen.rows = Rows::Exactly(3);
        let told = plan(&source(), &Mapping::default(), &seen, None).expect("leave was said");
        assert_eq!(told.existing, Some(Existing::Leave));
        seen.row = Some(intent());
        let failure =
            plan(&source(), &Mapping::default(), &seen, None).expect_err("nothing was said");
        assert!(failure.to_string().contains("3 rows"), "{failure}");
    }
}
