"""The protocol /noise: codec and handshake without I/O, and the session on the socket."""
