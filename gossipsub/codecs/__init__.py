"""The two wires of the router: the realm's and libp2p's."""
