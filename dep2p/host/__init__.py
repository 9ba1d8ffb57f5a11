"""libp2p, hardened: the only importer of py-libp2p."""
