"""control_api."""
