"""Shares of a node among the members that use it: places, turns and quotas. Pure."""
