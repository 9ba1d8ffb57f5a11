"""libp2p, hardened: the only importer of py-libp2p; here the interface and what all parts share."""
