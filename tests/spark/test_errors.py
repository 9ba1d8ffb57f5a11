"""Errors of Spark are reported in words, with a next step."""

import socket
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from dep2p.spark_analytics.__main__ import main
from dep2p.spark_analytics.job import run
from dep2p.spark_analytics.runtime.errors import UnreachableError, explained, is_of_spark, reach
from dep2p.spark_analytics.runtime.session import SparkOptions, open_session
from dep2p.testing import Scenario, simulate


def _error(spark: Any, place: str, out: Path) -> BaseException:
    with pytest.raises(Exception) as caught:
        run(spark, [place], out)
    assert is_of_spark(caught.value)
    return caught.value


def test_stores_without_jars_and_places_that_are_not_there(spark: Any, tmp_path: Path) -> None:
    for url, scheme in (("s3a://bucket/x", "s3a"), ("gs://bucket/x", "gs"), ("foo://bucket/x", "foo")):
        found = explained(_error(spark, url, tmp_path / "out"))
        assert found.what == f"Spark lacks the jars for {scheme}:// places"
        assert "spark.jars.packages" in found.advice and "hadoop-aws:3." in found.advice
        assert found.cause and "o64" not in found.cause and "\tat " not in found.cause
    gone = explained(_error(spark, (tmp_path / "gone").as_uri(), tmp_path / "out"))
    assert gone.what == "Spark does not find a place" and str(tmp_path / "gone") in gone.cause


def test_workers_that_lack_a_library(spark: Any) -> None:
    def lacking(batches: Iterator[Any]) -> Iterator[Any]:
        telepathy = import_module("telepathy")

        yield from telepathy.read(batches)

    with pytest.raises(Exception) as caught:
        spark.range(1).mapInArrow(lacking, "id BIGINT").collect()
    found = explained(caught.value)
    assert found.what == "the workers' Python has no telepathy"
    assert "PYSPARK_PYTHON" in found.advice and "pyarrow" in found.advice


def test_other_words_of_sparks() -> None:
    for text, word in (
        ('java.io.IOException: Cannot run program "/home/me/python": error=2', "/home/me/python"),
        ("[PYTHON_VERSION_MISMATCH] Python in worker has different version", "another version"),
        ("Application has been killed. Reason: All masters are unresponsive! Giving up.", "no Spark master"),
        ("org.apache.spark.SparkException: Invalid master URL: spark://127.0.0.1:1x", "no Spark master"),
        ("java.lang.OutOfMemoryError: Java heap space", "memory"),
        ("[PACKAGE_NOT_INSTALLED] grpcio-status must be installed", "library is missing"),
    ):
        found = explained(RuntimeError(f"An error occurred while calling o64.load.\n: x\n\tat y(z)\n{text}"))
        assert word in found.what and found.advice and "at y" not in found.cause
    other = explained(RuntimeError("An error occurred while calling o64.load.\n: some words\n\tat a.b(c.scala:1)"))
    assert (other.what, other.cause, other.advice) == ("Spark could not finish the job", "some words", "")


def test_a_spark_connect_server_that_is_not_there_is_said_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulate(Scenario(nodes=6, publishers=1, messages=2, degree=4), trace_dir=tmp_path / "in")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        reach(f"sc://127.0.0.1:{port}/;user_id=me")
    url = f"sc://127.0.0.1:{port}"
    with pytest.raises(UnreachableError, match=f"127.0.0.1:{port}: Connection refused"):
        open_session(SparkOptions(remote=url))
    for wrong_url in ("http://127.0.0.1", "sc://", "sc://host:99999", "sc://host:port", "127.0.0.1:15002"):
        with pytest.raises(ValueError, match="is like sc://"):
            reach(wrong_url)
        assert main([str(tmp_path / "in"), "--out", str(tmp_path / "out"), "--remote", wrong_url]) == 1
        assert f"not {wrong_url}\n" in capsys.readouterr().err
    assert main([str(tmp_path / "in"), "--out", str(tmp_path / "out"), "--remote", url]) == 1
    assert f"error: no Spark Connect server at 127.0.0.1:{port}" in capsys.readouterr().err
    for wrong in (("--follow", "--remote", url), ("--follow", "--silver", "x")):
        assert main([str(tmp_path / "in"), "--out", str(tmp_path / "out"), *wrong]) == 2
