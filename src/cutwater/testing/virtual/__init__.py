"""The shipped servers and clients under virtual time.

``loop.py`` runs the callbacks of many simulated processes in one thread, with a clock that jumps; ``network.py`` gives
them connections with faults, ``machines.py`` disks and power, ``system.py`` clocks and chance. ``cluster.py`` puts the
shipped servers on machines, ``workload.py`` has clients that use ``AsyncClient``, ``nemesis.py`` injects faults, and
``simulation.py`` runs them all and lets the checkers of ``testing/checkers`` judge. The same seed gives the same run.
"""
