"""One rank on a CPU: it meets the others over gloo, runs the sections that its command line names, and ends at once."""

import os
import sys
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

LIMIT_S = float(os.environ.get("LIMIT_S", "30"))  # a test may set it


def run_sections(sections: Mapping[str, Any], after_each: Callable[[], object] = lambda: None) -> NoReturn:
    """Run functions by name; a job gives its `globals()`. Status 1 and a traceback if one fails."""
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{os.environ['MEETING_FILE']}",
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=timedelta(seconds=LIMIT_S),
        )
        for name in sys.argv[1:]:
            sections[name]()
            after_each()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


def report(name: str) -> None:
    """Tell the test that a section's part holds."""
    print(f"{name}: ok", flush=True)
