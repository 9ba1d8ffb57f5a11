"""The control API: the application, its context, its routing, and the fields of requests."""
