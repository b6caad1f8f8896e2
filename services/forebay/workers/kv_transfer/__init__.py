"""KV blocks from one worker's memory into another's: offered under a lease, fetched once, verified, given back."""
