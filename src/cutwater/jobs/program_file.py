"""Loads the pipeline that a Python file defines."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from cutwater.errors import CutwaterError, InvalidArgument, NotFound
from cutwater.pipeline.stream import Pipeline


def load_pipeline(file: str, name: str = "") -> Pipeline:
    """Run a file as a module, and find its pipeline. Errors name the line in the file."""
    path = Path(file)
    if not path.is_file():
        raise NotFound(f"there is no file {file}: name a Python file that makes a Pipeline")
    module = _run(path)
    if name:
        return _named(path, module, name)
    found = {pipeline: key for key, pipeline in reversed(vars(module).items()) if isinstance(pipeline, Pipeline)}
    if len(found) == 1:
        return next(iter(found))
    if found:
        names = ", ".join(f"{key} ({pipeline.name!r})" for pipeline, key in reversed(found.items()))
        raise InvalidArgument(
            f"{file} has several pipelines: {names}; say which one, as in {file}:{[*found.values()][-1]}"
        )
    makers = [key for key, value in vars(module).items() if _makes_pipeline(module, value)]
    hint = f"; its function {makers[0]}() may make one: say {file}:{makers[0]}" if makers else ""
    raise InvalidArgument(
        f"{file} has no pipeline: none of its variables is a Pipeline, outside of `if __name__ == '__main__'`{hint}"
    )


def _run(path: Path) -> ModuleType:
    # Modules next to the file can be imported, as when Python runs it.
    sys.path.insert(0, str(path.parent.absolute()))
    name = path.stem if path.stem.isidentifier() and path.stem not in sys.modules else f"pipeline_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InvalidArgument(f"{path} is no Python file: its name ends with .py")
    module = importlib.util.module_from_spec(spec)
    # The module of each of its functions can be looked up by name.
    sys.modules[name] = module
    _calling(path, lambda: spec.loader.exec_module(module))  # type: ignore[union-attr]
    return module


def _named(path: Path, module: ModuleType, name: str) -> Pipeline:
    if name not in vars(module):
        raise NotFound(f"{path} has no {name!r}: name a variable that is a Pipeline, or a function that returns one")
    found = getattr(module, name)
    if callable(found):
        found = _calling(path, found)
    if not isinstance(found, Pipeline):
        raise InvalidArgument(
            f"{name!r} in {path} is {type(found).__name__}, not a Pipeline or a function that makes one"
        )
    return found


def _makes_pipeline(module: ModuleType, value: Any) -> bool:
    if not inspect.isfunction(value) or value.__module__ != module.__name__:
        return False
    return value.__annotations__.get("return") in (Pipeline, "Pipeline")


def _calling(path: Path, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except SyntaxError as error:
        raise InvalidArgument(f"{error.filename}, line {error.lineno}: {error.msg}") from error
    except (Exception, SystemExit) as error:
        line = _line(path, error)
        if isinstance(error, CutwaterError):
            what = error.message
        elif isinstance(error, SystemExit):
            what = "it ended the process; put what runs the pipeline under `if __name__ == '__main__'`"
        else:
            what = f"{type(error).__name__}: {error}"
        raise InvalidArgument(f"{path}{line}: {what}") from error


def _line(path: Path, error: BaseException) -> str:
    own = str(path.absolute())
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if str(Path(frame.filename).absolute()) == own
    ]
    return f", line {lines[-1]}" if lines else ""
