"""signing."""
