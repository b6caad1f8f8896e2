"""`forebay tiers`: inspect, verify and purge stores of KV blocks."""
