"""Loads the pipeline that a Python file or a module defines."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from cutwater.errors import CutwaterError, InvalidArgument, NotFound
from cutwater.jobs.program_arguments import converted
from cutwater.pipeline.stream import Pipeline


def load_pipeline(file: str, name: str = "", arguments: Mapping[str, str] | None = None) -> Pipeline:
    """Run a file as a module, and find its pipeline. Errors name the line in the file. ``arguments`` are for the
    function ``name``, which returns the pipeline."""
    path = Path(file)
    if not path.is_file():
        raise NotFound(f"there is no file {file}: name a Python file that makes a Pipeline")
    return _found(_run(path), path, file, name, arguments or {})


def load_module_pipeline(
    module: str, name: str = "", arguments: Mapping[str, str] | None = None, *, root: Path
) -> Pipeline:
    """Import a module of a program, which is in the directory ``root``, and find its pipeline."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError as error:
        raise NotFound(f"there is no module {module!r}: {error}") from error
    except Exception as error:
        # The packages around a module are imported to find it.
        raise InvalidArgument(f"{module}: {type(error).__name__}: {error}") from error
    if spec is None or spec.origin is None:
        raise NotFound(f"there is no module {module!r}: name one that makes a Pipeline")
    path = Path(spec.origin)
    if not path.resolve().is_relative_to(root):
        raise NotFound(f"the module {module!r} is not in the program, but in {path}: name one of the program")
    return _found(_calling(path, lambda: importlib.import_module(module)), path, module, name, arguments or {})


def _found(module: ModuleType, path: Path, shown: str, name: str, arguments: Mapping[str, str]) -> Pipeline:
    """Return the pipeline of a module. ``shown`` is how the user names the module."""
    if name:
        return _named(path, shown, module, name, arguments)
    found = {pipeline: key for key, pipeline in reversed(vars(module).items()) if isinstance(pipeline, Pipeline)}
    if len(found) == 1:
        _refuse_arguments(shown, next(iter(found.values())), arguments)
        return next(iter(found))
    if found:
        names = ", ".join(f"{key} ({pipeline.name!r})" for pipeline, key in reversed(found.items()))
        raise InvalidArgument(
            f"{shown} has several pipelines: {names}; say which one, as in {shown}:{[*found.values()][-1]}"
        )
    makers = [key for key, value in vars(module).items() if _makes_pipeline(module, value)]
    hint = f"; its function {makers[0]}() may make one: say {shown}:{makers[0]}" if makers else ""
    raise InvalidArgument(
        f"{shown} has no pipeline: none of its variables is a Pipeline, outside of `if __name__ == '__main__'`{hint}"
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


def _named(path: Path, shown: str, module: ModuleType, name: str, arguments: Mapping[str, str]) -> Pipeline:
    if name not in vars(module):
        raise NotFound(f"{shown} has no {name!r}: name a variable that is a Pipeline, or a function that returns one")
    found = getattr(module, name)
    if callable(found):
        values = converted(f"{name}() in {shown}", found, arguments)
        found = _calling(path, lambda: getattr(module, name)(**values))
    else:
        _refuse_arguments(shown, name, arguments)
    if not isinstance(found, Pipeline):
        raise InvalidArgument(
            f"{name!r} in {shown} is {type(found).__name__}, not a Pipeline or a function that makes one"
        )
    return found


def _refuse_arguments(shown: str, name: str, arguments: Mapping[str, str]) -> None:
    if arguments:
        raise InvalidArgument(
            f"{name!r} in {shown} is a pipeline, which takes no arguments, and there are {', '.join(arguments)}: write "
            "a function that takes them and returns the pipeline, and name that one"
        )


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
