"""Lists of requirements, and the environments that are made of them, with wheels that the tests build."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from cutwater.errors import Damaged, InvalidArgument, Unavailable
from cutwater.programs import environments
from cutwater.programs.content_cache import TEMPORARY
from cutwater.programs.environments import Environment, Environments, PackageSource
from cutwater.programs.requirements import read_requirements

ONE, TWO = "sha256:" + "1" * 64, "sha256:" + "2" * 64


def wheel(directory: Path, name: str, version: str, content: str) -> str:
    """Make a wheel, and return its hash as pip writes it."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": content,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(text)}\n"
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    made = directory / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return f"sha256:{hashlib.sha256(made.read_bytes()).hexdigest()}"


# Lists.


def test_lists_that_mean_the_same_are_stored_the_same() -> None:
    first = read_requirements(
        f"# made by hand\nB_b == 1.0 \\\n    --hash={TWO} \\\n  --hash={ONE}\n\na==2.1 --hash={ONE} # a\n"
    )
    second = read_requirements(f"a==2.1 --hash={ONE}\nb-b==1.0 --hash={ONE} --hash={TWO}\n".encode())
    assert first == second
    assert first.text == f"a==2.1 --hash={ONE}\nb-b==1.0 --hash={ONE} --hash={TWO}\n"
    assert first.packages == ("a==2.1", "b-b==1.0")
    assert read_requirements(first.text) == first
    marked = read_requirements(f"c[x, y]==1!2.0.post1 ;  python_version >= '3.8' --hash={ONE}")
    assert marked.text == f"c[x,y]==1!2.0.post1 ; python_version >= '3.8' --hash={ONE}\n"
    assert read_requirements(marked.text) == marked


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "lists no package"),
        (f"a>=1 --hash={ONE}", "line 1: 'a>=1' names no exact version"),
        (f"\na==1.* --hash={ONE}", "line 2: .* names no exact version"),
        ("a==1", "line 1: a==1 has no hash"),
        ("a==1 --hash=md5:abc", "not sha256"),
        (f"--index-url https://evil.example\na==1 --hash={ONE}", "the operator's choice"),
        ("-r other.txt", "the operator's choice"),
        ("-e .", "the operator's choice"),
        (f"a @ https://evil.example/a.whl --hash={ONE}", "the operator's choice"),
        (f"./a-1.whl --hash={ONE}", "names no exact version"),
        (f"a==1 --hash={ONE} --global-option=x", "names no exact version"),
        (f"a==1 --hash={ONE}\nA==2 --hash={ONE}", "line 2: a is listed twice"),
        (f"a==1 ; python_version>'3' --config-settings=x=y --hash={ONE}", "is no package: options"),
        (f"a==1 ; '${{HOME}}'>'3' --hash={ONE}", "is no package: options"),
        (f"pyspark==4.0 --hash={ONE}", "comes with the agent"),
        (f"Cutwater==4.0 --hash={ONE}", "comes with the agent"),
        (b"\xff", "UTF-8"),
    ],
)
def test_what_is_no_list(text: str | bytes, told: str) -> None:
    with pytest.raises(InvalidArgument, match=told):
        read_requirements(text)


# Environments.


def python(environment: Environment, program: str) -> str:
    command = [str(environment.python), "-c", program]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()


async def make(environments: Environments, text: str) -> Environment:
    wanted = read_requirements(text)

    async def fetch(sha256: str) -> bytes:
        assert sha256 == wanted.sha256
        return wanted.text.encode()

    return await environments.use(wanted.sha256, fetch)


def test_an_environment_has_its_wheels_and_what_the_agent_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # None of this is for pip: only the configuration of the agent is.
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TARGET", "PYTHONPATH"):
        monkeypatch.setenv(name, str(tmp_path / "elsewhere"))
    links = tmp_path / "wheels"
    links.mkdir()
    listed = f"tiny_rules==1.2 --hash={wheel(links, 'tiny_rules', '1.2', 'MOST = 12')}\n"
    wheel(links, "tiny_rules", "1.3", "MOST = 13")
    cache = tmp_path / "cache"
    made = asyncio.run(make(Environments(cache, PackageSource(find_links=str(links))), listed))
    program = "import json, sys, tiny_rules, cutwater, msgspec; print(json.dumps([tiny_rules.MOST, cutwater.__file__]))"
    most, place = json.loads(python(made, program))
    assert most == 12
    assert Path(place).parts[-3:] == ("src", "cutwater", "__init__.py")
    assert python(made, "import pyspark; print(pyspark.__version__)")
    assert "Successfully installed" in made.log.read_text()
    assert not (made.log.parent / "index.txt").exists()
    # It is there now: no index is needed, and nothing is fetched.
    again = asyncio.run(Environments(cache, PackageSource()).use(read_requirements(listed).sha256, _no_fetch))
    assert again.python == made.python
    made.release()
    again.release()


async def _no_fetch(sha256: str) -> bytes:
    raise AssertionError("it is there already")


def test_a_wheel_with_another_hash_is_not_installed(tmp_path: Path) -> None:
    wheel(tmp_path, "tiny_rules", "1.2", "MOST = 12")
    places = Environments(tmp_path / "cache", PackageSource(find_links=str(tmp_path)))
    with pytest.raises(InvalidArgument, match="cannot be installed") as failed:
        asyncio.run(make(places, f"tiny_rules==1.2 --hash={ONE}"))
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in failed.value.message
    with pytest.raises(InvalidArgument, match="No matching distribution found for tiny-rules==9"):
        asyncio.run(make(places, f"tiny_rules==9 --hash={ONE}"))
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_what_an_agent_lacks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgument, match="--index-url or --find-links"):
        asyncio.run(make(Environments(tmp_path / "cache", PackageSource()), f"a==1 --hash={ONE}"))

    async def fetch(sha256: str) -> bytes:
        return b"other"

    places = Environments(tmp_path / "cache", PackageSource(find_links=str(tmp_path)))
    with pytest.raises(Damaged, match="another hash"):
        asyncio.run(places.use("0" * 64, fetch))
    monkeypatch.setattr(environments.importlib.util, "find_spec", lambda name: None)
    ran: list[list[str]] = []

    def run(command: list[str], *_: object) -> None:
        ran.append(command)
        raise environments._InstallFailed("no ensurepip")

    monkeypatch.setattr(environments, "_run", run)
    with pytest.raises(Unavailable, match="has no pip"):
        asyncio.run(make(places, f"a==1 --hash={ONE}"))
    assert "--without-pip" not in ran[0]


def test_an_installation_has_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Environments, "_made", lambda *_: [sys.executable, "-c", "import time; time.sleep(60)"])
    slow = Environments(tmp_path / "cache", PackageSource(find_links=str(tmp_path)), install_seconds_max=1.5)
    with pytest.raises(Unavailable, match="took too long"):
        asyncio.run(make(slow, f"a==1 --hash={ONE}"))
    talks = "while True: print('x' * 100_000, flush=True)"
    monkeypatch.setattr(Environments, "_made", lambda *_: [sys.executable, "-c", talks])
    with pytest.raises(InvalidArgument, match="printed too much"):
        asyncio.run(make(Environments(tmp_path / "cache", PackageSource(find_links=".")), f"a==1 --hash={ONE}"))
    monkeypatch.setattr(environments, "INSTALLED_BYTES_MAX", 10)
    monkeypatch.setattr(Environments, "_made", lambda *_: [sys.executable, "-c", "import time; time.sleep(60)"])
    with pytest.raises(InvalidArgument, match="larger than"):
        asyncio.run(make(Environments(tmp_path / "cache", PackageSource(find_links=".")), f"a==1 --hash={ONE}"))


def test_an_installation_ends_when_nobody_waits_for_it_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Environments, "_made", lambda *_: [sys.executable, "-c", "import time; time.sleep(60)"])
    slow = Environments(tmp_path / "cache", PackageSource(find_links=str(tmp_path)))

    async def cancelled() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await make(slow, f"a==1 --hash={ONE}")
        give_up = time.monotonic() + 20
        while [entry for entry in (tmp_path / "cache").iterdir() if entry.name.startswith(TEMPORARY)]:
            assert time.monotonic() < give_up, "it goes on"
            await asyncio.sleep(0.05)

    asyncio.run(cancelled())
