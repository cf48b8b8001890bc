"""A folder with everything the launch filter needs, for containers whose image lacks Counterpoint, and its counts.

Such a job does not run under `counterpoint run`: a launcher sets LD_PRELOAD and the variable with the folder. Its plan
applies to launches only, no guard runs, and ranks do not report to each other. Processes map their count files from the
folder, so it must be on one host.
"""

import shutil
from pathlib import Path

import msgspec
from msgspec.structs import replace

from counterpoint.errors import LaunchFilterError, PlanError, say
from counterpoint.integrations.paths import LIBRARY
from counterpoint.launch_filter.control_block import INITIAL_BLOCK, ControlBlock
from counterpoint.launch_filter.library import filter_library
from counterpoint.launch_filter.places import file_system_of
from counterpoint.launch_filter.rules import Translation
from counterpoint.supervised.process import Ended
from counterpoint.supervised.run import RunOutcome, RunRequest, check_plan, outcome_of
from counterpoint.supervised.settings import SETTINGS_FILE, read_settings, write_settings
from counterpoint.value import require, write_json, write_whole

TRANSLATION_FILE = "translation.json"


def fill_folder(folder: Path, request: RunRequest) -> Path:
    """Put the library and the plan's rules into an empty or new folder of this host; return the library's path in it.

    Raises `LaunchFilterError` for an unusable folder, `PlanError` for a plan that needs more than the filter, or of which
    nothing would take effect.
    """
    require(request.is_filtered, PlanError, "The plan leaves everything as it is, so a job needs no folder. Start it alone.")
    asked, settings, left_out = check_plan(request)
    if settings.given.paths != LIBRARY:
        raise PlanError(
            "The plan moves collectives by copies, which the launch filter alone cannot do. Put Counterpoint "
            "into the image and `counterpoint run` into the container (`counterpoint env --for container`)."
        )
    system = file_system_of(folder)
    if system.is_shared:
        raise LaunchFilterError(
            f"{folder} is on {system.kind}, which hosts share, but processes map their counts there. Name a "
            "folder on one host, and fill one on each host."
        )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise LaunchFilterError(f"{folder} holds files already, perhaps of another run. Name a new folder.")
        library = folder / filter_library().name
        shutil.copyfile(filter_library(), library)
        library.chmod(0o644)
        ControlBlock.write_initial(folder / INITIAL_BLOCK, asked.rules)
        write_settings(folder, replace(settings, guard_every_steps=0))
        write_whole(folder / TRANSLATION_FILE, write_json(asked).encode())
    except OSError as problem:
        raise LaunchFilterError(
            f"Cannot write {folder}: {problem.strerror}; name a folder that you may write to."
        ) from problem
    if left_out:
        say(left_out)
    return library


def prove_folder(folder: Path) -> RunOutcome:
    """Return what took effect in the processes that wrote into a folder. Raises `LaunchFilterError` for any other
    folder.
    """
    try:
        settings = read_settings(folder)
        asked = msgspec.json.decode((folder / TRANSLATION_FILE).read_bytes(), type=Translation)
    except (OSError, ValueError) as problem:
        raise LaunchFilterError(
            f"{folder} holds no {SETTINGS_FILE} of this version; name one that `counterpoint env --folder` filled."
        ) from problem
    request = RunRequest(command=(), plan=settings.plan)
    return outcome_of(folder, Ended(exit_status=0), request, (asked, settings))
