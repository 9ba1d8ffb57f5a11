"""Trio shells that drive the pure cores."""
