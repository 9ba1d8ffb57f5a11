"""A cluster for real: a standalone master and two workers on loopback run the same job."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dep2p.spark_analytics.job import run
from dep2p.spark_analytics.runtime.java import command_of, executor_home, find_java, spark_home
from dep2p.testing import Scenario, simulate

pytestmark = pytest.mark.real
_WAIT_S = 90.0


def _start(kind: str, *arguments: str, log: Path) -> "subprocess.Popen[bytes]":
    command = command_of(find_java(), f"org.apache.spark.deploy.{kind}", *arguments, memory="256m")
    environ = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
    environ |= {"SPARK_HOME": str(spark_home()), "SPARK_SCALA_VERSION": "2.13"}  # as Spark's start scripts set them
    environ["JAVA_HOME"] = str(executor_home(find_java(), log.parent / "java"))
    with log.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env=environ, start_new_session=True)


def _wait(log: Path, words: str, process: "subprocess.Popen[bytes]") -> str:
    end = time.monotonic() + _WAIT_S
    while words not in (text := log.read_text(errors="replace")):
        assert process.poll() is None and time.monotonic() < end, text[-2000:]
        try:
            process.wait(0.1)
        except subprocess.TimeoutExpired:
            continue
    return text


@pytest.fixture
def master(tmp_path: Path) -> Iterator[str]:
    processes: list[subprocess.Popen[bytes]] = []
    try:
        log = tmp_path / "master.log"
        processes.append(_start("master.Master", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0", log=log))
        text = _wait(log, "Starting Spark master at spark://", processes[0])
        url = text.partition("Starting Spark master at ")[2].split()[0]
        for number in range(2):
            log = tmp_path / f"worker{number}.log"
            place = str(tmp_path / f"work{number}")
            arguments = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0", "--cores", "1", "--memory", "1g")
            processes.append(_start("worker.Worker", *arguments, "--work-dir", place, url, log=log))
            _wait(log, "Successfully registered with master", processes[-1])
        yield url
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.timeout(600)
def test_two_workers_find_what_one_process_finds(master: str, spark: object, tmp_path: Path) -> None:
    simulate(Scenario(nodes=15, publishers=3, messages=12, degree=6, loss=0.02), trace_dir=tmp_path / "traces")
    here = run(spark, [str(tmp_path / "traces")], tmp_path / "here")
    places = [str(tmp_path / "traces"), "--out", str(tmp_path / "there")]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYSPARK_")}
    theirs = tmp_path / "their python"
    theirs.write_text(f'#!/bin/sh\n: > "{tmp_path}/used"\nexec "{sys.executable}" "$@"\n')
    theirs.chmod(0o755)
    environ["PYSPARK_PYTHON"] = str(theirs)
    done = subprocess.run(
        [sys.executable, "-m", "dep2p.spark_analytics", *places, "--master", master, "--memory", "1g"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "there/summary.json").read_text() == (here.out / "summary.json").read_text()
    ran = [log.read_text(errors="replace") for log in sorted(tmp_path.glob("worker*.log"))]
    assert all("Asked to launch executor" in text for text in ran), "both workers took part"
    assert (tmp_path / "used").exists(), "workers may have their Python elsewhere"
