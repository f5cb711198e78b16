"""Writes down what programs and people rely on by name: public names of Python, codes of errors, exit codes, commands
with their options, metrics. Run it with the package that is meant on the path, in a checkout of its tag:

    PYTHONPATH=src python tests/upgrade/surface.py tests/upgrade/0.1.0.surface.json

``test_surface.py`` compares that with the present code: names may come, and none may go.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import typer
from prometheus_client import CollectorRegistry, generate_latest

import cutwater

PACKAGES = ("cutwater", "cutwater.errors", "cutwater.pipeline", "cutwater.spark")
LEFT_OUT = ("cutwater.testing", "cutwater.spark", "cutwater.pipeline", "cutwater.savepoints")
"""Without errors of their own, and slow to import."""


def parameters(value: Any) -> list[str]:
    """``name``, or ``name=`` if it may be left out; nothing if that cannot be told."""
    try:
        found = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return []
    prefixes = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return [
        prefixes.get(p.kind, "") + p.name + ("=" if p.default is not inspect.Parameter.empty else "")
        for p in found
        if not p.name.startswith("_")
    ]


def described(value: Any) -> dict[str, Any]:
    """Of a class its public members, of what can be called its parameters."""
    if isinstance(value, ModuleType) or not callable(value):
        return {}
    if not inspect.isclass(value):
        return {"parameters": parameters(value)}
    # What comes from Python itself differs between its versions.
    own = {name for cls in value.__mro__ if cls.__module__.startswith("cutwater") for name in vars(cls)}
    members = {
        name: parameters(member) if callable(member := getattr(value, name)) else []
        for name in sorted(own)
        if not name.startswith("_")
    }
    return {"parameters": parameters(value), "members": members}


def public_names(package: str) -> dict[str, Any]:
    module = importlib.import_module(package)
    names = getattr(module, "__all__", None)
    if names is None:
        names = [n for n, v in vars(module).items() if inspect.isclass(v) and v.__module__ == package]
    return {name: described(getattr(module, name)) for name in sorted(names)}


def modules() -> Iterator[ModuleType]:
    for info in pkgutil.walk_packages(cutwater.__path__, "cutwater."):
        if not info.name.startswith(LEFT_OUT) and not info.name.endswith("__main__"):
            yield importlib.import_module(info.name)


def error_codes() -> dict[str, list[str]]:
    """Code → the codes of the classes above it."""
    found: dict[str, list[str]] = {}

    def visit(cls: type[cutwater.CutwaterError], above: list[str]) -> None:
        if cls.__module__.startswith("cutwater."):
            found[cls.code] = above
            for below in cls.__subclasses__():
                visit(below, [*above, cls.code])

    visit(cutwater.CutwaterError, [])
    return found


def commands() -> dict[str, dict[str, list[str]]]:
    """Command → argument or option → its other spellings, its variable, and whether it has to be said."""
    main = importlib.import_module("cutwater.cli.main")
    found: dict[str, dict[str, list[str]]] = {}

    def visit(name: str, command: Any) -> None:
        found[name] = {}
        for parameter in command.params:
            envvar = parameter.envvar if isinstance(parameter.envvar, str) else ""
            about = [*sorted([*parameter.opts, *parameter.secondary_opts]), envvar]
            found[name][parameter.opts[0]] = [*about, "required" if parameter.required else ""]
        for below, inner in getattr(command, "commands", {}).items():
            visit(f"{name} {below}", inner)

    for name in main.ENTRIES:
        visit(name, main.load(name))
    found[""] = {p.opts[0]: list(p.opts) for p in typer.main.get_group(main.app).params}
    return found


def metrics_in(collector: Any) -> list[str]:
    """Names and types, as Prometheus reads them."""
    registry = CollectorRegistry()
    registry.register(collector)
    return metric_lines(generate_latest(registry).decode())


def metric_lines(text: str) -> list[str]:
    return sorted(line.removeprefix("# TYPE ") for line in text.splitlines() if line.startswith("# TYPE "))


def job_metrics() -> list[str]:
    metrics = importlib.import_module("cutwater.jobs.metrics")
    messages = importlib.import_module("cutwater.jobs.messages")
    held = messages.HeldBy(**{**dict.fromkeys(messages.HeldBy.__struct_fields__, 1), "topic": "t"})
    numbers = dict.fromkeys(messages.Progress.__struct_fields__, 1)
    some = {"dropped_late": {"u": 1}, "late_sent": {"u": 1}, "held_by": held, "left_timers": {}}
    collector = metrics.JobCollector()
    collector.take(
        SimpleNamespace(pipeline="p", state=next(iter(metrics.JobState)), restarts=0),
        messages.Progress(**{**numbers, **some}),
    )
    return metrics_in(collector)


def surface() -> dict[str, Any]:
    exit_codes: dict[str, int] = next(m.EXIT_CODES for m in modules() if hasattr(m, "EXIT_CODES"))
    # All modules are imported now, so all errors are known.
    list(modules())
    return {
        "names": {package: public_names(package) for package in PACKAGES},
        "error_codes": error_codes(),
        "exit_codes": exit_codes,
        "commands": commands(),
        "job_metrics": job_metrics(),
    }


def main() -> None:
    target = Path(sys.argv[1])
    print(f"cutwater {cutwater.__version__} of {Path(cutwater.__file__).parent}")
    text = json.dumps(surface(), indent=1, sort_keys=True) + "\n"
    assert str(Path.cwd()) not in text
    target.write_text(text)
    print(f"{target.name}: {len(text)} characters")


if __name__ == "__main__":
    main()
