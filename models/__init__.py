"""Data only: one TOML file per catalogue entry, read by `metachunk_edge.catalogue`."""
