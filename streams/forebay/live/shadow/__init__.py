"""Another policy or configuration evaluated on a live log, without any effect on it."""
