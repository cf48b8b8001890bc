"""Puts the launch filter that `make wheel` compiled into the wheel. Other builds carry the sources alone, as ever."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class LaunchFilterHook(BuildHookInterface):
    """For wheels: files of build/filter, if `make wheel` left any there, beside the filter's sources."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Name the files; an editable install gets none, since its sources change."""
        folder = Path(self.root) / "build" / "filter"
        if version == "standard" and folder.is_dir():
            build_data["force_include"][str(folder)] = "counterpoint/launch_filter/prebuilt_libraries"
