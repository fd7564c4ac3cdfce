-- The outbox table. Applied by `walrelay init`, which puts your names in the place of
-- `public.outbox`; as it stands, this file runs in psql with the default ones.

create table public.outbox (
  id             bigint generated always as identity primary key,
  event_id       uuid        not null unique,          -- the consumer's dedupe key, minted by the writer
  aggregate_type text        not null,                 -- chooses the topic
  aggregate_id   text        not null,                 -- the Kafka key
  event_type     text        not null,
  payload        jsonb,                                -- null = tombstone; json, text, bytea do as well
  headers        jsonb       not null default '{}',    -- become record headers
  created_at     timestamptz not null default now(),
  xid            xid8        not null default pg_current_xact_id()
);

comment on column public.outbox.xid is
  'Top-level transaction id, right under savepoints too: what retention and gap recovery go by. Leave it to its default.';

-- Rows are only ever appended and, once streamed, deleted in batches from the old end. Fractions of
-- a table that may hold a day of events would let a day of dead rows pile up, hence fixed counts.
-- Frequent vacuums also keep the BRIN index summarised.
alter table public.outbox set (
  autovacuum_vacuum_scale_factor = 0,
  autovacuum_vacuum_threshold = 10000,
  autovacuum_vacuum_insert_scale_factor = 0,
  autovacuum_vacuum_insert_threshold = 50000,
  autovacuum_analyze_scale_factor = 0,
  autovacuum_analyze_threshold = 50000
);

-- Tens of kilobytes for millions of rows. xid8 itself has no BRIN operator class; ids grow with the
-- table, so that block ranges stay narrow.
create index on public.outbox using brin ((xid::text::bigint)) with (autosummarize = on);

-- High volume: the same table, range-partitioned by day. Retention then drops partitions instead of
-- deleting rows. Postgres wants the partition key in every unique constraint, so `event_id` is
-- unique a day, and the guard that a deterministic event_id gives is per day as well
-- (`walrelay init` then makes outbox_emit with a bare `on conflict do nothing`).
-- Making partitions ahead of time is the job of pg_partman or of a scheduled statement.
--
--   create table public.outbox (
--     id             bigint generated always as identity,   -- 15, 16: bigint not null default nextval('...')
--     event_id       uuid        not null,
--     aggregate_type text        not null,
--     aggregate_id   text        not null,
--     event_type     text        not null,
--     payload        jsonb,
--     headers        jsonb       not null default '{}',
--     created_at     timestamptz not null default now(),
--     xid            xid8        not null default pg_current_xact_id(),
--     primary key (id, created_at),
--     unique (event_id, created_at)
--   ) partition by range (created_at);
--   create index on public.outbox using brin ((xid::text::bigint)) with (autosummarize = on);
--   create table public.outbox_2030_01_01 partition of public.outbox
--     for values from ('2030-01-01 00:00+00') to ('2030-01-02 00:00+00');
--   -- storage parameters belong on the partitions:
--   alter table public.outbox_2030_01_01 set (autovacuum_vacuum_insert_scale_factor = 0,
--     autovacuum_vacuum_insert_threshold = 50000);
