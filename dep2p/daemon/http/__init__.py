"""The HTTP/1.1 server and its listeners."""
