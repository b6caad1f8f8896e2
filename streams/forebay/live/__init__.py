"""The core at work on a live log: ownership, the journal, effects, snapshots, admission of workers."""
