"""Raw trace files turned into silver."""
