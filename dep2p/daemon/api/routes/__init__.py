"""The routes: one module per feature, functions only."""
