"""Steps described in TOML: `load_workload` reads a shipped or a user's file, `workload_names` lists the shipped ones."""

from counterpoint.workloads.reader import build_step, load_description, load_workload, workload_names

__all__ = ["build_step", "load_description", "load_workload", "workload_names"]
