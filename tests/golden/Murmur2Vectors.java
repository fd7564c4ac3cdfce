import java.io.ByteArrayOutputStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HexFormat;
import java.util.List;
import java.util.Random;
import org.apache.kafka.common.utils.Utils;

/**
 * Prints murmur2.tsv: keys, what Kafka's own Java client hashes them to, and the partitions that its
 * default partitioner chooses of 1, 3, 6, 12 and 100.
 *
 *   java -cp 'tests/servers/cache/kafka/*' tests/golden/Murmur2Vectors.java > tests/golden/murmur2.tsv
 */
public class Murmur2Vectors {
    static final int[] PARTITIONS = {1, 3, 6, 12, 100};

    public static void main(String[] args) {
        StringBuilder head = new StringBuilder("# key (hex)\tmurmur2");
        for (int n : PARTITIONS) head.append("\tof ").append(n);
        System.out.println(head);
        for (byte[] key : keys()) {
            int hash = Utils.murmur2(key);
            StringBuilder line = new StringBuilder(HexFormat.of().formatHex(key)).append('\t').append(hash);
            for (int n : PARTITIONS) line.append('\t').append(Utils.toPositive(hash) % n);
            System.out.println(line);
        }
    }

    static List<byte[]> keys() {
        List<byte[]> keys = new ArrayList<>();
        String[] texts = {
            "", "a", "ab", "abc", "abcd", "abcde", "order-1", "order-2", "-5", "ab    ", "true", "t",
            "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", "café", "né", "ключ", "鍵", "😀", "a\tb\n\"q\" 😀é",
            "\u0000", "\u0000\u0000\u0000\u0000", " ", "customer:42", "9223372036854775807",
        };
        for (String text : texts) keys.add(text.getBytes(StandardCharsets.UTF_8));
        keys.add(new byte[] {(byte) 'c', (byte) 'a', (byte) 'f', (byte) 0xe9});
        // Every single byte: where a signed char would show.
        for (int b = 0; b < 256; b++) keys.add(new byte[] {(byte) b});
        Random random = new Random(42);
        // Every length up to 64, so that each tail of 0 to 3 bytes comes often, then some long ones.
        for (int length = 1; length <= 64; length++)
            for (int i = 0; i < 4; i++) keys.add(bytes(random, length));
        for (int length : new int[] {100, 127, 128, 255, 256, 257, 1000, 1023, 1024, 4099})
            for (int i = 0; i < 2; i++) keys.add(bytes(random, length));
        for (int i = 0; i < 60; i++) {
            ByteArrayOutputStream text = new ByteArrayOutputStream();
            int points = 1 + random.nextInt(12);
            for (int p = 0; p < points; p++) {
                int point;
                do point = random.nextInt(0x110000); while (point >= 0xd800 && point < 0xe000);
                text.writeBytes(new String(Character.toChars(point)).getBytes(StandardCharsets.UTF_8));
            }
            keys.add(text.toByteArray());
        }
        return keys;
    }

    static byte[] bytes(Random random, int length) {
        byte[] bytes = new byte[length];
        random.nextBytes(bytes);
        return bytes;
    }
}
