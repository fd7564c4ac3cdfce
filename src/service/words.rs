//! What the loop says about a stream that cannot go on.

use crate::config::Source;
use crate::error::{DbError, Failure};
use crate::io::{connect, preflight};
use crate::lsn::Lsn;
use crate::relay::orders::StreamEnd;

/// How an ErrorResponse ends the stream: may it be opened again?
pub fn stream_error(error: &DbError, source: &Source, table_oid: u32) -> StreamEnd {
    // A server that shuts down makes an error of what else is a warning.
    let waits = matches!(error, DbError::Server { message, .. } if is_about_standbys(message));
    if error.heals_with_time() || waits {
        return StreamEnd::Lost(error.to_string());
    }
    let failure = match error.sqlstate() {
        "42704" => Failure::halted(
            format!(
                "the stream cannot pass a change made while publication {} did not exist: {error}; rows written meanwhile are in no stream",
                source.publication
            ),
            begin_anew(table_oid, source),
        ),
        "55000" => Failure::halted(
            format!("slot {} can no longer be read: {error}", source.slot),
            "events after its last position are only in the table; raise max_slot_wal_keep_size before the slot is made anew",
        ),
        _ => connect::failure(error, &source.database),
    };
    StreamEnd::Never(failure)
}

/// Does the server say that it waits for a standby that nobody runs? It names the setting, which is
/// the same in every language; the SQLSTATE is that of rows which are skipped.
pub fn is_about_standbys(message: &str) -> bool {
    message.contains("synchronized_standby_slots")
}

pub fn frame_too_large(length: usize, lsn: Lsn) -> Failure {
    Failure::halted(
        format!(
            "the transaction at {lsn} holds a row of {length} bytes, and at most 64 MiB are taken: no topic would take it either; nothing was skipped, the slot waits in front of it"
        ),
        "keep payloads of that size outside of the outbox; to go on without it: publish by other means what the table holds from this transaction on, drop the slot, delete its row of walrelay.relay, and `walrelay init --existing leave`",
    )
}

/// Postgres 18 goes on without the publication and only warns.
pub fn rows_skipped(
    message: &str,
    detail: Option<&str>,
    source: &Source,
    table_oid: u32,
) -> Failure {
    Failure::halted(
        format!(
            "the server skips rows: {message}{}; publication {} did not exist when they were written, they are in no stream; nothing is confirmed past this point",
            detail.map(|d| format!(" ({d})")).unwrap_or_default(),
            source.publication
        ),
        begin_anew(table_oid, source),
    )
}

fn begin_anew(table_oid: u32, source: &Source) -> String {
    preflight::begin_anew(table_oid, &source.publication, &source.slot)
}
