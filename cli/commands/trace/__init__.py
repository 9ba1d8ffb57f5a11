"""The commands `dep2p trace …`."""
