"""Tables and figures, computed from silver."""
