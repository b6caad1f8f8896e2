"""The core on a live log: owners and their journal, effects, snapshots and worker admission."""
