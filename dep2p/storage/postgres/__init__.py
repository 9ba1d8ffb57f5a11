"""Queues in PostgreSQL, of one node alone or shared by several."""
