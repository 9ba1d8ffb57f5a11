"""The places of a circuit relay: who gets a reservation or a circuit, and which one gives way. Pure."""
