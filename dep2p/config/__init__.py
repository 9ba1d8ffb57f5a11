"""The settings of the daemon: where they come from, their values, their checks, their reference page."""
