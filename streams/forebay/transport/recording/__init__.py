"""The file format of recordings: manifest, checksums, and the writer."""
