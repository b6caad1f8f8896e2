"""What it means: pure state machines over events. No I/O, no clock, no randomness, no globals."""
