"""A process that writes to a store until it is killed or its disk fails. It says what was confirmed, line by line.

Arguments: the path of the database, the seed of the history, and how large files may become (0: as large as they like).
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
from random import Random

from store_kit import HERE, ONE, History

from cutwater.errors import CutwaterError
from cutwater.metadata.stores.open_store import open_store
from cutwater.types import ClusterId


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


async def write(path: str, seed: int) -> None:
    store = await open_store(f"sqlite:{path}", cluster=ClusterId(7), may_wait=True)
    loaded = await store.load()
    history = History(seed)
    history.next(loaded.snapshot.index + len(loaded.decisions))
    epoch = await store.acquire(ONE, HERE, loaded.leader.epoch)
    say("leads", epoch)
    # The history must not depend on how it is cut into batches.
    errors, sizes = 0, Random()
    while errors < 3:
        after = history.state.index
        decisions = history.next(sizes.randint(1, 4))
        try:
            await store.append(epoch, after, decisions)
            say("stored", history.state.index)
            if history.state.index % 7 == 0:
                await store.trim(epoch, history.state.snapshot())
                say("trimmed", history.state.index)
        except CutwaterError as error:
            errors += 1
            say("failed", error.code)
    await store.close()


def main() -> None:
    path, seed, limit = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if limit:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    asyncio.run(write(path, seed))


if __name__ == "__main__":
    main()
