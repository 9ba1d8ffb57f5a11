"""The commands `dep2p queue …`."""
