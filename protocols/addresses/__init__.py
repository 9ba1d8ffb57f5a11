"""The addresses of nodes: how far each reaches, and which can be right."""
