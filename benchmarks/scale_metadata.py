"""A metadata node for ``benchmarks.scale``, as a process of its own: the shipped one, as the command line runs it."""

from __future__ import annotations

import sys
from pathlib import Path

from cutwater.metadata.start import MetadataServing, MetadataStartOptions, run_metadata_node
from cutwater.types import ClusterId, MetadataNodeId


def main() -> int:
    store, number, folder, dead_after = sys.argv[1:]
    options = MetadataStartOptions(
        ClusterId(1),
        MetadataNodeId(int(number)),
        "127.0.0.1:0",
        store,
        node_dead_after_seconds=float(dead_after),
        key_file=Path(folder) / f"metadata{number}.key",
    )

    def serving(told: MetadataServing) -> None:
        (Path(folder) / f"metadata{number}.address").write_text(told.address)

    run_metadata_node(options, serving)
    return 0


if __name__ == "__main__":
    sys.exit(main())
