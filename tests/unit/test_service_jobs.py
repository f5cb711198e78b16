"""Jobs over HTTP, as far as no cluster is needed: fields of specifications, places, and text that comes in pieces."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from cutwater.core.jobs.job_spec import JobSpec
from cutwater.errors import InvalidArgument, NotAnswered, ResourceExhausted, Unavailable
from cutwater.protocol.errors import WireError, from_wire
from cutwater.service.http.http_problems import HttpRefusal, status_of
from cutwater.service.places import Places
from cutwater.service.resources.jobs.job_output import split_text
from cutwater.service.resources.jobs.job_views import SpecView, view_spec
from cutwater.service.resources.jobs.spec_bodies import SpecBody, SpecChanges, changed, spec_of

GOOD: dict[str, Any] = {"program": "0" * 64, "entry": "fraud.py:p"}


def test_a_specification_has_the_same_fields_wherever_it_is_shown_or_sent() -> None:
    for kind in (SpecBody, SpecChanges, SpecView):
        assert set(kind.__struct_fields__) == set(JobSpec.__struct_fields__), kind
    assert spec_of(msgspec.convert(GOOD, SpecBody)) == JobSpec(**GOOD)
    spec = JobSpec(**GOOD, arguments={"a": "1"}, labels={"disk": "ssd"}, cpus=1.5, restart="none")
    assert spec_of(msgspec.json.decode(msgspec.json.encode(view_spec(spec)), type=SpecBody)) == spec


def test_a_change_changes_what_it_names() -> None:
    before = JobSpec(**GOOD, arguments={"a": "1", "b": "2"}, conf={"spark.x": "1"}, parallelism=3)
    after = changed(before, msgspec.convert({"arguments": {"a": None, "c": "3"}, "slots": 2}, SpecChanges))
    assert after == msgspec.structs.replace(before, arguments={"b": "2", "c": "3"}, slots=2)
    with pytest.raises(InvalidArgument, match="nothing changes"):
        changed(before, SpecChanges())
    with pytest.raises(InvalidArgument, match="secret"):
        changed(before, SpecChanges(conf={"spark.hadoop.fs.s3a.secret.key": "x"}))


def test_places_are_bounded_in_all_and_for_each_caller() -> None:
    places = Places("streams", 3, 2)
    with ExitStack() as held:
        for _ in range(2):
            held.enter_context(places.one("ann"))
        with pytest.raises(HttpRefusal, match="of this caller") as refused, places.one("ann"):
            pass
        assert (refused.value.status, refused.value.code) == (429, "too_many_streams")
        held.enter_context(places.one("bob"))
        with pytest.raises(HttpRefusal, match="3 streams"), places.one("eve"):
            pass
        assert places.taken == 3
    assert places.taken == 0
    # Without tokens, all callers are one.
    with places.one(""), places.one(""), places.one(""):
        assert places.taken == 3


@given(text=st.text(), cuts=st.lists(st.integers(0, 100)))
def test_text_in_pieces_is_the_same_text(text: str, cuts: list[int]) -> None:
    data, found, rest = text.encode(), "", b""
    at = 0
    for cut in [*sorted(cuts), len(data)]:
        some, rest = split_text(rest + data[at:cut], is_last=False)
        at = max(at, cut)
        found += some.decode()
    last, rest = split_text(rest, is_last=True)
    assert (found + last.decode(), rest) == (text, b"")


@given(data=st.binary(max_size=50))
def test_bytes_that_are_no_text_are_not_held_back(data: bytes) -> None:
    some, rest = split_text(data, is_last=False)
    assert some + rest == data
    assert len(rest) <= 3


def test_only_what_is_down_is_unavailable() -> None:
    assert status_of(Unavailable("the leader is away")) == 503
    assert status_of(ResourceExhausted("16 questions wait", retry_ms=1_000)) == 429
    # As it comes from an agent, whose errors have a code and a message only.
    too_large = from_wire(
        WireError("resource_exhausted", "the answer has 2000000 bytes: ask for less", False, Raw(b""))
    )
    assert status_of(too_large) == 422
    assert issubclass(NotAnswered, Unavailable)
