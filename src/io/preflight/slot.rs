//! Registry row and slot: whether they are this relay's, and whether the slot can carry the stream.
//! Pure.

use super::look::{Rights, Seen};
use super::swap::{another_table, for_shell, still_held};
use crate::config::{OnPoison, Source, TableName};
use crate::error::DbError;
use crate::finding::Finding;
use crate::gap::Cause;
use crate::io::catalog::{Publication, Role, Table};
use crate::io::registry::{Dropped, Holder, Registered, Server, SlotState};
use crate::io::sql::{quote_ident, quote_literal, quote_table, show_ident, show_table};

/// What makes the table, the publication and the slot.
pub const RUN_INIT: &str = "run `walrelay init`";

/// A slot as it was found, and where.
pub struct SlotSeen<'a> {
    pub source: &'a Source,
    pub server: &'a Server,
    pub database: &'a str,
    pub slot: Option<&'a SlotState>,
    /// Who holds the slot that the registry names, which need not be this one.
    pub holder: Option<&'a Holder>,
}

impl SlotSeen<'_> {
    /// Registry and slot; and whether table, slot and publication belong together.
    #[must_use]
    pub fn findings(&self, seen: &Seen, table: Option<&Table>) -> (bool, Vec<Finding>) {
        let registry = match &seen.registry {
            Ok(registry) => registry,
            Err(error) => return (true, self.without_the_registry(seen, error)),
        };
        let Some(row) = &registry.row else {
            if let Some((rival, name)) = &registry.rival {
                let oid = table.map(|table| table.oid);
                let publication = seen.publication.as_ref().ok().and_then(Option::as_ref);
                let found = another_table(self.source, oid, publication, rival, name.as_ref());
                return (false, vec![found]);
            }
            return (true, vec![self.without_a_row()]);
        };
        if let Some(dropped) = &row.dropped {
            return (false, vec![was_dropped(row, dropped)]);
        }
        let otherwise = self.named_otherwise(row);
        if !otherwise.is_empty() {
            let rival = registry.rival.as_ref();
            let rival = rival.filter(|(rival, _)| rival.slot == self.source.slot);
            let old = rival.and_then(|(rival, name)| still_held(self.source, rival, name.as_ref()));
            return (false, otherwise.into_iter().chain(old).collect());
        }
        let mut findings = vec![Finding::ok(
            "registry",
            format!("slot generation {}", row.generation),
        )];
        if let Some(halted) = &row.halted {
            findings.push(Finding::warning(
                "halted event",
                format!(
                    "event {} stopped the relay: {}",
                    halted.event_id, halted.reason
                ),
                "see to its cause; the next start sends that event alone, before any other",
            ));
        }
        if let Err(error) = &seen.slots {
            findings.push(Finding::unknown("slot", error.to_string()));
            return (true, findings);
        }
        let mut needs = self.needs_of_registered(row);
        if needs.is_empty() {
            let is_writable = seen.rights.as_ref().is_ok_and(|r| r.may_write_walrelay);
            needs.extend(self.slot_moved(row, is_writable));
        }
        if needs.is_empty() {
            findings.push(self.in_order(seen));
        }
        findings.extend(needs);
        (true, findings)
    }

    /// The registry could not be read: what the slot itself shows is all there is to say.
    fn without_the_registry(&self, seen: &Seen, error: &DbError) -> Vec<Finding> {
        let mut findings = vec![Finding::unknown("registry", error.to_string())];
        match (&seen.slots, self.slot) {
            (Err(error), _) => findings.push(Finding::unknown("slot", error.to_string())),
            (Ok(_), Some(slot)) => {
                let unfit = self.slot_unfit(slot);
                if unfit.is_empty() {
                    findings.push(self.in_order(seen));
                }
                findings.extend(unfit);
            }
            (Ok(_), None) => findings.push(Finding::failed(
                "slot",
                format!("slot {} does not exist", self.source.slot),
                RUN_INIT,
            )),
        }
        findings
    }

    /// The slot does; who reads it?
    fn in_order(&self, seen: &Seen) -> Finding {
        let name = &self.source.slot;
        let Some(holder) = self.holder else {
            return Finding::ok("slot", format!("{name}, nobody reads it"));
        };
        let is_led = match &seen.instances {
            Ok(instances) => instances.iter().any(|instance| instance.is_leader),
            Err(_) => true,
        };
        if is_led {
            return Finding::ok("slot", format!("{name}, read by {holder}"));
        }
        let database = &self.source.database;
        let is_ours = holder.user.as_deref() == Some(&database.user)
            && holder.application_name.as_deref() == Some(&database.application_name);
        let what = if is_ours {
            "a relay that leads no more"
        } else {
            "which is no walrelay"
        };
        Finding::warning(
            "slot",
            format!("slot {name} is held by {holder}, {what}: `run` waits for it"),
            format!("end it: select pg_terminate_backend({})", holder.pid),
        )
    }

    /// What a complete or half-made registry row of this table still lacks.
    #[must_use]
    pub fn needs_of_registered(&self, row: &Registered) -> Vec<Finding> {
        if let Some(dropped) = &row.dropped {
            return vec![was_dropped(row, dropped)];
        }
        let named_otherwise = self.named_otherwise(row);
        if !named_otherwise.is_empty() {
            return named_otherwise;
        }
        if row.intent {
            return vec![Finding::failed(
                "slot",
                format!(
                    "`walrelay init` was interrupted while it made slot {}",
                    self.source.slot
                ),
                "run `walrelay init` again: it puts this right",
            )];
        }
        if let Some(need) = self.another_system(row) {
            return vec![need];
        }
        match self.slot {
            None => vec![self.slot_gone(row)],
            Some(slot) => self.slot_unfit(slot),
        }
    }

    /// The table is relayed through another slot or publication (two relays on one table would send
    /// every event twice).
    #[must_use]
    pub fn named_otherwise(&self, row: &Registered) -> Vec<Finding> {
        let mut needs = Vec::new();
        let table = show_table(&self.source.table);
        let names = format!(
            "use --slot {} --publication {}",
            row.slot,
            for_shell(&show_ident(&row.publication))
        );
        if row.slot != self.source.slot {
            needs.push(Finding::failed(
                "slot",
                format!(
                    "outbox {table} is already relayed through slot {} ({}); a second slot would \
                     send every event twice",
                    row.slot,
                    self.holder
                        .map_or("not active".to_owned(), |holder| format!(
                            "active, {holder}"
                        ))
                ),
                names.clone(),
            ));
        }
        if row.publication != self.source.publication {
            needs.push(Finding::failed(
                "publication",
                format!(
                    "outbox {table} is already relayed through publication {}",
                    show_ident(&row.publication)
                ),
                names,
            ));
        }
        needs
    }

    /// Another cluster than the one that the slot was made in: a restored copy, an upgrade.
    #[must_use]
    pub fn another_system(&self, row: &Registered) -> Option<Finding> {
        let (Some(then), Some(now)) = (&row.system_identifier, &self.server.system_identifier)
        else {
            return None;
        };
        (then != now).then(|| {
            Finding::failed(
                "server",
                format!(
                    "this is another cluster (system identifier {now}) than the one that slot {} \
                     was made in ({then}): a restored copy, or an upgrade; what was delivered \
                     cannot be told from here",
                    row.slot
                ),
                start_over(row),
            )
            .halted()
        })
    }

    /// The registry says that there was a slot, and it is gone: a gap.
    #[must_use]
    pub fn slot_gone(&self, row: &Registered) -> Finding {
        Finding::failed(
            "slot",
            format!(
                "slot {} is gone, though the registry says that it was made (generation {}): what \
                 was committed since it vanished is in no stream",
                row.slot, row.generation
            ),
            start_over(row),
        )
        .gap()
    }

    /// The slot stands further than any relay has told it to: a gap. Judged as the relay does when
    /// it opens the stream, and only where nobody is moving the slot at this moment.
    #[must_use]
    pub fn slot_moved(&self, row: &Registered, is_writable: bool) -> Option<Finding> {
        let slot = self.slot.filter(|slot| slot.active_pid.is_none())?;
        let confirmed = slot.confirmed_flush?;
        let highest = match (&row.stop, &row.leader) {
            (Some(stop), _) => stop.reported,
            // A relay whose role may not write leaves no name, and may have moved the slot.
            (None, None) if is_writable => row.consistent_point?,
            (None, _) => return None,
        };
        (confirmed > highest).then(|| {
            let cause = Cause::SlotMoved {
                confirmed,
                reported: highest,
            };
            let remedy = go_on_from_there(row.table_oid);
            Finding::failed("slot", cause.to_string(), remedy).gap()
        })
    }

    /// No registry row of this table: a slot, if there is one, is somebody else's.
    #[must_use]
    pub fn without_a_row(&self) -> Finding {
        let name = &self.source.slot;
        let Some(slot) = self.slot else {
            return Finding::failed(
                "slot",
                format!(
                    "slot {name} does not exist, and the registry has no row of table {}",
                    show_table(&self.source.table)
                ),
                RUN_INIT,
            );
        };
        let place = match slot.database.as_deref() {
            Some(database) if database != self.database => {
                format!(" (in database {})", quote_ident(database))
            }
            Some(_) => String::new(),
            None => " (a physical one)".to_owned(),
        };
        Finding::failed(
            "slot",
            format!(
                "slot {name} exists{place}, but walrelay did not make it for {}: nobody knows what \
                 it has let pass",
                show_table(&self.source.table)
            ),
            format!(
                "use another name (--slot), or, if nobody needs it: select \
                 pg_drop_replication_slot({}); then run `walrelay init`",
                quote_literal(name)
            ),
        )
    }

    /// A slot that exists and cannot carry this stream.
    #[must_use]
    pub fn slot_unfit(&self, slot: &SlotState) -> Vec<Finding> {
        let name = &self.source.slot;
        let drop = format!(
            "use another slot (--slot), or drop this one if nobody needs it: select \
             pg_drop_replication_slot({})",
            quote_literal(name)
        );
        let refused = |cause: String| Finding::failed("slot", cause, drop.clone());
        if slot.slot_type != "logical" {
            return vec![refused(format!("slot {name} is a physical one"))];
        }
        let mut needs = Vec::new();
        if slot.database.as_deref() != Some(self.database) {
            needs.push(refused(format!(
                "slot {name} belongs to database {}, not to {}",
                quote_ident(slot.database.as_deref().unwrap_or("")),
                quote_ident(self.database)
            )));
        }
        if slot.plugin.as_deref() != Some("pgoutput") {
            needs.push(refused(format!(
                "slot {name} was made with the output plugin {}; walrelay reads pgoutput",
                slot.plugin.as_deref().unwrap_or("?")
            )));
        }
        if slot.two_phase {
            needs.push(refused(format!(
                "slot {name} was made with two_phase = true: it sends transactions that can still \
                 be rolled back"
            )));
        }
        if slot.temporary {
            needs.push(refused(format!("slot {name} is a temporary one")));
        }
        if slot.wal_status.as_deref() == Some("lost") {
            needs.push(
                Finding::failed(
                    "slot",
                    format!(
                        "slot {name} is lost: the server removed WAL that it still needed \
                     (max_slot_wal_keep_size, idle_replication_slot_timeout); what it had not sent \
                     is in no stream"
                    ),
                    format!(
                        "decide what becomes of the rows in between; then select \
                     pg_drop_replication_slot({}), and the next start says how to go on",
                        quote_literal(name)
                    ),
                )
                .gap(),
            );
        }
        needs
    }
}

/// Who dropped the slot, and when.
#[must_use]
pub fn dropped(row: &Registered, dropped: &Dropped) -> String {
    format!(
        "slot {} (generation {}) of {} was dropped with `walrelay drop` by {} at {}",
        row.slot,
        row.generation,
        row.table_name,
        quote_ident(&dropped.by),
        dropped.since
    )
}

fn was_dropped(row: &Registered, how: &Dropped) -> Finding {
    let (found, remedy) = if how.is_half_done {
        (
            format!(
                "`walrelay drop` was interrupted while it dropped slot {}",
                row.slot
            ),
            "run `walrelay drop` again: it ends what it began",
        )
    } else {
        (
            dropped(row, how),
            "to relay the table again: `walrelay init`, which makes another slot",
        )
    };
    Finding::failed("slot", found, remedy)
}

/// How to go on from where somebody has moved the slot to.
fn go_on_from_there(table_oid: u32) -> String {
    format!(
        "find out who moved the slot (a relay whose role may not write schema walrelay does, \
         and then nothing is missing), and write again the rows in between that matter (with \
         the same event_id consumers drop what they had); to go on from where the slot is: \
         update walrelay.relay r set consistent_point = s.confirmed_flush_lsn, leader = null, \
         stop_reported = null from pg_replication_slots s where s.slot_name = r.slot_name and \
         r.table_oid = {table_oid}; then start again"
    )
}

/// How to begin anew where what was delivered cannot be told.
#[must_use]
pub fn start_over(row: &Registered) -> String {
    begin_anew(row.table_oid, &row.publication, &row.slot)
}

/// As [`start_over`], by the names.
#[must_use]
fn begin_anew(table_oid: u32, publication: &str, slot: &str) -> String {
    format!(
        "to give up what is not delivered and begin anew: delete from walrelay.relay where \
         table_oid = {table_oid}; drop publication if exists {}; select pg_drop_replication_slot(slot_name) \
         from pg_replication_slots where slot_name = {}; then `walrelay init --existing leave` (rows that \
         are in the table then stay unpublished; write those that matter again, with the same \
         event_id consumers drop what they had)",
        quote_ident(publication),
        quote_literal(slot)
    )
}

/// No registry row of this table: a publication, if there is one, is somebody else's.
#[must_use]
pub fn publication_without_a_row(source: &Source, publication: Option<&Publication>) -> Finding {
    let name = show_ident(&source.publication);
    if publication.is_none() {
        return Finding::failed(
            "publication",
            format!("publication {name} does not exist in this database"),
            RUN_INIT,
        );
    }
    Finding::failed(
        "publication",
        format!("publication {name} exists, but walrelay did not make it"),
        format!(
            "use another name (--publication), or, if nobody needs it: drop publication {}; then run \
             `walrelay init`",
            quote_ident(&source.publication)
        ),
    )
}

#[must_use]
pub fn no_table(name: &TableName) -> Finding {
    Finding::failed(
        "table",
        format!("table {} does not exist in this database", show_table(name)),
        "run `walrelay init`, which makes it, or name yours with --table (quoted as in SQL)",
    )
}

#[must_use]
pub fn no_registry_access(role: &str) -> Finding {
    let role = quote_ident(role);
    Finding::failed(
        "schema walrelay",
        format!("role {role} may not read schema walrelay (42501)"),
        grants(&role),
    )
}

fn grants(role: &str) -> String {
    format!(
        "grant usage on schema walrelay to {role}; grant select, insert, update, delete on all \
         tables in schema walrelay to {role}"
    )
}

/// With `--on-poison park` a role that may not park stands still at the first event that Kafka
/// refuses. `None` where there is nothing to park into yet.
#[must_use]
pub fn parking(rights: Rights, role: &Role, on_poison: OnPoison) -> Option<Finding> {
    let subject = "rights to park";
    let quoted = quote_ident(&role.name);
    if !rights.walrelay_exists || on_poison == OnPoison::Halt {
        return None;
    }
    if rights.may_park {
        let found = format!("role {quoted} reads and writes walrelay.dead_letter");
        return Some(Finding::ok(subject, found));
    }
    Some(Finding::failed(
        subject,
        format!(
            "role {quoted} may not read and write walrelay.dead_letter: an event that Kafka refuses \
             could not be parked, and everything would stand still"
        ),
        format!(
            "grant usage on schema walrelay to {quoted}; grant select, insert, update, delete on \
             walrelay.dead_letter to {quoted}; grant update on walrelay.relay to {quoted} (or stop at \
             such an event: --on-poison halt)"
        ),
    ))
}

/// What the role may do with what the relay keeps, and with the outbox.
#[must_use]
pub fn rights_findings(
    rights: Rights,
    role: &Role,
    source: &Source,
    table: Option<&Table>,
) -> Vec<Finding> {
    let mut findings = Vec::new();
    let quoted = quote_ident(&role.name);
    if rights.walrelay_exists {
        let subject = "schema walrelay";
        findings.push(if !rights.may_read_walrelay {
            no_registry_access(&role.name)
        } else if rights.may_write_walrelay {
            Finding::ok(subject, format!("role {quoted} reads and writes it"))
        } else {
            Finding::warning(
                subject,
                format!(
                    "role {quoted} may not write schema walrelay: it streams, but a stop cannot be \
                     stored, so that after a restart of Postgres some events may repeat"
                ),
                grants(&quoted),
            )
        });
    }
    if table.is_some_and(|table| matches!(table.kind, 'r' | 'p')) {
        findings.extend(table_rights(rights, &quoted, source));
    }
    findings
}

fn table_rights(rights: Rights, role: &str, source: &Source) -> Vec<Finding> {
    let shown = show_table(&source.table);
    let table = quote_table(&source.table);
    let mut findings = Vec::new();
    if rights.row_security {
        findings.push(Finding::failed(
            "row security",
            format!(
                "row security hides rows of {shown} from role {role}: the stream would show them, and \
                 what reads the table (gap recovery, retention, replay) would miss them"
            ),
            format!(
                "alter role {role} bypassrls, or connect as the table's owner (where it is forced on \
                 the owner, too: alter table {table} no force row level security)"
            ),
        ));
    }
    let mut grants = Vec::new();
    if !rights.may_use_schema {
        let schema = quote_ident(&source.table.schema);
        grants.push(format!("grant usage on schema {schema} to {role}"));
    }
    if !rights.may_read_table {
        grants.push(format!("grant select on {table} to {role}"));
    }
    let subject = "rights on the table";
    findings.push(if grants.is_empty() {
        Finding::ok(subject, format!("role {role} reads {shown}"))
    } else {
        Finding::warning(
            subject,
            format!(
                "role {role} may not read {shown}: it streams, but what waits in the table cannot be \
                 counted, and a gap cannot be closed"
            ),
            grants.join("; "),
        )
    });
    findings
}
