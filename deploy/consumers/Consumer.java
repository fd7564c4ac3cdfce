import java.nio.charset.StandardCharsets;
import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.UUID;
import java.util.regex.Pattern;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;

/**
 * A consumer that stays right: each event has its effect once, whatever is killed and whenever.
 *
 * <pre>
 * psql -f migrations/consumer.sql        # once, in the consumer's database
 * CONSUMER=ledger TOPIC=outbox.event.payment BROKERS=... JDBC_URL=jdbc:postgresql://... java -cp ... Consumer
 * </pre>
 *
 * Needs kafka-clients and the PostgreSQL JDBC driver. Whatever goes wrong ends the process, and its
 * supervisor starts it again from the last committed offset.
 */
public final class Consumer {
    private static final String CONSUMER = System.getenv().getOrDefault("CONSUMER", "ledger");
    private static final Pattern UUID_TEXT =
            Pattern.compile("[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}");

    /** Your work, in the transaction that claims the event. */
    private static void effect(Connection database, UUID eventId, ConsumerRecord<byte[], byte[]> record)
            throws SQLException {
        try (PreparedStatement insert = database.prepareStatement(
                "insert into ledger (event_id, payment, cents)"
                        + " select ?, (body->>'payment')::bigint, (body->>'cents')::bigint"
                        + " from (select ?::jsonb as body) as event")) {
            insert.setObject(1, eventId);
            insert.setString(2, new String(record.value(), StandardCharsets.UTF_8));
            insert.executeUpdate();
        }
    }

    /** The one header event_id, or null: offset, key and payload tell nothing about identity. */
    private static UUID eventIdOf(ConsumerRecord<byte[], byte[]> record) {
        List<Header> headers = new ArrayList<>();
        record.headers().headers("event_id").forEach(headers::add);
        if (headers.size() != 1 || headers.get(0).value() == null) {
            return null;
        }
        String text = new String(headers.get(0).value(), StandardCharsets.ISO_8859_1);
        return UUID_TEXT.matcher(text).matches() ? UUID.fromString(text) : null;
    }

    /** Without an identity it is not "new": it goes to where somebody looks at it. */
    private static void reject(Connection database, ConsumerRecord<byte[], byte[]> record)
            throws SQLException {
        List<String> names = new ArrayList<>();
        List<String> values = new ArrayList<>();
        for (Header header : record.headers()) {
            names.add(header.key());
            values.add(header.value() == null
                    ? null : new String(header.value(), StandardCharsets.UTF_8).replace("\0", "\\x00"));
        }
        try (PreparedStatement insert = database.prepareStatement(
                "insert into rejected_records"
                        + " (consumer, topic, partition, \"offset\", key, value, headers, reason)"
                        + " select ?, ?, ?, ?, ?, ?, (select coalesce(jsonb_agg(jsonb_build_array(name, value)), '[]')"
                        + "   from unnest(?::text[], ?::text[]) as header(name, value)), 'no readable event_id'"
                        + " on conflict do nothing")) {
            insert.setString(1, CONSUMER);
            insert.setString(2, record.topic());
            insert.setInt(3, record.partition());
            insert.setLong(4, record.offset());
            insert.setBytes(5, record.key());
            insert.setBytes(6, record.value());
            insert.setArray(7, database.createArrayOf("text", names.toArray()));
            insert.setArray(8, database.createArrayOf("text", values.toArray()));
            insert.executeUpdate();
        }
    }

    private static boolean claim(Connection database, UUID eventId) throws SQLException {
        try (PreparedStatement claim = database.prepareStatement("select claim_event(?, ?)")) {
            claim.setString(1, CONSUMER);
            claim.setObject(2, eventId);
            try (ResultSet answer = claim.executeQuery()) {
                answer.next();
                return answer.getBoolean(1);
            }
        }
    }

    /** One transaction. Where it throws, the process ends, and Postgres rolls back. */
    private static void process(Connection database, ConsumerRecord<byte[], byte[]> record)
            throws SQLException {
        UUID eventId = eventIdOf(record);
        if (eventId == null) {
            reject(database, record);
        } else if (claim(database, eventId)) {
            effect(database, eventId, record);
        }
        database.commit();
    }

    public static void main(String[] args) throws Exception {
        Map<String, Object> settings = Map.of(
                "bootstrap.servers", System.getenv("BROKERS"),
                "group.id", CONSUMER,
                // A restarted consumer has its partitions back at once, and not after session.timeout.ms.
                "group.instance.id", System.getenv().getOrDefault("INSTANCE",
                        CONSUMER + "-" + java.net.InetAddress.getLocalHost().getHostName()),
                "enable.auto.commit", "false",
                "auto.offset.reset", "earliest",
                "key.deserializer", ByteArrayDeserializer.class,
                "value.deserializer", ByteArrayDeserializer.class);
        try (KafkaConsumer<byte[], byte[]> consumer = new KafkaConsumer<>(settings);
                Connection database = DriverManager.getConnection(System.getenv("JDBC_URL"))) {
            database.setAutoCommit(false);
            consumer.subscribe(List.of(System.getenv("TOPIC")));
            while (true) {
                for (ConsumerRecord<byte[], byte[]> record : consumer.poll(Duration.ofSeconds(1))) {
                    process(database, record);
                    // After the database's commit, never before: a record that comes again is
                    // skipped, one that does not come again is lost.
                    consumer.commitSync(Map.of(
                            new TopicPartition(record.topic(), record.partition()),
                            new OffsetAndMetadata(record.offset() + 1)));
                }
            }
        }
    }
}
