"""Jobs in a simulated cluster: users submit and operate them, and simulated agents run them.

What runs is what ships as far as it decides anything: the metadata repository with its job desk, ``AgentState`` with
its lease, ``JobCalls``, and staging and publishing with epochs. Machines, watchdogs, processes of jobs and the files of
their checkpoints are simulated here. Not here: Spark, and what the programs of jobs compute.
"""
