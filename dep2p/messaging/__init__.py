"""Request, notify, broadcast and message streams."""
