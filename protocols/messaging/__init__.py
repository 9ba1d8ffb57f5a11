"""Request and response, notify, streams, admission, file transfer. Pure."""
