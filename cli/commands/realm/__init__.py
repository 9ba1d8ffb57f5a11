"""The commands `dep2p realm …`."""
