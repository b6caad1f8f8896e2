"""The port `Leases` on Redis, and its embedded twin."""
