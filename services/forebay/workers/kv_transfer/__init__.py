"""Transfer of KV blocks between workers: offered under a lease, fetched once, verified, freed."""
