#!/bin/sh
# `make demo`: the demo on the machine's own Postgres, or on a fetched one where there is none.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
target=${CARGO_TARGET_DIR:-$here/../../target}

# As the demo itself looks: on PATH, then in the usual places, versions 15 to 18.
own_postgres() {
    for postgres in "$(command -v postgres || true)" /usr/lib/postgresql/*/bin/postgres \
        /usr/pgsql-*/bin/postgres /usr/local/pgsql/bin/postgres \
        /opt/homebrew/opt/postgresql@*/bin/postgres /usr/local/opt/postgresql@*/bin/postgres; do
        [ -x "$postgres" ] && [ -x "${postgres%/*}/initdb" ] || continue
        case $("$postgres" --version 2>/dev/null) in
        *" 15"* | *" 16"* | *" 17"* | *" 18"*) return ;;
        esac
    done
    return 1
}

case " $* " in
*" --pg-bin"*) ;;
*)
    if ! own_postgres; then
        echo "demo: no Postgres server on this machine: fetching one" >&2
        "$here/install.sh" servers
        "$here/fetch.sh" postgres
        cache=${WALRELAY_SERVERS:-$here/cache}
        set -- --pg-bin "$cache/postgres/18/bin" "$@"
    fi
    ;;
esac
exec "$target/release/walrelay" demo "$@"
