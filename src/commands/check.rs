//! `walrelay check`.

use crate::config::CheckConfig;
use crate::error::Failure;

/// # Errors
/// It is not built yet.
pub async fn run(config: CheckConfig) -> Result<(), Failure> {
    drop(config);
    Err(Failure::usage(
        "walrelay check is not built yet",
        "use init, run or demo",
    ))
}
