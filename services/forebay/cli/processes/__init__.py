"""What serves: everything in one process, or each part in its own."""
