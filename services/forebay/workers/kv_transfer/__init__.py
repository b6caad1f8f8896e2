"""Transfer of KV blocks between workers: a holder offers blocks for a limited time, and one reader fetches them."""
