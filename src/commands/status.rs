//! `walrelay status`.

use crate::config::StatusConfig;
use crate::error::Failure;

/// # Errors
/// It is not built yet.
pub async fn run(config: StatusConfig) -> Result<(), Failure> {
    drop(config);
    Err(Failure::usage(
        "walrelay status is not built yet",
        "use init, run or demo",
    ))
}
