"""realm."""
