"""The check of a whole session would find a secret in a log."""

from __future__ import annotations

import logging
from pathlib import Path

from tests.integration.access_cluster import new_token
from tests.marked_secrets import MarkWatch, marked_files


def test_a_secret_in_a_log_record_or_file_is_found(tmp_path: Path) -> None:
    token, _ = new_token("ann")
    logger, watch = logging.Logger("alone"), MarkWatch()
    logger.addHandler(watch)
    logger.warning("no secret: %s", token[:20])
    assert watch.found == []
    logger.warning("token %s", token)
    try:
        raise ValueError(token)
    except ValueError:
        logger.exception("it failed")
    assert len(watch.found) == 2
    # Not below a name that the check of this very session would find.
    (tmp_path / "sn1.out").write_text(f"token {token}\n")
    assert marked_files(tmp_path) == []
    assert marked_files(tmp_path, ["*.out"]) == [tmp_path / "sn1.out"]
