"""Whether others can reach this node, and at which addresses: votes on observed addresses, tests by others. Pure."""
