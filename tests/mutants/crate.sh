#!/bin/sh
# crate.sh OUT: the rooms that decide, and the simulation that drives them, as a crate of their own:
# a mutant of them is built in seconds, without a socket's worth of dependencies.
set -eu
tree=$(cd "$(dirname "$0")/../.." && pwd)
out=$1
mkdir -p "$out/src" "$out/tests"
for room in dead_letter error.rs error gap lsn record tail relay wire; do
    case $room in *.rs) from=$room ;; *) [ -d "$tree/src/$room" ] && from=$room || from=$room.rs ;; esac
    rm -rf "${out:?}/src/$from"
    cp -rp "$tree/src/$from" "$out/src/$from"
done
rm -rf "$out/tests/sim"
cp -rp "$tree/tests/sim" "$out/tests/sim"
# What the golden frames mean is no matter of decisions.
sed -i '/^mod golden;/d' "$out/tests/sim/main.rs"
for room in dead_letter error gap lsn record relay tail wire; do
    echo "pub mod $room;"
done >"$out/src/lib.rs"
{
    printf '[package]\nname = "walrelay"\nversion = "0.0.0"\nedition = "2024"\n[dependencies]\n'
    grep -E '^(serde|serde_json|thiserror) ' "$tree/Cargo.toml"
    printf '[dev-dependencies]\n'
    grep -E '^proptest ' "$tree/Cargo.toml"
    printf '[profile.release]\nopt-level = 1\ncodegen-units = 64\n[workspace]\n'
} >"$out/Cargo.toml"
cp "$tree/Cargo.lock" "$out/Cargo.lock"
