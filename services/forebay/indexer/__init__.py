"""HTTP API of the indexer."""
