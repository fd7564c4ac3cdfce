#!/bin/sh
# cargo-mutants over the rooms that decide, in the copy that run.sh uses. EVERY_FILES is a pattern of
# files (src/relay/ledger.rs); what is missed is listed, and has to be explained or killed.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
tree=$(cd "$here/../.." && pwd)
work=${MUTANTS_DIR:-${CARGO_TARGET_DIR:-$tree/target}/mutants}
mkdir -p "$work"
"$here/crate.sh" "$work/crate"
cd "$work/crate"
for pattern in ${EVERY_FILES:-src/relay/** src/wire/**}; do
    set -- "$@" --file "$pattern"
done
SIM_BUDGET_SECS=0 exec cargo mutants --output "$work" --baseline run --cargo-arg=--release "$@"
