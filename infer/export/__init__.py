"""Heads and EAGLE layers in the formats of other engines: written, read again, compared, described, uploaded."""
