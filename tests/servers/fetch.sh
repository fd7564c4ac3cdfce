#!/bin/sh
# Fetches the real servers that tests, demo and benches use, as Maven artifacts, and unpacks them.
#
#   tests/servers/fetch.sh [kafka] [postgres] [clients]      (all when none is named)
#
# They land in tests/servers/cache, or in $WALRELAY_SERVERS. A second run does nothing and is quick.
# Postgres refuses to run as root, and another user may not be able to reach this clone: as root its
# binaries are unpacked under /var/tmp and linked from the cache.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
cache=${WALRELAY_SERVERS:-$here/cache}
want=${*:-kafka postgres clients}
# Another pom is another set of servers; the letter is for changes of this script's own layout.
stamp=b-$(cksum <"$here/pom.xml" | tr ' ' '-')

say() { echo "servers: $*" >&2; }

need() {
    command -v "$1" >/dev/null 2>&1 && return
    echo "servers: $1 is missing, it is needed to fetch the test servers" >&2
    echo "servers: install it: apt-get install $2   (or: make deps)" >&2
    exit 3
}

maven() { # profile
    need java default-jre-headless
    need mvn maven
    mvn -q -B -f "$here/pom.xml" -P "$1" -Dcache="$cache" process-resources >&2
}

# The storage of a one-node cluster, formatted once: the tool costs two seconds of a JVM each time.
format_kafka() {
    work=$cache/format.$$
    mkdir -p "$work"
    sed -e "s#@DIR@#$work#" -e 's/@PORT@/19092/' -e 's/@CONTROLLER_PORT@/19093/' \
        "$here/server.properties" >"$work/server.properties"
    java -Xshare:auto -XX:TieredStopAtLevel=1 -cp "$cache/kafka.new/*" \
        -Dlog4j2.configurationFile="$here/log4j2.properties" kafka.tools.StorageTool \
        format -t MkU3OEVBNTcwNTJENDM2Qg -c "$work/server.properties" >"$work/log" 2>&1 ||
        { cat "$work/log" >&2; exit 1; }
    rm -rf "$cache/kafka-storage"
    mv "$work/data" "$cache/kafka-storage"
    rm -rf "$work"
}

# An archive of loaded classes (AppCDS): a broker then starts in half the time. Only a convenience, so
# nothing here may fail the fetch. It names the jars' paths: made where they stay.
archive_kafka() {
    work=$cache/archive.$$
    mkdir -p "$work"
    cp -r "$cache/kafka-storage" "$work/data"
    # Port 0 would do for the broker but not for the controller's voters: an odd pair, for seconds.
    sed -e "s#@DIR@#$work#" -e 's/@PORT@/39192/' -e 's/@CONTROLLER_PORT@/39193/' \
        "$here/server.properties" >"$work/server.properties"
    java -Xms128m -Xmx384m -XX:+UseSerialGC -XX:TieredStopAtLevel=1 \
        -XX:ArchiveClassesAtExit="$work/kafka.jsa" \
        -Dlog4j2.configurationFile="$here/log4j2.properties" \
        -cp "$cache/kafka/*" kafka.Kafka "$work/server.properties" >"$work/log" 2>&1 &
    broker=$!
    for _ in $(seq 60); do
        kill -0 "$broker" 2>/dev/null || break
        grep -q 'Kafka Server started' "$work/log" && break
        sleep 1
    done
    kill "$broker" 2>/dev/null || true
    for _ in $(seq 40); do
        kill -0 "$broker" 2>/dev/null || break
        sleep 1
    done
    # A JVM that does not end has not written its archive whole.
    kill -9 "$broker" 2>/dev/null && rm -f "$work/kafka.jsa"
    wait "$broker" 2>/dev/null || true
    rm -f "$cache/kafka.jsa"
    [ ! -s "$work/kafka.jsa" ] || mv "$work/kafka.jsa" "$cache/kafka.jsa"
    rm -rf "$work"
}

fetch_kafka() {
    [ -e "$cache/kafka/.$stamp" ] && [ -e "$cache/kafka-storage/meta.properties" ] && return
    say "fetching Apache Kafka (43 MB of jars) with Maven into $cache/kafka"
    rm -rf "$cache/kafka.new" "$cache/kafka"
    maven kafka
    format_kafka
    : >"$cache/kafka.new/.$stamp"
    mv "$cache/kafka.new" "$cache/kafka"
    archive_kafka
}

# What the consumers of deploy/consumers need in Java.
fetch_clients() {
    of_clients=$(cksum <"$here/clients.xml" | tr ' ' '-')
    [ -e "$cache/clients/.$of_clients" ] && return
    say "fetching the JDBC driver and a Java compiler (4 MB) with Maven into $cache/clients"
    need java default-jre-headless
    need mvn maven
    rm -rf "$cache/clients.new" "$cache/clients"
    mvn -q -B -f "$here/clients.xml" -Dcache="$cache" process-resources >&2
    : >"$cache/clients.new/.$of_clients"
    mv "$cache/clients.new" "$cache/clients"
}

usable_postgres() { # root of all versions
    [ -e "$1/.$stamp" ] || return 1
    for version in "$1"/[0-9]*; do
        "$version/bin/postgres" --version >/dev/null 2>&1 || return 1
        [ -e "$version/lib/pgoutput.so" ] || [ -e "$version/lib/postgresql/pgoutput.so" ] || return 1
    done
}

fetch_postgres() {
    usable_postgres "$cache/postgres/" && return
    if [ "$(id -u)" = 0 ]; then
        root=/var/tmp/walrelay-servers-$stamp
        # Anyone may have made a directory of that name: only root's own is trusted.
        if [ -e "$root" ] && [ "$(stat -c %u:%A "$root")" != 0:drwxr-xr-x ]; then
            say "$root is not root's own directory: remove it"
            exit 3
        fi
    else
        root=$cache/postgres-$stamp
    fi
    if ! usable_postgres "$root"; then
        need xz xz-utils
        say "fetching Postgres (about 10 MB a version) with Maven and unpacking it into $root"
        rm -rf "$cache/txz" "$root" "$root.$$"
        maven postgres
        for version in "$cache"/txz/[0-9]*; do
            into=$root.$$/${version##*/}
            mkdir -p "$into"
            tar -xJf "$version"/*.txz -C "$into" --no-same-owner
        done
        chmod -R go=u-w "$root.$$"
        chmod 755 "$root.$$"
        : >"$root.$$/.$stamp"
        mv "$root.$$" "$root" 2>/dev/null || usable_postgres "$root"
        rm -rf "$cache/txz" "$root.$$"
    fi
    rm -rf "$cache/postgres"
    ln -sfn "$root" "$cache/postgres"
}

mkdir -p "$cache"
for server in $want; do
    case $server in
    kafka) fetch_kafka ;;
    postgres) fetch_postgres ;;
    clients) fetch_clients ;;
    *)
        echo "servers: no such server: $server (kafka, postgres, clients)" >&2
        exit 2
        ;;
    esac
done
