"""Derive every recorded decision again and report where the result differs."""
