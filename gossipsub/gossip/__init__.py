"""Ids of messages announced to peers outside the mesh, and the promises and refusals that answer them."""
