-- Helpers for the writing side, in the outbox's schema. Applied by `walrelay init`, which puts your
-- names in the place of `public.outbox` and of the schema `public`.

-- The same business operation twice gives the same event_id. The body is bound when the function is
-- made, so that no caller's search_path can change what it means.
create function public.outbox_event_id(aggregate_id text, discriminator text) returns uuid
  language sql immutable strict parallel safe
  return md5(aggregate_id || ':' || discriminator)::uuid;

-- Writes one event in the caller's transaction and returns its event_id. An event_id that is there
-- already is left alone: the operation was done before. The body is text on purpose: a bound one
-- would stand in the way of every later `alter table ... drop column`.
create function public.outbox_emit(
  aggregate_type text,
  aggregate_id   text,
  event_type     text,
  payload        jsonb,
  headers        jsonb default '{}',
  event_id       uuid  default gen_random_uuid()
) returns uuid
  language sql volatile
  set search_path = pg_catalog, pg_temp
  as $emit$
    insert into public.outbox (event_id, aggregate_type, aggregate_id, event_type, payload, headers)
    values ($6, $1, $2, $3, $4, $5)
    on conflict (event_id) do nothing;
    select $6;
  $emit$;
