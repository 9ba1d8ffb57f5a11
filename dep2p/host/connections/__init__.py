"""Live connections, made from dialled or accepted transports: the table, limits, liveness, identify."""
