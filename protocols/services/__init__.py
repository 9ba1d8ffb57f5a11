"""The pure part of services: which member answers a request, and which program of a node."""
