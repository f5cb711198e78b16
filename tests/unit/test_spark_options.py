from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

from cutwater.core.read.watermark import BoundedOutOfOrderness, Punctuated
from cutwater.errors import InvalidArgument
from cutwater.spark.options import READING, LogPoint, read_options, where_of
from cutwater.types import GLSN, CutTime

SERVERS = "cutwater://127.0.0.1:7000"
LEAST = {"servers": SERVERS, "subscribe": "orders"}
DOCS = Path(__file__).resolve().parents[2] / "docs" / "spark.md"


def test_everything_may_be_left_out_but_the_log_and_its_topics() -> None:
    batch, stream = (read_options(LEAST, streaming=streaming) for streaming in (False, True))
    assert (batch.topics, batch.start.end, batch.stop.end) == (("orders",), "earliest", "latest")
    assert (stream.start.end, stream.fail_on_data_loss, stream.headers, stream.columns) == ("latest", True, False, None)
    assert batch.strategy == BoundedOutOfOrderness(0)


def test_names_in_any_case_and_values_in_any_form() -> None:
    options = read_options(
        {
            "PATH": "/data",
            "subscribepattern": "orders-.*",
            "COLUMNS": " glsn , value",
            "maxBytesPerTrigger": "64m",
            "timeout": "5 seconds",
            "watermark.punctuated": "TRUE",
            "watermark.idleafter": "2 minutes",
        },
        streaming=True,
    )
    assert (options.where.path, options.pattern, options.columns) == ("/data", "orders-.*", ("glsn", "value"))
    assert (options.bytes_max, options.where.timeout) == (64 * 1024 * 1024, 5.0)
    assert options.strategy == Punctuated(120_000_000)


@pytest.mark.parametrize(
    ("given", "start"),
    [
        ({"startingOffsets": "earliest"}, LogPoint(end="earliest", option="startingOffsets")),
        ({"startingOffsets": "7"}, LogPoint(offset=GLSN(6), option="startingOffsets")),
        ({"startingOffsets": '{"glsn": 7}'}, LogPoint(offset=GLSN(7), option="startingOffsets")),
        ({"startingTimestamp": "1500"}, LogPoint(time=CutTime(1_500_000), option="startingTimestamp")),
        ({"startingTimestamp": "1970-01-01T00:00:02Z"}, LogPoint(time=CutTime(2_000_000), option="startingTimestamp")),
    ],
)
def test_where_to_begin(given: dict[str, str], start: LogPoint) -> None:
    assert read_options(LEAST | given, streaming=True).start == start


@pytest.mark.parametrize(
    ("given", "streaming", "message"),
    [
        ({"topic": "orders"}, False, r"no option 'topic'; options are servers, path, "),
        ({"path": "/data"}, False, r"'servers' \('cutwater://.*'\) and 'path' \('/data'\) exclude each other"),
        ({"subscribePattern": "a"}, False, "'subscribe' .* and 'subscribePattern' .* exclude each other"),
        ({"startingOffsets": "1", "startingTimestamp": "1"}, True, "exclude each other: give one of them"),
        ({"startingOffsets": "newest"}, True, "'startingOffsets' is 'newest': earliest or latest, a GLSN from 1 on"),
        ({"startingOffsets": "0"}, True, "'startingOffsets' is '0'"),
        ({"startingOffsets": '{"orders": {"0": 1}}'}, True, r'an offset as Spark shows it, {"glsn": n}'),
        ({"startingOffsets": "latest"}, False, "'startingOffsets' is 'latest': earliest, a GLSN"),
        ({"endingOffsets": "earliest"}, False, "'endingOffsets' is 'earliest': latest, a GLSN"),
        ({"endingOffsets": "9"}, True, "'endingOffsets' is '9': a streaming query has no end"),
        ({"maxOffsetsPerTrigger": "9"}, False, "'maxOffsetsPerTrigger' is '9': it is for streaming queries"),
        ({"maxOffsetsPerTrigger": "0"}, True, "'maxOffsetsPerTrigger' is '0': a whole number from 1 on"),
        ({"maxBytesPerTrigger": "many"}, True, "'maxBytesPerTrigger' is 'many': a number of bytes is wanted"),
        ({"startingTimestamp": "noon"}, True, "'startingTimestamp' is 'noon': milliseconds since 1970, or a time"),
        ({"startingTimestamp": "2026-01-31T12:00:00"}, True, "'startingTimestamp' is .* has no time zone"),
        ({"failOnDataLoss": "maybe"}, True, "'failOnDataLoss' is 'maybe': true or false is wanted"),
        ({"watermark.bound": "5"}, True, "'watermark.bound' is '5': a time is wanted, such as 500ms"),
        (
            {"watermark.bound": "5s", "watermark.punctuated": "true"},
            True,
            "'watermark.bound' is '5s': what is declared",
        ),
        ({"columns": "glsn,,value"}, True, "'columns' is 'glsn,,value': names are separated by commas"),
        ({"tls.key": "key.pem"}, True, "'tls.ca' is missing: TLS needs the PEM file of the servers' authority"),
        (
            {"tls.ca": "a.pem", "tls.key": "k.pem"},
            True,
            "'tls.certificate' is missing: a certificate and its private key",
        ),
        ({"token": "hunter2"}, True, "'token' is refused, .* name it with option 'token.file'"),
    ],
)
def test_what_is_wrong_is_named_with_what_is_allowed(given: dict[str, str], streaming: bool, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        read_options(LEAST | given, streaming=streaming)


def test_what_is_missing_and_patterns() -> None:
    with pytest.raises(InvalidArgument, match="'servers' or 'path' is needed"):
        read_options({"subscribe": "orders"}, streaming=False)
    with pytest.raises(InvalidArgument, match="'subscribe' or 'subscribePattern' is needed"):
        read_options({"servers": SERVERS}, streaming=False)
    with pytest.raises(InvalidArgument, match="no regular expression"):
        read_options({"servers": SERVERS, "subscribePattern": "("}, streaming=False)
    with pytest.raises(InvalidArgument, match="does not name a cluster"):
        read_options({"servers": "localhost:1", "subscribe": "orders"}, streaming=False)


def test_a_pattern_selects_no_reserved_name() -> None:
    by_pattern = read_options({"servers": SERVERS, "subscribePattern": ".*"}, streaming=False)
    assert [by_pattern.selects(name) for name in ("orders", "_audit", "a_b")] == [True, False, True]
    by_name = read_options({"servers": SERVERS, "subscribe": "_audit"}, streaming=False)
    assert [by_name.selects(name) for name in ("orders", "_audit")] == [False, True]


def test_the_guide_explains_every_option() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert [name for name in READING if f"`{name}`" not in text] == []


def test_a_token_is_never_part_of_options_or_of_what_is_sent_to_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options name a file. A process reads it when it connects, so it may be replaced meanwhile."""
    file = tmp_path / "token"
    file.write_text("hunter2\n")
    file.chmod(0o600)
    secured = {"servers": SERVERS, "token.file": str(file), "insecure": "true", "timeout": "5s"}
    files = {"tls.certificate": "/c.pem", "tls.key": "/k.pem", "tls.ca": "/a.pem"}
    for given in (secured, {**secured, **files}, {**secured, "tls.ca": "/a.pem"}, {"path": "/data"}):
        where = where_of(given)
        assert where_of(where.options()) == where
        assert b"hunter2" not in pickle.dumps(where)
    access = where_of(secured).access()
    assert (access.shown_token(), access.insecure) == ("hunter2", True)
    assert "hunter2" not in repr(access)
    file.write_text("hunter3")
    assert access.shown_token() == "hunter3"
    file.chmod(0o644)
    with pytest.raises(InvalidArgument, match="can be used by other users"):
        access.shown_token()
    monkeypatch.chdir(tmp_path)
    assert where_of({"servers": SERVERS, "token.file": "token"}).token_file == str(file)
    for name in ("token", "tokens"):
        with pytest.raises(InvalidArgument, match=f"option '{name}'") as raised:
            read_options({"servers": SERVERS, "subscribe": "t", name: "hunter2"}, streaming=True)
        assert "hunter2" not in str(raised.value)


def test_a_token_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The nearest place counts, and an embedded log has a secret of its own."""
    monkeypatch.setenv("CUTWATER_TOKEN", "hunter2")
    assert where_of({"servers": SERVERS}).token() == "hunter2"
    monkeypatch.setenv("CUTWATER_TOKEN_FILE", "/one")
    assert where_of({"servers": SERVERS}).token() == Path("/one")
    assert where_of({"servers": SERVERS, "token.file": "/two"}).token() == Path("/two")
    assert where_of({"path": "/data"}).token() == where_of({"servers": f"{SERVERS}/data"}).token() == ""


def test_the_examples_make_the_topics_that_they_write_to() -> None:
    """And may follow the example of the readme, which has made one of them, in the same directory."""
    text = DOCS.read_text()
    made = re.findall(r"create_topic\(.*\)", text)
    assert len(made) == 2
    assert all("exist_ok=True" in call for call in made)
    example = text.split("## Writing")[1].split("```")[1]
    (names,) = re.findall(r"for name in \((.*?)\):", example)
    written = re.findall(r'option\("topic", "(\w+)"\)|\'(\w+)\', \'(\w+)\'\) as topic', example)
    assert {name for found in written for name in found if name} == set(re.findall(r"\w+", names))
