"""How this node is reached from outside: what peers say of its addresses, and tests of them by others (AutoNAT)."""
