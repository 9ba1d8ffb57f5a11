"""What is measured: the dep2p node, the stock py-libp2p host and raw TCP, behind one interface."""
