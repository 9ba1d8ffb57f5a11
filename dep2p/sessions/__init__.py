"""Ordered sessions on trio."""
