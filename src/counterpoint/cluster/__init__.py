"""Clusters: one training step on many nodes, described in TOML and estimated without a GPU."""
