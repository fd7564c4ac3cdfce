//! What the loop says about a stream that cannot go on.

use crate::config::Source;
use crate::error::{DbError, Failure};
use crate::gap::{Cause, Gap};
use crate::io::connect;
use crate::lsn::Lsn;
use crate::relay::orders::StreamEnd;

/// How an ErrorResponse ends the stream: may it be opened again?
pub fn stream_error(error: &DbError, source: &Source) -> StreamEnd {
    // A server that shuts down makes an error of what else is a warning.
    let waits = matches!(error, DbError::Server { message, .. } if is_about_standbys(message));
    if error.heals_with_time() || waits {
        return StreamEnd::Lost(error.to_string());
    }
    let cause = match error.sqlstate() {
        "42704" => Cause::PublicationGone(error.to_string()),
        "55000" => Cause::SlotLost(error.to_string()),
        _ => return StreamEnd::Never(connect::failure(error, &source.database)),
    };
    let missing = None;
    StreamEnd::Gap(Gap { cause, missing })
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
pub fn rows_skipped(message: &str, detail: Option<&str>) -> Gap {
    let detail = detail.map(|d| format!(" ({d})")).unwrap_or_default();
    Gap {
        cause: Cause::PublicationGone(format!("{message}{detail}")),
        missing: None,
    }
}
