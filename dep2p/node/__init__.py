"""The composition: the Node, its public API by feature, its services, its tracer."""
