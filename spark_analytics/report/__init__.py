"""The human-readable report: one HTML file with SVG plots, nothing fetched from anywhere."""
