"""Pickles programs for workers. Functions are pickled by value, including those of the user's own modules."""

from __future__ import annotations

import inspect
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from types import ModuleType
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from cutwater.errors import InvalidArgument
from cutwater.pipeline.graph import Graph, GraphNode, SourceNode, TransformNode
from cutwater.pipeline.windowing.aggregates import Aggregator


def pickled_graph(pipeline: str, graph: Graph) -> bytes:
    """Pickle the graph for workers. Objects that belong to one process, such as a lock, are refused by name."""
    graph, given = copy(graph), graph
    # Code on data frames stays on the driver with the session that it may hold.
    graph.nodes = [replace(node, function=None) if isinstance(node, TransformNode) else node for node in given.nodes]
    with _pickled_by_value(graph):
        try:
            data: bytes = cloudpickle.dumps(graph)
        except Exception as error:
            raise _unpicklable(pipeline, graph, error) from error
    return data


def unpickled_graph(data: bytes) -> Graph:
    found: Graph = cloudpickle.loads(data)
    return found


@contextmanager
def _pickled_by_value(graph: Graph) -> Iterator[None]:
    """Pickle functions of the user's own modules by value, because workers may run where these modules do not exist."""
    code = [given for node in graph.nodes for given in _code_of(node)]
    modules = {inspect.getmodule(given if inspect.isroutine(given) else type(given)) for given in code}
    own = [module for module in modules if module is not None and _is_users(module)]
    for module in own:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in own:
            cloudpickle.unregister_pickle_by_value(module)


def _code_of(node: GraphNode) -> Iterator[Any]:
    for name in ("function", "arrow", "event_time"):
        given = getattr(node, name, None)
        if given is not None and not isinstance(given, str):
            yield given
    if isinstance(node, SourceNode) and (function := getattr(node.watermark, "function", None)) is not None:
        yield function
    for key in getattr(node, "keys", ()):
        if key is not None and key.function is not None:
            yield key.function
    for aggregate in getattr(node, "aggregates", {}).values():
        if isinstance(aggregate, Aggregator):
            yield aggregate


def _is_users(module: ModuleType) -> bool:
    """Report whether a module is the user's. The main program does not count: it is always pickled by value."""
    path = getattr(module, "__file__", None)
    if path is None or module.__name__ == "__main__" or module.__name__.split(".")[0] in ("cutwater", "pyspark"):
        return False
    installed = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return not any(path.startswith((f"{place}/", f"{place}\\")) for place in installed)


def _unpicklable(pipeline: str, graph: Graph, error: Exception) -> InvalidArgument:
    for node in graph.nodes:
        for given in _code_of(node):
            if _is_picklable(given):
                continue
            name = getattr(given, "__qualname__", None) or f"an object of {type(given).__qualname__}"
            uses = ", ".join(f"{used!r} ({type(value).__name__})" for used, value in _used(given).items())
            return InvalidArgument(
                f"pipeline {pipeline!r}, {node.label}: {name} cannot be sent to Spark's workers: {error}"
                + (f"; it uses {uses}" if uses else "")
                + ". Locks, connections, open files and the like belong to one process: make them in the worker, where "
                "they are used, for example with functools.cache, instead of once where the pipeline is built"
            )
    return InvalidArgument(f"pipeline {pipeline!r} cannot be sent to Spark's workers: {error}")


def _is_picklable(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True


def _used(given: Any) -> dict[str, Any]:
    found: dict[str, Any] = dict(getattr(given, "__dict__", {}))
    if inspect.isroutine(given):
        try:
            closure = inspect.getclosurevars(given)
        except (TypeError, ValueError):
            return {}
        found = {**closure.globals, **closure.nonlocals}
    return {name: value for name, value in found.items() if not _is_picklable(value)}
