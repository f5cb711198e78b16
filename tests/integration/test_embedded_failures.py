"""A disk that fails while an embedded log is opened: the error names it, and the log can be opened afterwards."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

import cutwater
from cutwater.errors import InvalidArgument
from cutwater.runtime.local_files import MachineFiles


def test_a_directory_whose_key_was_refused_can_be_opened_when_it_is_back(tmp_path: Path) -> None:
    """In the same process: the refused attempt has left nothing open."""
    cutwater.open(tmp_path).close()
    key = tmp_path / "metadata.sqlite.key"
    intact = key.read_bytes()
    key.write_bytes(b"no key")
    with pytest.raises(InvalidArgument, match="private key"):
        cutwater.open(tmp_path)
    key.write_bytes(intact)
    cutwater.open(tmp_path).close()


@pytest.mark.parametrize("call", ["unlink", "replace", "create_secret"])
def test_a_disk_that_fails_while_a_log_is_opened_is_named_and_leaves_nothing_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    cutwater.open(tmp_path).close()

    def fails(*args: object, **options: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(MachineFiles, call, fails)
        with pytest.raises(InvalidArgument, match=r"cannot be used \(Input/output error\)"):
            cutwater.open(tmp_path)
    cutwater.open(tmp_path, exclusive=True).close()
