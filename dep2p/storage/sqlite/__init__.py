"""The embedded store: SQLite and segment files."""
