-- For the consumer's own database: what makes an effect happen once, however often its event comes.
-- walrelay does not run this; put it beside the tables that your effects go to, in a schema that is
-- first on the consumer's search_path. Any Postgres from 14 on; it needs nothing of walrelay.
--
--   begin;
--   select claim_event('ledger', '5f0c…');   -- the record's header event_id
--   -- true: do the effect, here. false: it was done before: leave it.
--   commit;
--   -- and only then commit the offset
--
-- Claim and effect in ONE transaction: a claim that is committed by itself loses the effect when the
-- consumer dies in between.

create table processed_events (
  consumer     text        not null,       -- each effect has a name: two consumers of one database do not share claims
  event_id     uuid        not null,       -- text, here and below, for an outbox whose event_id is no uuid
  processed_at timestamptz not null default now(),
  primary key (consumer, event_id)
);

create index processed_events_age on processed_events (processed_at);

comment on table processed_events is
  'Events whose effect is committed. Pruned by prune_processed_events, never below the replay window.';

-- Is the event ours to process? Where another transaction holds the same claim this one waits for
-- its end: false if that one committed, true if it was rolled back. No unique violation comes out of
-- it. Under REPEATABLE READ or SERIALIZABLE the one who waited may get a serialization failure
-- (40001) instead of false, as everywhere there: repeat the transaction.
create function claim_event(consumer text, event_id uuid) returns boolean
  language sql volatile strict
  begin atomic
    with claimed as (
      insert into processed_events (consumer, event_id)
      values (claim_event.consumer, claim_event.event_id)
      on conflict do nothing
      returning 1
    )
    select exists (select from claimed);
  end;

-- How long claims are kept. An event may come again for as long as somebody can replay it: from the
-- topic (its retention.ms, or for ever if it is compacted), or from the outbox (walrelay's
-- --retention). The longer of the two is the replay window.
create table processed_events_policy (
  the_only_row  boolean  primary key default true check (the_only_row),
  replay_window interval not null,
  retention     interval not null,
  constraint retention_covers_the_replay_window check (retention >= replay_window)
);

insert into processed_events_policy (replay_window, retention) values ('7 days', '30 days');

-- Deletes what is older than `keep` (the policy's retention), and commits after each batch: call it
-- outside a transaction, from cron or pg_cron. Gives the number of claims deleted.
--
--   call prune_processed_events();
create procedure prune_processed_events(
  keep          interval default null,
  batch         integer  default 5000,
  inout deleted bigint   default 0
)
  language plpgsql
  as $prune$
  declare
    policy    processed_events_policy;
    oldest    timestamptz;
    this_time bigint;
  begin
    select * into strict policy from processed_events_policy;
    keep := coalesce(keep, policy.retention);
    if keep < policy.replay_window then
      raise exception 'claims of the last % are needed: keeping % would let a replay repeat effects',
          policy.replay_window, keep
        using errcode = 'invalid_parameter_value',
          hint = 'Keep them for at least as long, or shorten replay_window in processed_events_policy if nothing older can come again.';
    end if;
    if batch is null or batch < 1 then
      raise exception 'batch must be at least 1' using errcode = 'invalid_parameter_value';
    end if;
    oldest := now() - keep;
    deleted := 0;
    loop
      delete from processed_events
        where ctid = any (array(
          select ctid from processed_events where processed_at < oldest
          order by processed_at limit batch for update skip locked));
      get diagnostics this_time = row_count;
      deleted := deleted + this_time;
      commit;
      exit when this_time = 0;
    end loop;
  end
  $prune$;

-- The consumer's own dead letters: records that carry no readable event_id, so that nobody can tell
-- whether they were processed before. They are kept, once each, for somebody to look at.
create table rejected_records (
  consumer    text        not null,
  topic       text        not null,
  partition   integer     not null,
  "offset"    bigint      not null,
  key         bytea,
  value       bytea,
  headers     jsonb       not null default '[]',   -- [[name, value], ...]; bytes that are no UTF-8 as \xNN
  reason      text        not null,
  rejected_at timestamptz not null default now(),
  primary key (consumer, topic, partition, "offset")
);
