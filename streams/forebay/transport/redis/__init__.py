"""The port `Leases` on Redis, and an in-process implementation with the same scripts."""
