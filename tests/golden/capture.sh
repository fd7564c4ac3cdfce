#!/bin/sh
# Captures pgoutput frames from a real server: tests/golden/pgVERSION.bin.
#
#   tests/golden/capture.sh VERSION BINDIR      (BINDIR holds initdb and pg_ctl; psql is on the PATH)
#
# Each frame is its LSN (8 bytes), its length (4 bytes), its bytes, all big-endian. What they mean is
# written beside them, and read by a person, after
#
#   GOLDEN_BLESS=1 cargo test --release --test sim golden
#
# Postgres refuses to run as root: this changes to the user postgres then.
set -eu

version=$1
bin=$2
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d /tmp/golden.XXXXXX)
chmod 777 "$work"
as() { if [ "$(id -u)" = 0 ]; then runuser -u postgres -- "$@"; else "$@"; fi; }
stop() {
    as "$bin/pg_ctl" -D "$work/data" -m immediate stop >/dev/null 2>&1 || true
    rm -rf "$work"
}
trap stop EXIT

as "$bin/initdb" -D "$work/data" -U postgres -A trust -E UTF8 --no-locale >/dev/null
cat >>"$work/data/postgresql.conf" <<CONF
wal_level = logical
listen_addresses = ''
unix_socket_directories = '$work'
timezone = 'UTC'
CONF
as "$bin/pg_ctl" -D "$work/data" -l "$work/log" -w start >/dev/null
sql() { psql -X -q -v ON_ERROR_STOP=1 -h "$work" -U postgres -d postgres "$@"; }

sql <<'SQL'
create type mood as enum ('glad', 'sad');
create table outbox (id bigint primary key, event_id uuid, body jsonb, raw bytea, note text);
create table other (id int primary key);
create publication p for table outbox;
select pg_create_logical_replication_slot('s', 'pgoutput') \g /dev/null

-- a row of each kind of value; nothing at all; a megabyte
insert into outbox values (1, '00000000-0000-4000-8000-000000000001', '{"a": [1, "é"]}', '\x00ff', 'text');
insert into outbox (id) values (2);
insert into outbox (id, note) values (3, repeat('x', 1048576));

-- one transaction, one LSN or several
copy outbox (id, note) from stdin;
4	copied
5	\N
6	tab\there
\.

-- what was rolled back is not there
begin;
insert into outbox (id) values (7);
savepoint a;
insert into outbox (id) values (8);
rollback to a;
savepoint b;
insert into outbox (id) values (9);
release b;
commit;

-- the shape changes inside a transaction, with a type of our own
begin;
insert into outbox (id) values (10);
alter table outbox add column mood mood;
insert into outbox (id, mood) values (11, 'sad');
commit;
alter table outbox drop column raw;
insert into outbox (id, mood) values (12, 'glad');

-- nothing of ours
insert into other values (1);
begin;
insert into other values (2);
insert into outbox (id) values (13);
commit;

-- what is passed over
update outbox set note = 'changed' where id = 1;
delete from outbox where id = 2;
truncate outbox;
select pg_logical_emit_message(true, 'prefix', 'said') \g /dev/null
select pg_logical_emit_message(false, 'prefix', 'said at once') \g /dev/null
insert into outbox (id) values (14);
SQL

sql -At -c "
select encode(int8send((lsn - '0/0')::bigint), 'hex') || encode(int4send(length(data)), 'hex')
       || encode(data, 'hex')
from pg_logical_slot_peek_binary_changes('s', null, null,
     'proto_version', '1', 'publication_names', 'p', 'messages', 'true')" |
    xxd -r -p >"$here/pg$version.bin"
ls -l "$here/pg$version.bin"
