"""The filter's library: built on first use, kept, and refused with one line where it could not be preloaded."""

import os
import stat
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from counterpoint.errors import CounterpointError, LaunchFilterError
from counterpoint.launch_filter import library, prebuilt
from counterpoint.launch_filter.executable import check_command
from counterpoint.launch_filter.library import filter_library

EM_MACHINE_AT = 18


@pytest.fixture(autouse=True)
def cache(cc_remembers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("COUNTERPOINT_CACHE_DIR", str(folder))
    monkeypatch.delenv("CC", raising=False)
    return folder


def program(folder: Path, *flags: str) -> Path:
    (folder / "program.c").write_text("int main(void) { return 0; }\n")
    subprocess.run(["cc", *flags, "-o", str(folder / "program"), str(folder / "program.c")], check=True, timeout=60)
    return folder / "program"


def script(folder: Path, first_line: str) -> Path:
    path = folder / "script"
    path.write_text(f"{first_line}\necho hello\n")
    path.chmod(0o755)
    return path


def test_it_is_built_once_and_can_be_preloaded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = filter_library()
    assert path.parent == cache
    assert [found.name for found in cache.iterdir()] == [path.name]  # nothing half built is left
    monkeypatch.setenv("PATH", "/nowhere")
    assert filter_library() == path  # no compiler is needed any more
    command = [sys.executable, "-c", "print(open('/proc/self/maps').read())"]
    ended = subprocess.run(command, env={"LD_PRELOAD": str(path)}, capture_output=True, text=True, check=True, timeout=60)
    assert str(path) in ended.stdout
    assert ended.stderr == ""


def test_it_asks_for_nothing_but_the_c_library() -> None:
    listed = subprocess.run(["readelf", "-d", str(filter_library())], capture_output=True, text=True, check=True, timeout=60)
    needed = [line.split("[")[1].rstrip("]\n") for line in listed.stdout.splitlines() if "(NEEDED)" in line]
    assert set(needed) <= {"libc.so.6", "libdl.so.2", "libpthread.so.0", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o777])
def test_what_is_kept_is_this_users_alone_whatever_the_umask(
    cache: Path, monkeypatch: pytest.MonkeyPatch, umask: int
) -> None:
    folder = cache / "two" / "deep"
    monkeypatch.setenv("COUNTERPOINT_CACHE_DIR", str(folder))
    before = os.umask(umask)
    try:
        path = filter_library()
    finally:
        os.umask(before)
    assert [mode(each) for each in (path, folder, folder.parent, cache)] == [0o600, 0o700, 0o700, 0o700]


@pytest.mark.parametrize("wrong", [0o770, 0o707, 0o777])
def test_a_folder_that_others_may_write_to_is_refused(cache: Path, wrong: int) -> None:
    filter_library()
    cache.chmod(wrong)
    with pytest.raises(
        LaunchFilterError, match=rf"because other users may write there \(owner \d+, mode {wrong:o}\)"
    ) as raised:
        filter_library()
    assert "\n" not in str(raised.value)


def test_a_folder_of_another_user_is_refused_and_roots_is_not(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = filter_library()
    owner = cache.stat().st_uid
    monkeypatch.setattr("os.geteuid", lambda: owner + 1)
    if owner == 0:
        assert filter_library() == path
        if os.getuid() == 0:
            os.chown(cache, 54321, -1)
    with pytest.raises(LaunchFilterError, match="because other users may write there"):
        filter_library()


PLANTED = b"\x7fELF planted"


def plant(path: Path, how: str) -> None:
    """Something else under the library's name."""
    content = path.read_bytes()
    path.unlink()
    if how == "link":
        (path.parent / "elsewhere").write_bytes(content)
        path.symlink_to("elsewhere")
    elif how == "writable":
        path.write_bytes(content)
        path.chmod(0o666)
    elif how == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(
            {"empty": b"", "planted": PLANTED, "short": content[:-1], "flipped": content[:-99] + bytes(99)}[how]
        )


@pytest.mark.parametrize("how", ["empty", "short", "flipped", "planted", "writable", "link", "pipe"])
def test_a_library_that_is_damaged_or_may_be_anothers_is_built_again(cache: Path, how: str) -> None:
    path = filter_library()
    whole = path.read_bytes()
    plant(path, how)
    assert filter_library() == path
    assert path.read_bytes() == whole
    assert not path.is_symlink()
    assert mode(path) == 0o600


@pytest.mark.skipif(os.getuid() != 0, reason="needs to give a file to another user")
def test_a_library_of_another_user_is_built_again(cache: Path) -> None:
    path = filter_library()
    os.chown(path, 54321, -1)
    assert filter_library() == path
    assert path.stat().st_uid == 0


def test_a_relative_folder_is_the_same_from_everywhere(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COUNTERPOINT_CACHE_DIR", "cache")
    assert filter_library().parent == cache


@pytest.mark.parametrize("users", ["", "relative/cache"])
def test_an_empty_or_relative_xdg_folder_is_as_if_it_were_not_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, users: str
) -> None:
    monkeypatch.delenv("COUNTERPOINT_CACHE_DIR")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", users)
    assert filter_library().parent == tmp_path / "home" / ".cache" / "counterpoint"
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_a_user_without_a_home_is_told_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("COUNTERPOINT_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(CounterpointError, match=r"no home folder .*; set COUNTERPOINT_CACHE_DIR"):
        filter_library()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "users"))
    assert filter_library().parent == tmp_path / "users" / "counterpoint"


def test_the_part_for_amd_is_built_on_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = filter_library()
    assert "hip.c" not in {path.name for path in prebuilt.c_sources()}
    assert b"hipLaunchKernel" not in usual.read_bytes()
    monkeypatch.setenv("COUNTERPOINT_EXPERIMENTAL_AMD", "1")
    experimental = filter_library()
    assert experimental != usual
    assert b"hipLaunchKernel" in experimental.read_bytes()


def test_another_compiler_or_a_changed_source_is_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = library._fingerprint(None)
    monkeypatch.setenv("CC", "gcc -m64")
    assert library._fingerprint(None) != first
    monkeypatch.delenv("CC")
    changed = tmp_path / "decide.c"
    changed.write_text("// changed\n")
    sources = [changed if path.name == changed.name else path for path in prebuilt.c_sources()]
    monkeypatch.setattr(prebuilt, "c_sources", lambda **_: sources)
    assert library._fingerprint(None) != first


@pytest.mark.parametrize(
    ("compiler", "said"),
    [
        (None, "none of cc, gcc, clang was found. Install one"),
        ("no-such-compiler -O2", "CC names 'no-such-compiler', which was not found. Install one"),
        ("'x", r"CC is not a command .* No closing quotation\. Correct it"),
        ("true", "'/.*true' exited with 0 but built no library, so it is not a C compiler"),
        ("false", "could not be built with '/.*false', which says: nothing"),
    ],
)
def test_without_a_compiler_there_is_one_line(
    cache: Path, monkeypatch: pytest.MonkeyPatch, compiler: str | None, said: str
) -> None:
    if compiler is None:
        monkeypatch.setenv("PATH", "/nowhere")
    else:
        monkeypatch.setenv("CC", compiler)
    with pytest.raises(LaunchFilterError, match=said) as raised:
        filter_library()
    assert "\n" not in str(raised.value)
    assert not cache.exists() or list(cache.iterdir()) == []


def test_a_compilers_complaint_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.c"
    broken.write_text("int broken(void) { return missing; }\n")
    monkeypatch.setattr(prebuilt, "c_sources", lambda **_: [broken])
    with pytest.raises(LaunchFilterError, match=r"which says: .*error: .missing. undeclared"):
        filter_library()


def test_a_cache_that_cannot_be_written_is_one_line(cache: Path) -> None:
    cache.write_text("a file, not a folder")
    with pytest.raises(LaunchFilterError, match=r"Cannot store the launch filter in .*; set COUNTERPOINT_CACHE_DIR"):
        filter_library()


@pytest.mark.parametrize(("name", "value"), [("machine", "riscv64"), ("libc_ver", ("", ""))])
def test_other_platforms_are_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: object) -> None:
    monkeypatch.setattr(f"platform.{name}", lambda: value)
    with pytest.raises(LaunchFilterError, match="needs Linux with the GNU C library"):
        filter_library()


def test_dynamic_programs_and_scripts_of_them_may_run(tmp_path: Path) -> None:
    check_command(Path(sys.executable))
    check_command(program(tmp_path))
    check_command(script(tmp_path, f"#!/usr/bin/env -S {sys.executable} -u"))
    check_command(script(tmp_path, f"#!{program(tmp_path)}"))
    check_command(script(tmp_path, "echo a script without a first line"))
    check_command(script(tmp_path, "#!/no/such/interpreter"))  # running it says so
    check_command(script(tmp_path, f"#!{tmp_path / 'script'}"))  # a circle; running it says so


@pytest.mark.parametrize("flag", ["-static", "-static-pie"])
def test_a_static_program_is_refused_through_scripts_too(tmp_path: Path, flag: str) -> None:
    path = program(tmp_path, flag)
    for command in (path, script(tmp_path, f"#!{path} -x")):
        with pytest.raises(LaunchFilterError, match="statically linked, so no library can be preloaded into it"):
            check_command(command)


def test_a_program_of_another_machine_is_refused(tmp_path: Path) -> None:
    path = program(tmp_path)
    content = bytearray(path.read_bytes())
    struct.pack_into("<H", content, EM_MACHINE_AT, 243)
    path.write_bytes(content)
    with pytest.raises(LaunchFilterError, match=r"built for another machine .ELF machine 243"):
        check_command(path)


def test_a_program_of_another_c_library_is_refused(tmp_path: Path) -> None:
    path = program(tmp_path)
    content = path.read_bytes()
    interpreter = content[content.index(b"/lib") :].split(b"\0")[0]
    path.write_bytes(content.replace(interpreter, b"/lib/ld-musl-x.so.1".ljust(len(interpreter), b"\0"), 1))
    with pytest.raises(LaunchFilterError, match="uses another C library"):
        check_command(path)


def test_a_program_that_changes_its_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = program(tmp_path)
    path.chmod(0o755 | stat.S_ISUID)
    check_command(path)  # it is this user's own
    monkeypatch.setattr("os.geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(LaunchFilterError, match="ignore preloaded libraries"):
        check_command(path)


def test_a_program_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(LaunchFilterError, match=r"Cannot read .*; name a program that you may read"):
        check_command(tmp_path / "missing")
    (tmp_path / "short").write_bytes(b"\x7fELF\x02\x01")
    os.chmod(tmp_path / "short", 0o755)
    with pytest.raises(LaunchFilterError, match="built for another machine"):
        check_command(tmp_path / "short")
