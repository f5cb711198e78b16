"""Which places can hold checkpoints, by their names; ``tests/spark/test_stores.py`` has the rest."""

from __future__ import annotations

import pytest

from cutwater.cli.commands.pipeline import PipelineRunOptions
from cutwater.core.jobs.agents import AgentDescription, AgentRoot, check_agent
from cutwater.core.jobs.checkpoint_stores import check_checkpoint_store, scheme_of
from cutwater.errors import InvalidArgument
from cutwater.savepoints.files import for_spark, is_local


@pytest.mark.parametrize(
    ("place", "scheme"),
    [
        ("/var/lib/x", "file"),
        ("x", "file"),
        ("./a:b/c", "file"),
        ("a:b", "file"),
        ("file:/x", "file"),
        ("file:///x", "file"),
        ("hdfs://name:8020/x", "hdfs"),
        ("HDFS://name/x", "hdfs"),
        ("hdfs:x", "hdfs"),
        ("viewfs:///x", "viewfs"),
        ("s3a://bucket/x", "s3a"),
        ("raw+local:/x", "raw+local"),
        ("", "file"),
    ],
)
def test_the_scheme_of_a_place(place: str, scheme: str) -> None:
    assert scheme_of(place) == scheme
    assert is_local(place) == (scheme == "file")
    assert scheme_of(for_spark(place)) == scheme


@pytest.mark.parametrize("place", ["/x", "c", "file:///x", "hdfs://name/x", "hdfs:///x", "viewfs://cluster/x"])
def test_places_for_checkpoints(place: str) -> None:
    check_checkpoint_store(place)


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("s3a://b/x", "a rename there copies the file"),
        ("s3://b/x", "a rename there copies the file"),
        ("gs://b/x", "a rename there copies the file"),
        ("abfss://c@a/x", "depends on how the store is set up"),
        ("ofs://o/x", "depends on how the store is set up"),
        ("webhdfs://n/x", "it is not known to create and rename files atomically"),
        ("rawlocal:/x", "it is not known to create and rename files atomically"),
    ],
)
def test_a_place_for_no_checkpoints_is_refused_wherever_it_is_named(place: str, reason: str) -> None:
    told = rf"on {place.partition(':')[0]}://, and that cannot hold checkpoints: .*{reason}.*hdfs:// or viewfs://"
    with pytest.raises(InvalidArgument, match=told):
        check_checkpoint_store(place)
    with pytest.raises(InvalidArgument, match=f"the checkpoint {place} is {told}"):
        PipelineRunOptions(checkpoint=place).asked("fraud.py", None)
    agent = AgentDescription("one", 1, checkpoint_roots=(AgentRoot("default", is_shared=True, place=place),))
    with pytest.raises(InvalidArgument, match=f"checkpoint root 'default' of agent 'one': {place} is {told}"):
        check_agent(agent, 1)
    # Only one process writes the manifest of a savepoint.
    check_agent(AgentDescription("one", 1, savepoint_roots=agent.checkpoint_roots), 1)
