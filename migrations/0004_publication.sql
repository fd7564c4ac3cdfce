-- What the slot streams: inserts of the outbox, of nothing else; partitions as their root. Applied by
-- `walrelay init`, which puts your names in the place of `public.outbox` and publication `walrelay`.

create publication walrelay for table only public.outbox
  with (publish = 'insert', publish_via_partition_root = true);
