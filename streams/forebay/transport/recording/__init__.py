"""File format of recordings: manifest, checksums and writer."""
