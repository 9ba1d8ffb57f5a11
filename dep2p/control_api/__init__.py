"""The common part of the daemon and its clients: the encodings of requests and responses."""
