"""Runs an agent: ``python -m tests.integration.agent_process OPTIONS``, which is JSON. Its jobs run no Spark, unless
``is_real`` is among the options."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

from cutwater.agent.agent_options import AgentServing, AgentStartOptions
from cutwater.agent.processes.limits import SlotLimits
from cutwater.agent.roots import parse_root
from cutwater.agent.start import run_agent
from cutwater.cli.framework.exit_codes import show
from cutwater.errors import CutwaterError
from cutwater.wire.identity.tls import client_tls

PROGRAMS, KINDS = "tests.integration.agent", ("job", "errand")


def serving(told: AgentServing) -> None:
    print(told.pid, flush=True)


def main(given: str) -> None:
    logging.basicConfig(level="INFO", format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    told = json.loads(given)
    kinds = ("checkpoint", "savepoint")
    roots = {f"{kind}_roots": tuple(parse_root("--root", text) for text in told.pop(kind)) for kind in kinds}
    ca = told.pop("tls_ca", "")
    processes = (
        {} if told.pop("is_real", False) else {f"{kind}_process": f"{PROGRAMS}_{kind}_program" for kind in KINDS}
    )
    options = AgentStartOptions(
        token=Path(token) if (token := told.pop("token_file", "")) else "",
        context=client_tls(Path(ca)) if ca else None,
        tls=(ca, "", ""),
        work_dir=Path(told.pop("work_dir")),
        limits=SlotLimits(*told.pop("limits", (0, 0.0))),
        job_users=tuple(told.pop("job_users", ())),
        **processes,
        **roots,
        **told,
    )
    try:
        run_agent(options, serving)
    except CutwaterError as error:
        sys.exit(show(error))


if __name__ == "__main__":
    main(sys.argv[1])
