"""Policies and router options, as a command line or a file names them."""
