"""The sides of a comparison: the dep2p node, the stock py-libp2p host and raw TCP, behind one interface."""
