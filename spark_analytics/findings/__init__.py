"""Findings, derived from the figures of an analysis."""
