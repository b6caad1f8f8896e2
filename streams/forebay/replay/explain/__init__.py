"""The timeline of one request, and the reason for each of its decisions."""
