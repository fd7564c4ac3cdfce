-- What walrelay itself keeps, in the same database on purpose: what is lost with it is lost
-- together with what it describes. Everything a running relay writes here it writes on the session
-- that holds the leader's lock, with synchronous_commit = on.

create schema walrelay;

comment on schema walrelay is 'State of walrelay, the outbox relay: made by `walrelay init`.';

-- The registry: one row an outbox table.
create table walrelay.relay (
  table_oid         oid         primary key,           -- publications follow the oid, not the name
  table_name        text        not null,              -- what it was called then: a swap is told from a second table by it
  slot_name         text        not null unique,
  publication       text        not null unique,
  system_identifier text,                              -- the cluster that the slot was made in
  timeline          integer,
  slot_generation   bigint      not null default 0,    -- grows with each slot that is made
  lower_bound       pg_snapshot,                       -- the first slot's snapshot: rows visible in it were never in the stream
  consistent_point  pg_lsn,                            -- the present slot's
  coverage          jsonb,                             -- what the publication covered when the slot was made
  made_table        boolean     not null,              -- init made the table: nobody but retention deletes from it
  intent            jsonb,                             -- a slot is being made: not null until the row describes it
  heal              jsonb,                             -- a gap is being healed: what is proved (s0), the new slot's snapshot (s1), how far
  leader            text,                              -- process id (a uuid) of who led last
  lead_changes      bigint      not null default 0,    -- how often the lead has passed from one process to another
  -- The last clean stop; erased before the first status that passes it.
  stop_commit_lsn   pg_lsn,                            -- W: the last transaction delivered
  stop_xid          bigint,
  stop_commit_time  bigint,                            -- microseconds since 2000-01-01, exact
  stop_reported     pg_lsn,                            -- highest flush position reported on this slot
  stop_complete     boolean,                           -- all that was taken had been delivered
  stop_open         jsonb,                             -- a transaction of which only the beginning was taken: where to go on in it
  -- The event that stopped the relay: a restart sends it alone.
  halted_event      text,
  halted_generation bigint,
  halted_reason     text,
  tripped_topics    jsonb       not null default '{}', -- breaker: {"topic": {"reason", "message", "since", "park_asked"}}
  dead_letters_touched bigint   not null default 0,    -- grows with each change by hand; the leader looks each second
  created_at        timestamptz not null default now(),
  updated_at        timestamptz not null default now()
);

-- A fence under way: a row here and, in the same transaction, an insert and a delete of its
-- event_id in the outbox, to ride the stream. Deleted when it has passed.
create table walrelay.fence (
  event_id        uuid        primary key,
  table_oid       oid         not null references walrelay.relay on delete cascade,
  slot_generation bigint      not null,
  xid             xid8        not null default pg_current_xact_id(),
  snapshot        pg_snapshot not null default pg_current_snapshot(),
  coverage        jsonb       not null,                -- what the publication covered, read by the same statement
  created_at      timestamptz not null default clock_timestamp()
);

-- The last fence that passed: every row visible in its snapshot that the stream was bound to carry
-- has been delivered (or parked).
create table walrelay.checkpoint (
  table_oid       oid         primary key references walrelay.relay on delete cascade,
  slot_generation bigint      not null,
  snapshot        pg_snapshot not null,
  coverage        jsonb       not null,
  fence_event_id  uuid        not null,
  commit_lsn      pg_lsn      not null,                -- of the fence's transaction
  fenced_at       timestamptz not null,                -- when the snapshot was taken
  stored_at       timestamptz not null default now()
);

-- Events that could not be published, and what queues behind them. Exact bytes: what is retried is
-- what would have been sent.
create table walrelay.dead_letter (
  id                 bigint      generated always as identity primary key,
  table_oid          oid         not null references walrelay.relay,
  event_id           text        not null,             -- text: a mapped table's may be of any type
  -- The key: it is parked whole. aggregate_id null has no order and is parked alone.
  aggregate_type     text,
  aggregate_id       text,
  -- Short whatever the key's length: a key may be longer than an index entry.
  key_hash           uuid        generated always as (case when aggregate_id is not null then
                       md5(coalesce(octet_length(aggregate_type)::text, '-') || ':'
                         || coalesce(aggregate_type, '') || aggregate_id)::uuid end) stored,
  -- The position; a key's rows are published in this order. COPY rows share an LSN, hence the ordinal.
  slot_generation    bigint      not null,
  commit_lsn         pg_lsn      not null,
  ordinal            bigint      not null,             -- insert's number in its transaction, from 0
  xid                bigint,                           -- as the stream carries it (32 bits)
  commit_time        timestamptz,
  -- The record.
  topic              text        not null,
  partition          integer,                          -- only where a column chose it
  key                bytea,
  value              bytea,                            -- null: tombstone, unless value_in_table
  value_in_table     boolean     not null default false, -- too large to keep twice: retention keeps the row
  header_names       text[]      not null default '{}',
  header_values      bytea[]     not null default '{}', -- a null element is Kafka's null
  timestamp_ms       bigint,                           -- null: the time of sending
  -- Why.
  reason             text        not null,             -- too_large, invalid_topic, malformed_row, refused, behind, by_hand, ...
  error_code         integer,                          -- Kafka's
  error_message      text,
  attempts           integer     not null default 0,
  -- What becomes of it.
  status             text        not null default 'parked'
                     check (status in ('parked', 'delivered', 'discarded')),
  retry_requested_at timestamptz,                      -- set by the CLI, cleared by a failure
  retry_requested_by text,
  parked_at          timestamptz not null default now(),
  settled_at         timestamptz,
  settled_by         text,                             -- role that discarded; null: the relay delivered
  settled_lsn        pg_lsn,                           -- kept until the slot's restart_lsn and a checkpoint have passed it
  check (cardinality(header_names) = cardinality(header_values)),
  check ((status = 'parked') = (settled_at is null))
);

-- An event has one dead letter. Per table: two outboxes may number their events alike. An id that is
-- too long for an index entry is known by its md5.
create unique index dead_letter_event on walrelay.dead_letter
  (table_oid, (case when octet_length(event_id) <= 2000 then event_id else md5(event_id) end));
-- The parked keys, read at every take-over, each from its first row on; walked by a retry.
create index dead_letter_parked on walrelay.dead_letter
  (table_oid, key_hash, slot_generation, commit_lsn, ordinal) where status = 'parked';
create index dead_letter_retry on walrelay.dead_letter
  (table_oid, key_hash) where status = 'parked' and retry_requested_at is not null;
-- What is passed over when it comes again, by position.
create index dead_letter_passed on walrelay.dead_letter
  (table_oid, slot_generation, commit_lsn, id) where status <> 'parked' or aggregate_id is null;
create index dead_letter_settled on walrelay.dead_letter
  (table_oid, settled_lsn) where status <> 'parked';
