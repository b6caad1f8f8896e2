"""Picker: an external processor of Envoy that sends each request to the server that the owner selects."""
