"""The sources of peer addresses."""
