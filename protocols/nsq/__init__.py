"""NSQ's V2 protocol as a server speaks it, without I/O: commands in, frames out. Rules: docs/reference/nsq.md."""
