"""Sessions through the daemon: those that a program opens, and those that it serves."""
