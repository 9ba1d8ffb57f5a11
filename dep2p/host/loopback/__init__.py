"""Streams from a host to itself, in memory: programs of one node reach each other by the ways that reach members."""
