"""Host memory, disks and shared stores of simulated workers."""
