"""Steps described in TOML: `load_workload` reads a shipped or a user's file, `workload_names` lists the shipped ones."""

from counterpoint.workloads.reader import (
    build_step,
    load_description,
    load_workload,
    save_template,
    workload_names,
    workload_text,
)

__all__ = ["build_step", "load_description", "load_workload", "save_template", "workload_names", "workload_text"]
