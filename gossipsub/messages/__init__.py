"""Ids of messages that were seen, and the messages that are kept for gossip."""
