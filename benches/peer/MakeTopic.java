import java.util.List;
import java.util.Map;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.NewTopic;

/** Makes a topic with four partitions, as the orders have: java -cp 'target/libs/*' MakeTopic.java BROKERS TOPIC. */
public class MakeTopic {
    public static void main(String[] args) throws Exception {
        try (Admin admin = Admin.create(Map.of("bootstrap.servers", args[0]))) {
            admin.createTopics(List.of(new NewTopic(args[1], 4, (short) 1))).all().get();
        }
    }
}
