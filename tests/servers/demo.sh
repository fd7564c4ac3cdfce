#!/bin/sh
# `make demo`: the demo on the machine's own Postgres, or on a fetched one where there is none.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
target=${CARGO_TARGET_DIR:-$here/../../target}

own_postgres() {
    command -v postgres >/dev/null 2>&1 && command -v initdb >/dev/null 2>&1 && return
    for bin in /usr/lib/postgresql/*/bin /usr/pgsql-*/bin /opt/homebrew/opt/postgresql@*/bin; do
        [ -x "$bin/postgres" ] && [ -x "$bin/initdb" ] && return
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
