#!/bin/sh
# Installs what a Debian-like machine lacks for one of our jobs, as root; else names it.
#
#   tests/servers/install.sh build [servers] [bench]
set -eu

missing=
lacks() { missing="$missing $*"; }
has() { command -v "$1" >/dev/null 2>&1; }
# One Python that has them all; Debian's packages are of Debian's own.
has_python_with() {
    for python in /usr/bin/python3 python3; do
        "$python" -c "import $1" >/dev/null 2>&1 && return
    done
    return 1
}

for job in "$@"; do
    case $job in
    build)
        # OpenSSL's headers are found through pkg-config; librdkafka's build wants a C++ compiler.
        has pkg-config || lacks pkg-config
        { has pkg-config && pkg-config --exists openssl; } || lacks libssl-dev
        { has cc && has c++ && has make; } || lacks build-essential
        ;;
    vendored)
        { has cc && has c++ && has make; } || lacks build-essential
        has perl || lacks perl
        ;;
    servers)
        has java || lacks default-jre-headless
        has mvn || lacks maven
        has xz || lacks xz-utils
        has setpriv || lacks util-linux
        # A pooler in the way (case C03).
        has pgbouncer || [ -x /usr/sbin/pgbouncer ] || lacks pgbouncer
        # The consumer of deploy/consumers in Python.
        has_python_with psycopg2,confluent_kafka || lacks python3-psycopg2 python3-confluent-kafka
        ;;
    bench)
        # pg_recvlogical, which the drain is measured against.
        has pg_recvlogical || ls /usr/lib/postgresql/*/bin/pg_recvlogical >/dev/null 2>&1 ||
            lacks postgresql-client
        ;;
    *)
        echo "install: no such job: $job" >&2
        exit 2
        ;;
    esac
done

if ! has cargo; then
    echo "install: Rust is missing; install it from https://rustup.rs (1.90 or newer)" >&2
    exit 3
fi
[ -n "$missing" ] || exit 0

if [ "$(id -u)" != 0 ] || ! has apt-get; then
    echo "install: missing packages (Debian's names):$missing" >&2
    echo "install: run as root: apt-get update && apt-get install -y$missing" >&2
    exit 3
fi
echo "install: installing$missing" >&2
export DEBIAN_FRONTEND=noninteractive
apt-get update -q >&2
# shellcheck disable=SC2086 # a list of words on purpose
apt-get install -q -y --no-install-recommends $missing >&2
