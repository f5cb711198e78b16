"""Python environments for the packages that a program needs: one for each list of requirements, made once on an agent.

An environment has the wheels of the list, each of which has one of its hashes, and sees cutwater, PySpark and whatever
else the agent itself has. Nothing is built from source, no package that the list leaves out is looked for, and where
wheels come from is in the configuration of the agent alone.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import signal
import site
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import NamedTuple

import msgspec
from msgspec import Struct

import cutwater.errors
from cutwater.errors import CutwaterError, Damaged, DeadlineExceeded, InvalidArgument, Unavailable
from cutwater.programs.content_cache import CacheLease, ContentCache, leased
from cutwater.programs.packing import sha256_of
from cutwater.programs.program_cache import Fetch
from cutwater.programs.requirements import Requirements, read_requirements
from cutwater.runtime.local_files import write_secret
from cutwater.runtime.redaction import without_secrets

CACHE_BYTES_MAX = 16 * 1024**3
INSTALL_SECONDS_MAX = 600.0
INSTALLED_BYTES_MAX = 4 * 1024**3
LOG_BYTES_MAX = 256 * 1024
TOLD_CHARS_MAX = 2_000
LOOK_SECONDS = 0.2
END_SECONDS = 5.0
MARK, LOG, PYTHON, OF_AGENT = "environment.json", "install.log", "bin/python", "_agent.pth"
_KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE")
_PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


class PackageSource(Struct, frozen=True):
    """Where wheels come from: an index, a directory of this machine, or both. Nothing is installed without one."""

    index_url: str = ""
    find_links: str = ""

    def options(self) -> str:
        """Return the options of pip, each on a line. Its own configuration and variables do not count."""
        if not self.index_url and not self.find_links:
            raise InvalidArgument(
                "the job needs packages, and this agent has no index of packages: start it with --index-url or "
                "--find-links, or put pure Python packages into the program"
            )
        index = f"--index-url {self.index_url}" if self.index_url else "--no-index"
        return f"{index}\n--find-links {self.find_links}\n" if self.find_links else f"{index}\n"


class EnvironmentMark(Struct, frozen=True):
    """The file that is written last: an environment without it is incomplete."""

    sha256: str
    packages: tuple[str, ...]


class Environment:
    """An environment that is in use. ``python`` is its interpreter."""

    def __init__(self, lease: CacheLease) -> None:
        self._lease = lease

    @property
    def python(self) -> Path:
        return self._lease.path / PYTHON

    @property
    def log(self) -> Path:
        """What the installation printed."""
        return self._lease.path / LOG

    def release(self) -> None:
        self._lease.release()


class Environments:
    """See the module. ``is_for_all_users``: jobs run as other users than this process."""

    def __init__(
        self,
        root: Path,
        source: PackageSource,
        *,
        bytes_max: int = CACHE_BYTES_MAX,
        install_seconds_max: float = INSTALL_SECONDS_MAX,
        is_for_all_users: bool = False,
    ) -> None:
        self._cache = ContentCache(root, bytes_max=bytes_max, is_for_all_users=is_for_all_users)
        self._source, self._seconds_max = source, install_seconds_max

    async def use(self, sha256: str, fetch: Fetch) -> Environment:
        """Return the environment for a list of requirements, by its SHA-256. Make it if it is not there: ``fetch``
        returns the list. Release it when no process runs in it any more."""
        name = f"{sha256}-{_of_agent()}"
        lease = await leased(lambda _: self._cache.taken(name, lambda entry: _is_whole(sha256, entry)))
        if lease is not None:
            return Environment(lease)
        text = await fetch(sha256)
        if sha256_of(text) != sha256:
            raise Damaged(f"what was fetched as the list of requirements {sha256} has another hash: fetch it again")
        wanted = read_requirements(text)

        def use(given_up: Event) -> CacheLease:
            return self._cache.use(
                name,
                lambda entry: self._install(sha256, wanted, entry, given_up),
                lambda entry: _is_whole(sha256, entry),
                seconds=self._seconds_max,
                given_up=given_up,
            )

        return Environment(await leased(use))

    def _install(self, sha256: str, wanted: Requirements, entry: Path, given_up: Event) -> None:
        options = self._source.options()
        listed, log, index = entry / "requirements.txt", entry / LOG, entry / "index.txt"
        listed.write_text(wanted.text)
        # Not as arguments, which every user of the machine sees: the address of an index may have a password.
        write_secret(index, options.encode())
        patience = _Patience(time.monotonic() + self._seconds_max, given_up)
        with log.open("wb") as output:
            pip = self._made(entry, output.fileno(), patience)
            install = [*pip, "install", "--disable-pip-version-check", "--no-input", "--no-cache-dir"]
            install += ["--no-compile", "--require-hashes", "--no-deps", "--only-binary", ":all:"]
            install += ["--requirement", str(index), "--requirement", str(listed)]
            try:
                _run(install, output.fileno(), entry, patience)
            except _InstallFailed as error:
                raise InvalidArgument(_told(error, wanted, log)) from None
            finally:
                index.unlink()
        # Only now: pip would take packages of the agent for installed ones, without comparing their hashes.
        _show_agent(entry)
        mark = entry / MARK
        mark.write_bytes(msgspec.json.encode(EnvironmentMark(sha256, wanted.packages)))
        # The rename that follows must not be there without what was installed.
        os.sync()

    def _made(self, entry: Path, output: int, patience: _Patience) -> list[str]:
        """Make an environment without packages. Returns the command that runs pip for it: the agent's pip or, if that
        has none, the one that Python brings along, inside the environment."""
        make = [sys.executable, "-m", "venv"]
        if importlib.util.find_spec("pip") is not None:
            _run([*make, "--without-pip", str(entry)], output, entry, patience)
            return [sys.executable, "-m", "pip", "--isolated", "--python", str(entry / PYTHON)]
        try:
            _run([*make, str(entry)], output, entry, patience)
        except _InstallFailed:
            raise Unavailable(
                f"{sys.executable} has no pip, which installs the packages of jobs: install it with "
                f"`{sys.executable} -m ensurepip`, or by the package python3-venv of the system"
            ) from None
        return [str(entry / PYTHON), "-m", "pip", "--isolated"]


def _is_whole(sha256: str, entry: Path) -> bool:
    try:
        mark = msgspec.json.decode((entry / MARK).read_bytes(), type=EnvironmentMark)
        return mark.sha256 == sha256 and (entry / PYTHON).exists()
    except (OSError, msgspec.DecodeError, msgspec.ValidationError):
        return False


# The agent's own packages.


def _places_of_agent() -> list[str]:
    """Return the directories in which this process finds installed packages, and cutwater."""
    found = [*site.getsitepackages(), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    if site.ENABLE_USER_SITE:
        found.append(site.getusersitepackages())
    own = str(Path(cutwater.errors.__file__).resolve().parents[1])
    return [place for place in dict.fromkeys([*found, own]) if os.path.isdir(place)]


def _of_agent() -> str:
    """Return a short name for the interpreter and the packages of this agent: others need other environments."""
    what = [sys.version, sys.base_prefix, platform.machine(), *_places_of_agent()]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def _show_agent(entry: Path) -> None:
    """Let the environment see the packages of this agent, behind its own ones."""
    (packages,) = entry.glob("lib/python*/site-packages")
    lines = (f"import site; site.addsitedir({place!r})" for place in _places_of_agent())
    (packages / OF_AGENT).write_text("".join(f"{line}\n" for line in lines))


# Pip.


class _InstallFailed(CutwaterError):
    """A command ended with an error."""


class _Patience(NamedTuple):
    """How long a command may take: until this time, and as long as somebody waits for it."""

    until: float
    given_up: Event

    def check(self) -> None:
        if self.given_up.is_set():
            raise Unavailable("the installation of packages was given up: nobody waits for it any more")
        if time.monotonic() >= self.until:
            raise DeadlineExceeded("the installation of packages took too long: see the index, or allow more time")


def _run(command: list[str], output: int, entry: Path, patience: _Patience) -> None:
    """Run a command in a session of its own, and end all of it if it takes too long or installs too much."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        cwd=entry,
        env=_environment_of(entry),
        start_new_session=True,
    )
    try:
        for step in _steps(process):
            patience.check()
            if os.fstat(output).st_size > LOG_BYTES_MAX:
                raise InvalidArgument("the installation of packages printed too much")
            if step % 10 == 0 and _size(entry) > INSTALLED_BYTES_MAX:
                raise InvalidArgument(f"the packages are larger than {INSTALLED_BYTES_MAX // 1024**3} GiB: list fewer")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(END_SECONDS)
    if process.returncode:
        raise _InstallFailed(f"{' '.join(command[:4])} ended with exit code {process.returncode}")


def _steps(process: subprocess.Popen[bytes]) -> Iterator[int]:
    """Yield at regular times until the process has ended."""
    step = 0
    while True:
        try:
            process.wait(LOOK_SECONDS)
            return
        except subprocess.TimeoutExpired:
            step += 1
            yield step


def _environment_of(entry: Path) -> Mapping[str, str]:
    """Return variables without those that change what pip and Python do."""
    kept = {name: os.environ[name] for name in (*_KEPT_VARIABLES, *_PROXIES) if name in os.environ}
    return {**kept, "PIP_CONFIG_FILE": os.devnull, "PYTHONNOUSERSITE": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def _size(path: Path) -> int:
    size = 0
    for parent, _, files in os.walk(path):
        for name in files:
            with suppress(OSError):
                size += os.lstat(os.path.join(parent, name)).st_size
    return size


def _told(error: CutwaterError, wanted: Requirements, log: Path) -> str:
    """Say in words why the installation failed: what pip said, without secrets."""
    said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in said if line.startswith("ERROR") or "HASH" in line or "Expected sha256" in line]
    told = without_secrets("\n".join(errors or said[-10:]))[-TOLD_CHARS_MAX:]
    return (
        f"the {len(wanted.packages)} packages of the list of requirements cannot be installed ({error.message}). The "
        f"list has only wheels for this Python ({platform.python_version()}, {sysconfig.get_platform()}), with the "
        f"hashes that the index has for them? pip said:\n{told}"
    )
