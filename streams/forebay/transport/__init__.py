"""Transport of events: the ports `Log` and `Leases`, and their implementations."""
