"""Where queues and outboxes are kept: memory, SQLite, PostgreSQL, Redis."""
