"""The ingress: validates and tokenises requests, appends them to the log, and streams the responses."""
