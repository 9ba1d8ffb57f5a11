"""Clock readings and the back-off of reconnects. Pure."""
