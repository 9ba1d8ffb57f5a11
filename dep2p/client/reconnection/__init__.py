"""Feeds, calls and sessions of a client over restarts of its daemon."""
