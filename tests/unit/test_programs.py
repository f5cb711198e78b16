"""The archive of a program: the same bytes for the same content, and nothing hostile gets out of it."""

from __future__ import annotations

import io
import os
import random
import stat
import struct
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest

from cutwater.errors import InvalidArgument, NotFound
from cutwater.programs import archive_rules, packing, unpacking
from cutwater.programs.packing import PackedProgram, pack_program, sha256_of
from cutwater.programs.unpacking import is_unpacked, open_archive, unpack_program


def zipped(*members: tuple[str | zipfile.ZipInfo, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", method) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return data.getvalue()


def tree(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def member(name: str, mode: int = 0) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.create_system, info.external_attr = 3, mode << 16
    return info


@pytest.fixture
def program(tmp_path: Path) -> Path:
    root = tmp_path / "program"
    (root / "rules" / "deep").mkdir(parents=True)
    (root / "fraud.py").write_text("from rules.limits import MOST\n")
    (root / "rules" / "limits.py").write_text("MOST = 3\n")
    (root / "rules" / "deep" / "ü.txt").write_text("ü")
    for left_out in ("__pycache__", ".git", ".venv", "env"):
        (root / left_out).mkdir()
        (root / left_out / "x").write_text("x")
    (root / "env" / "pyvenv.cfg").write_text("")
    (root / "rules" / "old.pyc").write_bytes(b"x")
    return root


# Packing.


def test_the_same_content_gives_the_same_bytes(program: Path, tmp_path: Path) -> None:
    first = pack_program(program)
    assert first.files == 3
    assert first.sha256 == sha256_of(first.data)
    copy = tmp_path / "copy"
    copy.mkdir()
    # Made in another order, with other times and modes.
    (copy / "rules" / "deep").mkdir(parents=True)
    for name in ("rules/deep/ü.txt", "rules/limits.py", "fraud.py"):
        (copy / name).write_bytes((program / name).read_bytes())
        os.utime(copy / name, (1_000_000, 1_000_000))
        (copy / name).chmod(0o755)
    assert pack_program(copy) == first
    (copy / "fraud.py").write_text("")
    assert pack_program(copy).sha256 != first.sha256


def test_a_file_and_a_wheel(program: Path, tmp_path: Path) -> None:
    one = pack_program(str(program / "fraud.py"))
    with open_archive(one.data) as archive:
        assert archive.names == {"fraud.py"}
    wheel = tmp_path / "fraud-1.0-py3-none-any.whl"
    wheel.write_bytes(
        zipped(
            ("fraud/__init__.py", b"p = 1"),
            ("fraud-1.0.data/purelib/more.py", b"q = 1"),
            ("fraud-1.0.data/scripts/run", b"#!python"),
            ("fraud-1.0.dist-info/METADATA", b"Name: fraud"),
        )
    )
    with open_archive(pack_program(wheel).data) as archive:
        assert archive.names == {"fraud/__init__.py", "more.py", "fraud-1.0.dist-info/METADATA"}


def test_what_is_no_program(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotFound, match="cannot be packed: No such file"):
        pack_program(tmp_path / "none.py")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(InvalidArgument, match="has no files"):
        pack_program(empty)
    (tmp_path / "data.csv").write_text("1")
    with pytest.raises(InvalidArgument, match=r"is a Python file \(\.py\), a directory"):
        pack_program(tmp_path / "data.csv")
    (tmp_path / "bad.whl").write_text("1")
    with pytest.raises(InvalidArgument, match=r"bad\.whl is no zip that can be read"):
        pack_program(tmp_path / "bad.whl")
    os.mkfifo(program / "pipe")
    with pytest.raises(InvalidArgument, match="pipe is no plain file"):
        pack_program(program)
    (program / "pipe").unlink()
    (program / "outside.py").symlink_to("/etc/passwd")
    with pytest.raises(InvalidArgument, match=r"outside\.py is a symbolic link"):
        pack_program(program)
    (program / "outside.py").unlink()
    (program / "back\\slash.py").write_text("")
    with pytest.raises(InvalidArgument, match="backslash"):
        pack_program(program)
    (program / "back\\slash.py").unlink()
    monkeypatch.setattr(packing, "FILES_MAX", 2)
    with pytest.raises(InvalidArgument, match="3 files or more"):
        pack_program(program)
    monkeypatch.setattr(packing, "FILES_MAX", 10)
    monkeypatch.setattr(packing, "ARCHIVE_BYTES_MAX", 20)
    with pytest.raises(InvalidArgument, match=r"fraud\.py has more than"):
        pack_program(program)


# Unpacking.


def test_what_was_packed_is_unpacked(program: Path, tmp_path: Path) -> None:
    packed = pack_program(program)
    place = tmp_path / "place"
    place.mkdir()
    assert unpack_program(packed.data, place) == sum(map(len, tree(place).values()))
    assert tree(place) == {
        name: (program / name).read_bytes() for name in ("fraud.py", "rules/limits.py", "rules/deep/ü.txt")
    }
    modes = {stat.S_IMODE(path.stat().st_mode) for path in place.rglob("*") if path.is_file()}
    assert modes == {0o444}
    assert stat.S_IMODE((place / "rules").stat().st_mode) == 0o555
    assert is_unpacked(packed.data, place)


@pytest.mark.parametrize(
    "change",
    [
        lambda place: (place / "fraud.py").write_text("from rules.limits import LESS\n"),
        lambda place: (place / "more.py").write_text(""),
        lambda place: (place / "rules" / "limits.py").unlink(),
        lambda place: (place / "link.py").symlink_to("fraud.py"),
    ],
)
def test_a_change_of_what_was_unpacked_is_seen(program: Path, tmp_path: Path, change: object) -> None:
    packed = pack_program(program)
    place = tmp_path / "place"
    place.mkdir()
    unpack_program(packed.data, place)
    for path in [place, *place.rglob("*")]:
        path.chmod(0o700)
    assert is_unpacked(packed.data, place)
    assert callable(change)
    change(place)
    assert not is_unpacked(packed.data, place)


LINK = member("link.py", stat.S_IFLNK | 0o777)
DEVICE = member("device.py", stat.S_IFCHR | 0o777)


@pytest.mark.parametrize(
    ("members", "told"),
    [
        ([("../out.py", b"")], "no path below the program"),
        ([("/out.py", b"")], "no path below the program"),
        ([("a/../../out.py", b"")], "no path below the program"),
        ([("a//b.py", b"")], "no path below the program"),
        ([("../out/", b"")], "no path below the program"),
        ([("a\\..\\b.py", b"")], "backslash"),
        ([("C:/out.py", b"")], "drive"),
        ([("a\nb.py", b"")], "control character"),
        ([("n" * 256, b"")], "too long"),
        ([(LINK, b"/etc/passwd")], "is a symbolic link"),
        ([(DEVICE, b"")], "no plain file"),
        ([("a.py", b"1"), ("a.py", b"2")], "twice"),
        ([("a", b"1"), ("a/b.py", b"2")], "below another file"),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_hostile_names_are_refused_before_anything_is_written(
    members: list[tuple[str | zipfile.ZipInfo, bytes]], told: str, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    with pytest.raises(InvalidArgument, match=told):
        unpack_program(zipped(("first.py", b"x"), *members), place)
    assert not list(tmp_path.rglob("*.py"))


def test_bombs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    big = bytes(unpacking.UNPACKED_BYTES_MAX // 2 + 1)
    with pytest.raises(InvalidArgument, match=r"unpacked, has more than 256 MiB"):
        unpack_program(zipped(("a", big), ("b", big)), tmp_path)
    many = zipped(*((f"f{number}", b"") for number in range(archive_rules.FILES_MAX + 1)))
    with pytest.raises(InvalidArgument, match="10001 files"):
        open_archive(many)
    # The end of the archive says less than there is.
    at = many.rfind(b"PK\x05\x06")
    lied = bytearray(many)
    struct.pack_into("<2H", lied, at + 8, 5, 5)
    with pytest.raises(InvalidArgument, match="table of contents is damaged"):
        open_archive(bytes(lied))
    with pytest.raises(InvalidArgument, match="64 MiB"):
        open_archive(bytes(archive_rules.ARCHIVE_BYTES_MAX + 1))


def entry(name: str, comment: bytes = b"") -> bytes:
    """An entry of a table of contents, for a file without content at the beginning of the archive."""
    head = struct.pack("<4s4B4HL2L5H2L", b"PK\x01\x02", 20, 3, 20, *(0,) * 8, len(name), 0, len(comment), *(0,) * 4)
    return head + name.encode() + comment


def test_a_second_table_of_contents_is_refused() -> None:
    """ZIP64 leads to another table than the one that was counted: here with more files than are allowed."""
    first = struct.pack("<4s2B4HL2L2H", b"PK\x03\x04", 20, *(0,) * 8, 1, 0) + b"a"
    hidden = b"".join(entry(f"f{number}") for number in range(archive_rules.FILES_MAX + 1))
    shown = entry("a", bytes(76))[:-76]
    count, size = archive_rules.FILES_MAX + 2, len(hidden) + len(shown)
    end64 = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, len(first))
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, len(first) + size, 1)
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 1, 1, len(shown) + 76, len(first) + len(hidden), 0)
    data = first + hidden + shown + end64 + locator + end
    with zipfile.ZipFile(io.BytesIO(data)) as opened:
        assert len(opened.infolist()) == count, "the attack would work"
    with pytest.raises(InvalidArgument, match="ZIP64"):
        open_archive(data)


def test_content_that_is_longer_than_its_size_is_not_unpacked(tmp_path: Path) -> None:
    data = bytearray(zipped(("a.txt", bytes(10_000_000))))
    for at in (data.find(b"PK\x01\x02") + 24, data.find(b"PK\x03\x04") + 22):
        struct.pack_into("<L", data, at, 100)
    with pytest.raises(InvalidArgument, match="no zip that can be read"):
        unpack_program(bytes(data), tmp_path)


def test_other_kinds_of_archives_are_refused(tmp_path: Path) -> None:
    good = zipped(("a.py", b"x = 1"))
    for data, told in (
        (b"", "it has no end"),
        (b"\x7fELF" + good, "table of contents"),
        (good + b"more", "not the end of the file"),
        (zipped(("a.py", b"x" * 100), method=zipfile.ZIP_BZIP2), "compressed in another way"),
    ):
        with pytest.raises(InvalidArgument, match=told):
            open_archive(data)
    encrypted = bytearray(good)
    encrypted[encrypted.find(b"PK\x01\x02") + 8] |= 1
    with pytest.raises(InvalidArgument, match="encrypted"):
        open_archive(bytes(encrypted))


def test_damaged_archives_are_refused_or_give_what_they_say(tmp_path: Path) -> None:
    """Whatever is changed, nothing but a refusal comes out, or files below the directory."""
    seed = random.SystemRandom().randrange(10**9)
    print(f"replay: set seed = {seed} in this test")
    rng = random.Random(seed)
    good = zipped(("a.py", b"x = 1" * 20), ("b/c.py", b"y = 2" * 30), method=zipfile.ZIP_DEFLATED)
    for number in range(1_500):
        data = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        place = tmp_path / "inside" / str(number)
        place.mkdir(parents=True)
        with suppress(InvalidArgument):
            unpack_program(bytes(data), place)
        assert os.listdir(tmp_path) == ["inside"]


def test_a_packed_program_is_shown_without_its_bytes() -> None:
    assert repr(PackedProgram("ab", b"secret", 1)) == "PackedProgram(sha256='ab', 6 bytes, files=1)"
