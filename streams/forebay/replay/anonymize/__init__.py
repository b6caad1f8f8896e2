"""Anonymised copies of recordings, in which every decision is derived as in the original."""
