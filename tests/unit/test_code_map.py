"""The code map in ``ARCHITECTURE.md`` names every folder and every module of package and benchmarks, once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "cutwater"
OUTSIDE = {"src/cutwater/": PACKAGE, "benchmarks/": ROOT / "benchmarks"}
"""Headings of the map that are not relative to the package."""
LAST = "### Elsewhere in the repository"

SECTION = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").split("\n## Code map\n")[1].split("\n## ")[0]
MODULES, ELSEWHERE = SECTION.split(LAST)


def mapped() -> Iterator[tuple[Path, list[str]]]:
    """Each folder of the map, with the files that it lists there."""
    for part in re.split(r"^### ", MODULES, flags=re.MULTILINE)[1:]:
        name = re.match(r"`([\w/]+/)`\n\n\w", part)
        assert name is not None, f"a folder of the map needs a name and a sentence: {part[:40]!r}"
        files = re.findall(r"^\| `(\w+\.py)` \| [A-Z].+\. \|$", part, re.MULTILINE)
        assert part.count("\n| `") == len(files), f"a row of {name[1]} is not `module.py` and a sentence"
        yield OUTSIDE.get(name[1], PACKAGE / name[1]), files


def shown(paths: list[Path]) -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for path in paths)


def modules() -> list[Path]:
    found = [path for folder in OUTSIDE.values() for path in folder.rglob("*.py")]
    return [path for path in found if path.name != "__init__.py"]


def test_every_module_is_in_the_map_and_every_module_of_the_map_exists() -> None:
    listed = shown([folder / file for folder, files in mapped() for file in files])
    missing, unknown = set(shown(modules())) - set(listed), set(listed) - set(shown(modules()))
    assert (sorted(missing), sorted(unknown)) == ([], []), "missing in ARCHITECTURE.md, and named there in vain"
    assert len(listed) == len(set(listed)), "a module is there twice"


def test_every_folder_is_in_the_map_and_every_folder_of_the_map_exists() -> None:
    folders = {path.parent for folder in OUTSIDE.values() for path in folder.rglob("__init__.py")}
    assert shown([folder for folder, _ in mapped()]) == shown(sorted(folders))


def test_folders_elsewhere_exist() -> None:
    named = re.findall(r"^\| `([\w/]+/)` \|", ELSEWHERE, re.MULTILINE)
    assert len(named) > 4
    assert [name for name in named if not (ROOT / name).is_dir()] == []


def test_paths_outside_the_map_exist() -> None:
    """As far as they have a folder in their name."""
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").split("\n## Code map\n")[0]
    named = set(re.findall(r"`((?:\w+/)+(?:\w+\.\w+)?)`", page))
    assert len(named) > 30
    assert sorted(name for name in named if not ((PACKAGE / name).exists() or (ROOT / name).exists())) == []


def test_every_folder_says_what_is_in_it() -> None:
    """In the docstring of its ``__init__``, which has no code unless it holds public names."""
    silent = [folder for folder, _ in mapped() if not (folder / "__init__.py").read_text().startswith('"""')]
    assert shown(silent) == []
