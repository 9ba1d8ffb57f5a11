"""The `dep2p` command."""
