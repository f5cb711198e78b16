"""Settings of Spark that users give: what reaches Spark, and what is refused with a way out."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from pyspark.sql import SparkSession

from cutwater.cli.commands.pipeline import PipelineRunOptions
from cutwater.cli.framework.security import Security
from cutwater.errors import InvalidArgument
from cutwater.jobs.messages import Start, line, read_to_program
from cutwater.jobs.spark_conf import check_conf, parse_conf, refuse_open_ui, with_ui
from cutwater.spark.session.session import SETTINGS, check_session_conf
from cutwater.spark.session.spark_ui import LOCAL_IP, address_towards, serve_on_loopback

CLUSTER = "spark://127.0.0.1:7077"
GOOD = {
    "spark.executor.memory": "4g",
    "spark.executor.cores": "4",
    "spark.cores.max": "16",
    "spark.driver.memory": "2g",
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",
    "spark.authenticate": "true",
    "spark.authenticate.secret.file": "/etc/spark/secret",
    "spark.hadoop.fs.s3a.aws.credentials.provider": "org.example.Provider",
    "spark.hadoop.hadoop.security.credential.provider.path": "jceks://hdfs/keys.jceks",
    "spark.kubernetes.executor.secretKeyRef.CUTWATER_TOKEN": "cutwater:token",
    "spark.kubernetes.driver.secrets.cutwater": "/etc/secrets",
    "spark.kubernetes.authenticate.oauthTokenFile": "/var/run/token",
    "spark.executorEnv.CUTWATER_TOKEN_FILE": "/etc/cutwater/app.token",
    "spark.security.credentials.hive.enabled": "false",
    "spark.hadoop.dfs.block.access.token.enable": "true",
    "spark.executor.extraJavaOptions": "-XX:+UseSerialGC -Dkey=value",
    "spark.ui.enabled": "true",
    "spark.driver.host": "127.0.0.1",
}


def test_what_is_not_ours_reaches_spark() -> None:
    assert parse_conf(f"{name}={value}" for name, value in GOOD.items()) == GOOD
    check_conf(GOOD)
    check_conf({**GOOD, "spark.driver.host": "10.0.0.7"}, CLUSTER)
    assert parse_conf(["spark.a = b=c "]) == {"spark.a": "b=c"}


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("executor.memory", "4g", r"does not begin with 'spark\.': is 'spark\.executor\.memory' meant\?"),
        ("fs.defaultFS", "hdfs://a", r"Settings of Hadoop get 'spark\.hadoop\.' before"),
        ("spark.executor memory", "4g", "is no name of a setting"),
        ("spark.master", CLUSTER, "--master"),
        ("spark.sql.shuffle.partitions", "4", "--parallelism"),
        ("spark.sql.streaming.minBatchesToRetain", "4", "--retain"),
        ("spark.sql.streaming.checkpointFileManagerClass", "a.B", "checkpoints and savepoints depend on it"),
        ("spark.sql.streaming.stateStore.providerClass", "a.B", "checkpoints and savepoints depend on it"),
        ("spark.python.authenticate.socketTimeout", "1s", "Spark's Python processes need the value"),
        ("spark.pyspark.python", "/usr/bin/python3", "at the same path on every machine"),
        ("spark.remote", "sc://a", "not Spark Connect"),
        ("spark.authenticate.secret", "hunter2", r"seems to contain a secret.*spark-defaults\.conf.*chmod 600"),
        ("spark.hadoop.fs.s3a.secret.key", "hunter2", "seems to contain a secret"),
        ("spark.hadoop.fs.s3a.access.key", "hunter2", "seems to contain a secret"),
        ("spark.ssl.keyPassword", "hunter2", "seems to contain a secret"),
        ("spark.executorEnv.CUTWATER_TOKEN", "hunter2", "seems to contain a secret"),
        ("spark.anything", f"cwt_{'a' * 16}_{'b' * 64}", "seems to contain a secret"),
        ("spark.jars.repositories", "https://me:hunter2@example.com/maven", "seems to contain a secret"),
        ("spark.driver.host", "10.0.0.7", "listens on loopback only"),
        ("spark.a", "b\nspark.master c", "line break"),
        ("spark.a", "b" * 20_000, "the most"),
    ],
)
def test_refusals_say_what_to_do_and_repeat_no_secret(name: str, value: str, told: str) -> None:
    with pytest.raises(InvalidArgument, match=told) as caught:
        check_conf({name: value})
    assert "hunter2" not in str(caught.value)
    assert "cwt_" not in str(caught.value)


def test_settings_of_every_session_are_refused_or_harmless() -> None:
    """A setting of ours that a job could change would change what is tested."""
    free = {"spark.ui.enabled", "spark.ui.showConsoleProgress"}
    for name, value in SETTINGS.items():
        if name not in free:
            with pytest.raises(InvalidArgument, match="cannot be given"):
                check_conf({name: value})


def test_too_many_or_not_texts() -> None:
    with pytest.raises(InvalidArgument, match="256 is the most"):
        check_conf({f"spark.a{n}": "" for n in range(257)})
    with pytest.raises(InvalidArgument, match="settings of Spark are texts"):
        check_conf({"spark.executor.cores": 4})  # type: ignore[dict-item]


@pytest.mark.parametrize("text", ["spark.executor.memory", "=4g", "cwt_0123456789abcdef_0123"])
def test_a_setting_without_key_or_value(text: str) -> None:
    with pytest.raises(InvalidArgument, match="--conf is key=value") as caught:
        parse_conf([text])
    assert "cwt_" not in str(caught.value)


def test_a_setting_twice() -> None:
    assert parse_conf(["spark.a=1", "spark.a=1"]) == {"spark.a": "1"}
    with pytest.raises(InvalidArgument, match="twice"):
        parse_conf(["spark.a=1", "spark.a=2"])


def test_the_command_line_puts_settings_into_the_start(tmp_path: Path) -> None:
    options = PipelineRunOptions(conf=["spark.executor.memory=4g"], spark_ui=0, master=CLUSTER)
    start = options.asked(str(tmp_path / "p.py"), None).start
    assert start.conf == {"spark.executor.memory": "4g", "spark.ui.enabled": "true", "spark.ui.port": "0"}
    assert read_to_program(line(start)) == start
    # As job.json keeps it.
    assert msgspec.to_builtins(start)["conf"] == start.conf
    assert "conf" not in msgspec.to_builtins(Start("/c"))
    with pytest.raises(InvalidArgument, match="--master"):
        PipelineRunOptions(conf=["spark.master=local"]).asked("p.py", None)
    with pytest.raises(InvalidArgument, match="contradict each other"):
        PipelineRunOptions(conf=["spark.ui.port=4040"], spark_ui=4041).asked("p.py", None)


def test_the_pages_need_users_where_a_token_is_in_use(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(f"cwt_{'a' * 16}_{'b' * 64}\n")
    token.chmod(0o600)
    with pytest.raises(InvalidArgument, match=r"know no users.*spark\.eventLog\.enabled=true"):
        PipelineRunOptions(spark_ui=0).asked("p.py", None, Security(token_file=token))
    refuse_open_ui(with_ui({"spark.ui.filters": "org.example.Filter"}, 0))
    refuse_open_ui({"spark.ui.enabled": "false"})
    refuse_open_ui({})


def test_the_pages_are_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    # Set first, so that it is put back.
    monkeypatch.setenv(LOCAL_IP, "")
    monkeypatch.delenv(LOCAL_IP)
    assert serve_on_loopback({"spark.ui.enabled": "false"}, CLUSTER) == {}
    assert LOCAL_IP not in os.environ
    assert serve_on_loopback({"spark.ui.enabled": "true"}, "local[2]") == {"spark.ui.killEnabled": "false"}
    assert os.environ[LOCAL_IP] == "127.0.0.1"
    more = serve_on_loopback({"spark.ui.enabled": "true", "spark.driver.host": "10.0.0.7"}, CLUSTER)
    assert (more["spark.driver.host"], more["spark.driver.bindAddress"]) == ("10.0.0.7", "10.0.0.7")
    assert serve_on_loopback({"spark.ui.enabled": "true"}, CLUSTER)["spark.driver.host"] == "127.0.0.1"
    with pytest.raises(InvalidArgument, match=r"--conf spark\.driver\.host=ADDRESS"):
        serve_on_loopback({"spark.ui.enabled": "true"}, "yarn")
    monkeypatch.setenv(LOCAL_IP, "10.0.0.7")
    with pytest.raises(InvalidArgument, match="to other machines, to everybody"):
        serve_on_loopback({"spark.ui.enabled": "true"}, CLUSTER)
    assert "spark.driver.host" not in serve_on_loopback(
        {"spark.ui.enabled": "true", "spark.ui.filters": "org.example.Filter"}, CLUSTER
    )


def test_the_address_towards_a_master() -> None:
    loopback = "127.0.0.1"
    for master in (
        CLUSTER,
        "spark://127.0.0.1:7077,127.0.0.2:7077",
        "k8s://https://127.0.0.1:6443",
        "spark://127.0.0.1",
    ):
        assert address_towards(master) == loopback
    assert address_towards("yarn") == ""


def test_a_session_that_runs_already_has_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    check_session_conf({}, None)
    with pytest.raises(InvalidArgument, match=r"cutwater\.spark\.session\(config=…\)"):
        check_session_conf({"spark.executor.memory": "4g"}, object())  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="--master"):
        check_session_conf({"spark.master": CLUSTER}, None)
    monkeypatch.setattr(SparkSession, "getActiveSession", lambda: SimpleNamespace(conf={"spark.executor.memory": "4g"}))
    check_session_conf({"spark.executor.memory": "4g"}, None)
    with pytest.raises(InvalidArgument, match="runs in this process already without it"):
        check_session_conf({"spark.executor.memory": "8g"}, None)
