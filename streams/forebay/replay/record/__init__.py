"""Select and copy the slice of a log that a recording needs."""
