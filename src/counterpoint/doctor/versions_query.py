"""Finds the versions of torch and NCCL that an interpreter would import, from metadata and without importing them.

Interpreters in which Counterpoint is not installed also run this file as a script. It therefore needs the standard
library only, and prints its result as JSON. torch's `version.py` is read as text, because the metadata do not always
name the CUDA version.
"""

import json
import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Dict, Optional  # noqa: UP035  Python 3.8 runs this file, too

NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")


def query_versions() -> Dict[str, str]:  # noqa: UP006
    """Return versions by name: torch, torch_cuda, torch_hip, nccl; '' for what is not installed."""
    text = _torch_version_file()
    cuda = _assigned(text, "cuda")
    preferred = "nvidia-nccl-cu" + cuda.split(".")[0]
    packages = sorted(NCCL_PACKAGES, key=lambda package: package != preferred)
    found = [number for number in map(_installed, packages) if number]
    return {
        "torch": _assigned(text, "__version__") or _installed("torch") or "",
        "torch_cuda": cuda,
        "torch_hip": _assigned(text, "hip"),
        "nccl": found[0] if found else "",
    }


def _installed(package: str) -> Optional[str]:  # noqa: UP045
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _torch_version_file() -> str:
    try:
        spec = find_spec("torch")
        if spec is None or spec.origin is None:
            return ""
        return Path(spec.origin).with_name("version.py").read_text()
    except (ImportError, OSError, ValueError):
        return ""


def _assigned(text: str, name: str) -> str:
    """Return the text assigned to a name: `cuda: Optional[str] = '13.0'`; '' for None."""
    found = re.search(r"^{}\b[^=\n]*=\s*['\"]([^'\"]+)['\"]".format(re.escape(name)), text, re.MULTILINE)  # noqa: UP032
    return found.group(1) if found else ""


if __name__ == "__main__":
    print(json.dumps(query_versions()))
