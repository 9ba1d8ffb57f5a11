"""The state of the router, and the effects that it has not yet returned."""
