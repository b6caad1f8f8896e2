"""The core on a recorded log: derive every decision again and say where it goes another way."""
