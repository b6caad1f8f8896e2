"""How events travel: the ports `Log` and `Leases`, and SQLite, Redis and faults behind them."""
