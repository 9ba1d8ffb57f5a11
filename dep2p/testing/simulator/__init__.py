"""Whole pub/sub networks under virtual time."""
