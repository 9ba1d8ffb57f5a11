"""The commands `dep2p stream …`."""
