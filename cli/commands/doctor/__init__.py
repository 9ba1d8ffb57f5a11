"""`dep2p doctor`: the checks of an installation and a running daemon."""
