"""The protocol /yamux/1.0.0: session and stream state without I/O, and the connection on trio."""
