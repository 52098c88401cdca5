mod kafka_edge;
