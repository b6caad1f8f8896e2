"""The port `Log` on Apache Kafka and Redpanda."""
