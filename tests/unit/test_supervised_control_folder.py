"""The folder of a `counterpoint run`: where it is made."""

import tempfile
from pathlib import Path

import pytest

from counterpoint.supervised import control_folder as places


def test_shared_memory_is_enough_where_no_folder_for_temporary_files_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", refuse)
    monkeypatch.setattr(places, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(places, "LEAST_SHARED_BYTES", 0)
    with places.control_folder() as folder:
        assert folder.parent == tmp_path
    monkeypatch.setattr(places, "LEAST_SHARED_BYTES", 1 << 62)
    with pytest.raises(FileNotFoundError), places.control_folder():
        pass
