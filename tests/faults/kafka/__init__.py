"""Stand-ins for the clients of aiokafka, on the partitions of a simulated broker."""
