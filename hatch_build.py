"""What a build adds: the launch filter that `make wheel` compiled, and for a package index the project's links.

The links need an address: COUNTERPOINT_HOMEPAGE=https://host/owner/counterpoint names the repository when a release is
built. Without it the metadata has no links, and the README there names its pages without linking to them.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

HOMEPAGE = "COUNTERPOINT_HOMEPAGE"
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#|mailto:)([^)\s]+)\)")  # to a file of this repository
PICTURE = re.compile(r"<picture>.*?</picture>\s*|!\[[^\]]*\]\((?!https?:)[^)\s]+\)\s*", re.DOTALL)
IMAGE = re.compile(r"((?:src|srcset)=\"|!\[[^\]]*\]\()(?!https?:)")


class LaunchFilterHook(BuildHookInterface):
    """For wheels: files of build/filter, if `make wheel` left any there, beside the filter's sources."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Name the files; an editable install gets none, since its sources change."""
        folder = Path(self.root) / "build" / "filter"
        if version == "standard" and folder.is_dir():
            build_data["force_include"][str(folder)] = "counterpoint/launch_filter/prebuilt_libraries"


class LinksHook(MetadataHookInterface):
    """Addresses of the project, and a README whose links work where its neighbors are not."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add `urls` and `readme`."""
        homepage = os.environ.get(HOMEPAGE, "").rstrip("/")
        if homepage and not homepage.startswith("https://"):
            raise ValueError(f"{HOMEPAGE} must start with https://; found '{homepage}'. Correct it, or unset it.")
        text = (Path(self.root) / "README.md").read_text("utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": readable_alone(text, homepage, metadata["version"])}
        metadata["urls"] = addresses(homepage)


def addresses(homepage: str) -> dict[str, str]:
    """The project's links, as a package index shows them."""
    if not homepage:
        return {}
    return {
        "Homepage": homepage,
        "Documentation": f"{homepage}/tree/main/docs",
        "Changelog": f"{homepage}/blob/main/CHANGELOG.md",
        "Issues": f"{homepage}/issues",
    }


def readable_alone(text: str, homepage: str, version: str) -> str:
    """The README with its relative links made absolute, at the tag of `version`, or without them."""
    if not homepage:
        return LINK.sub(r"\1", PICTURE.sub("", text))
    text = IMAGE.sub(rf"\1{homepage}/raw/v{version}/", text)
    return LINK.sub(rf"[\1]({homepage}/blob/v{version}/\2)", text)
