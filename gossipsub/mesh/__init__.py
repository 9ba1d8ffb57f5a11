"""The mesh of a topic: who is in it, for how long not, and who stands beside it."""
