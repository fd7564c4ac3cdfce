#!/usr/bin/env python3
"""A consumer that stays right: each event has its effect once, whatever is killed and whenever.

    psql -f migrations/consumer.sql        # once, in the consumer's database
    CONSUMER=ledger TOPIC=outbox.event.payment BROKERS=... DATABASE_URL=... ./consumer.py

Needs confluent-kafka and psycopg2 (Debian: python3-confluent-kafka python3-psycopg2). Whatever goes
wrong ends the process, and its supervisor starts it again from the last committed offset.
"""
import json
import os
import re
import socket

import psycopg2
from confluent_kafka import Consumer, KafkaException

CONSUMER = os.environ.get("CONSUMER", "ledger")
UUID = re.compile(rb"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)


def effect(cursor, event_id, message):
    """Your work, in the transaction that claims the event."""
    payment = json.loads(message.value())
    cursor.execute(
        "insert into ledger (event_id, payment, cents) values (%s, %s, %s)",
        (event_id, payment["payment"], payment["cents"]),
    )


def event_id_of(message):
    """The one header event_id, or None: offset, key and payload tell nothing about identity."""
    values = [value for name, value in message.headers() or [] if name == "event_id"]
    if len(values) == 1 and values[0] is not None and UUID.fullmatch(values[0]):
        return values[0].decode("ascii")
    return None


def reject(cursor, message):
    """Without an identity it is not "new": it goes to where somebody looks at it."""
    text = [
        [name, None if value is None else value.decode("utf-8", "backslashreplace")]
        for name, value in message.headers() or []
    ]
    cursor.execute(
        "insert into rejected_records (consumer, topic, partition, \"offset\", key, value, headers, reason)"
        " values (%s, %s, %s, %s, %s, %s, %s, 'no readable event_id') on conflict do nothing",
        (CONSUMER, message.topic(), message.partition(), message.offset(),
         message.key(), message.value(), json.dumps(text).replace("\\u0000", "\\\\x00")),
    )


def process(database, message):
    with database, database.cursor() as cursor:  # one transaction: committed at its end, or rolled back
        event_id = event_id_of(message)
        if event_id is None:
            reject(cursor, message)
            return
        cursor.execute("select claim_event(%s, %s)", (CONSUMER, event_id))
        if cursor.fetchone()[0]:
            effect(cursor, event_id, message)


def main():
    consumer = Consumer({
        "bootstrap.servers": os.environ["BROKERS"],
        "group.id": CONSUMER,
        # A restarted consumer has its partitions back at once, and not after session.timeout.ms.
        "group.instance.id": os.environ.get("INSTANCE", f"{CONSUMER}-{socket.gethostname()}"),
        "enable.auto.commit": False,
        "auto.offset.reset": "earliest",
    })
    consumer.subscribe([os.environ["TOPIC"]])
    database = psycopg2.connect(os.environ["DATABASE_URL"])
    while True:
        message = consumer.poll(1.0)
        if message is None:
            continue
        if message.error():
            raise KafkaException(message.error())
        process(database, message)
        # After the database's commit, never before: a record that comes again is skipped, one that
        # does not come again is lost.
        consumer.commit(message=message, asynchronous=False)


if __name__ == "__main__":
    main()
