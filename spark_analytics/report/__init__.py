"""The report for people: one HTML file with SVG plots, nothing fetched from anywhere."""
