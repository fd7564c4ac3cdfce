#!/bin/sh
# Deliberate breakages, each made in a copy of the sources: some test must see each of them.
# run.sh [NAME ...]   (all of tests/mutants/*.mutant without a name)
set -eu
here=$(cd "$(dirname "$0")" && pwd)
tree=$(cd "$here/../.." && pwd)
work=${MUTANTS_DIR:-${CARGO_TARGET_DIR:-$tree/target}/mutants}
export CARGO_TARGET_DIR="$work/target" CARGO_INCREMENTAL=1
lives=${SIM_SEEDS:-150}
export SIM_BUDGET_SECS="${SIM_BUDGET_SECS:-0}" SIM_SEEDS="$lives"
mkdir -p "$work"
[ $# -gt 0 ] || set -- $(cd "$here" && ls -- *.mutant | sed 's/\.mutant$//')

# The simulation first: most are seen there, and what it does not see the unit tests may.
# A build that fails is no catch.
see() {
    for tests in "--test sim" --lib; do
        # shellcheck disable=SC2086
        cargo test --release --quiet $tests --no-run >"$work/log" 2>&1 || return 2
        # shellcheck disable=SC2086
        cargo test --release --quiet $tests --no-fail-fast >"$work/log" 2>&1 || return 1
    done
}

"$here/crate.sh" "$work/crate"
cd "$work/crate"
echo "without a mutant ..."
see || { tail -40 "$work/log"; echo "the tests fail without any mutant"; exit 1; }

survivors=0
for name in "$@"; do
    mutant="$here/$name.mutant"
    file=$(head -n 1 "$mutant")
    "$here/crate.sh" "$work/crate"
    perl -0777 -e '
        my ($mutant, $file) = @ARGV;
        open my $m, "<", $mutant or die $!; my $text = <$m>;
        open my $f, "<", $file or die $!; my $source = <$f>;
        $text =~ /^<<<<\n(.*?)^====\n(.*?)^>>>>$/ms or die "$mutant: no <<<< ==== >>>>\n";
        my ($old, $new) = ($1, $2);
        chomp $old; chomp $new;
        my $at = index($source, $old);
        die "$mutant: what it breaks is not in $file\n" if $at < 0;
        substr($source, $at, length $old) = $new;
        open my $out, ">", $file or die $!; print $out $source;
    ' "$mutant" "$file"
    # What these break takes a rare coincidence to matter.
    case $name in
    followers-not-parked | purge-forgotten | retry-before-passed | settled-not-passed-over) seeds=3000 ;;
    *) seeds=$lives ;;
    esac
    status=0
    SIM_SEEDS=$seeds
    see || status=$?
    case $status in
    0) printf '%-32s SURVIVES\n' "$name"; survivors=$((survivors + 1)) ;;
    2) tail -20 "$work/log"; echo "$name: does not build"; exit 1 ;;
    *)
        by=$(sed -n 's/^    \([a-z_:0-9]*\)$/\1/p' "$work/log" | sort -u | tr '\n' ' ')
        why=$(sed -n 's/^seed \([0-9]*: .*\)/\1/p' "$work/log" | head -n 1 | cut -c1-90)
        printf '%-32s %s%s\n' "$name" "$by" "${why:+(seed $why)}"
        ;;
    esac
done
"$here/crate.sh" "$work/crate"
[ "$survivors" -eq 0 ] || { echo "$survivors survived: a test is missing"; exit 1; }
