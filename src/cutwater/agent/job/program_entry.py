"""Imports the program of a job, in this process, and finds the pipeline that its entry names.

Modules of the program come before all others: from its root, and for ``dir/fraud.py`` also from ``dir``. Python
processes that Spark starts on this machine find them by ``PYTHONPATH``, and those of other machines in the archive.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from cutwater.agent.job.job_setup import ProgramSetup
from cutwater.core.jobs.job_spec import split_entry
from cutwater.errors import CutwaterError, InvalidArgument, NotFound
from cutwater.jobs.messages import PROGRAM_ARCHIVE
from cutwater.jobs.program_file import load_module_pipeline, load_pipeline
from cutwater.pipeline.stream import Pipeline

FILES_SHOWN = 10


def load_job(name: str, program: ProgramSetup) -> Pipeline:
    """Return the pipeline of a job. Raises if it has another name than the job."""
    pipeline = load_entry(program)
    if pipeline.name != name:
        raise InvalidArgument(
            f"the pipeline of {program.entry} is called {pipeline.name!r}, and the job {name!r}: a job has the name of "
            f"its pipeline. Submit it as a job called {pipeline.name!r}, or change the name in the program "
            f"(Pipeline({name!r}, ...))"
        )
    return pipeline


def load_entry(program: ProgramSetup) -> Pipeline:
    """Return the pipeline of a program, whatever its name is. Errors name files as they are in the program."""
    root = Path(program.directory).resolve()
    try:
        return _loaded(program, root)
    except CutwaterError as error:
        error.message = error.message.replace(f"{root}{os.sep}", "")
        error.args = (error.message,)
        raise


def _loaded(program: ProgramSetup, root: Path) -> Pipeline:
    where, variable = split_entry(program.entry)
    if where.endswith(".py"):
        file = (root / where).resolve()
        if not file.is_relative_to(root) or not file.is_file():
            raise NotFound(f"the program has no file {where!r}, which its entry names: it has {_files(root)}")
        _let_import(root, file.parent, program.archive)
        return load_pipeline(str(file), variable, program.arguments)
    if not all(part.isidentifier() for part in where.split(".")):
        raise InvalidArgument(
            f"{program.entry!r} names neither a file of the program (fraud.py:p) nor a module (shop.fraud:p)"
        )
    _let_import(root, root, program.archive)
    return load_module_pipeline(where, variable, program.arguments, root=root)


def _let_import(root: Path, directory: Path, archive: str) -> None:
    places = list(dict.fromkeys((str(directory), str(root))))
    sys.path[:0] = places
    # What Python compiles would lie among the files of the program, which are compared with its archive.
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (*places, os.environ.get("PYTHONPATH"))))
    os.environ[PROGRAM_ARCHIVE] = archive
    importlib.invalidate_caches()


def _files(root: Path) -> str:
    found = sorted(str(path.relative_to(root)) for path in root.rglob("*.py"))
    more = f" and {len(found) - FILES_SHOWN} more" if len(found) > FILES_SHOWN else ""
    return f"{', '.join(found[:FILES_SHOWN])}{more}" if found else "no Python files"
