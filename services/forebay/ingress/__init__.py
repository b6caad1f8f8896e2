"""The ingress: validates and tokenizes requests, appends them to the log, and streams the responses."""
