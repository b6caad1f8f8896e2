"""Mock engine: imitates the timing and the cache of a real engine. Its output depends on every byte of fetched KV."""
