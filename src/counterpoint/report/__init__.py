"""Reports: how values are shown to people."""
