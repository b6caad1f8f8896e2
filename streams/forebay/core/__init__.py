"""Pure state machines over events: no I/O, no clock, no randomness, no global state."""
