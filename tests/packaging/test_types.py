"""Type checkers find dep2p from a folder outside of the checkout, after an editable install and after a wheel's, and
find a type on each of its public names."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
APP = """
from collections.abc import AsyncGenerator

import trio

import dep2p
from dep2p.client import Client


@trio.as_safe_channel
async def numbers() -> AsyncGenerator[int, None]:
    yield 1


async def main(node: dep2p.Node, client: Client) -> str:
    with trio.CancelScope(relative_deadline=5):
        async with numbers() as channel:
            async for number in channel:
                print(number + 1)
    answer: bytes = await node.request(dep2p.PeerId("p"), "name", b"data")
    print(answer)
    return (await client.status()).version
"""
WRONG = """
import dep2p


async def main(node: dep2p.Node) -> str:
    return await node.request(dep2p.PeerId("p"), "name", b"data")
"""


def packages_of(environment: Path) -> Path:
    """The folder in which an environment has its packages."""
    return Path(sysconfig.get_path("purelib", vars={"base": str(environment), "platbase": str(environment)}))


def installed(folder: Path, *options: str) -> str:
    """The Python of a new environment that has dep2p, and the packages of this one."""
    venv.create(folder, with_pip=False)
    python = str(folder / "bin" / "python")
    packages = packages_of(folder)
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    command = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return python


@pytest.mark.real
@pytest.mark.parametrize("options", [["-e"], []], ids=["editable", "wheel"])
def test_mypy_knows_the_types_of_dep2p_and_of_trio(tmp_path: Path, options: list[str]) -> None:
    # A copy, since an install leaves a build folder in it.
    leftovers = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "node_modules", "__pycache__")
    shutil.copytree(ROOT, tmp_path / "tree", symlinks=True, ignore=leftovers)
    python = installed(tmp_path / "env", *options, str(tmp_path / "tree"))
    app = tmp_path / "app"
    app.mkdir()
    (app / "right.py").write_text(APP)
    (app / "wrong.py").write_text(WRONG)
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", python]
    right = subprocess.run([*command, "right.py"], cwd=app, env={"HOME": str(tmp_path)}, capture_output=True, text=True)
    assert right.returncode == 0, right.stdout + right.stderr
    wrong = subprocess.run([*command, "wrong.py"], cwd=app, env={"HOME": str(tmp_path)}, capture_output=True, text=True)
    assert 'got "bytes", expected "str"' in wrong.stdout


def marked_typed(package: str, packages: Path) -> None:
    """Copy a library, so that `pyright --verifytypes` reads all of it.

    That mode takes the types of a library without ``py.typed`` (multiaddr), and of its folders without ``__init__.py``
    (``libp2p.peer``), for unknown. The pyright of an app reads them.
    """
    found = find_spec(package)
    assert found is not None
    (source,) = found.submodule_search_locations or [""]
    copy = packages / package
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "py.typed").touch()
    for folder in {path.parent for path in copy.rglob("*.py")}:
        (folder / "__init__.py").touch()


@pytest.mark.real
@pytest.mark.timeout(600)  # 20 s of one core
def test_every_public_name_has_a_complete_type(tmp_path: Path) -> None:
    """Checkers differ in what they infer where an annotation is missing. pyright's report names each such place."""
    environment = tmp_path / "env"
    venv.create(environment, with_pip=False)
    packages = packages_of(environment)
    marked_typed("multiaddr", packages)
    marked_typed("libp2p", packages)
    (packages / "others.pth").write_text(f"{ROOT / 'src'}\n{sysconfig.get_path('purelib')}\n")
    command = [sys.executable, "-m", "pyright", "--ignoreexternal", "--verifytypes", "dep2p", "--outputjson"]
    variables = {**os.environ, "PATH": f"{environment / 'bin'}:{os.environ['PATH']}"}  # it asks that `python` for paths
    variables.pop("PYTHONPATH", None)
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
    symbols = json.loads(done.stdout)["typeCompleteness"]["symbols"]
    assert len(symbols) > 10_000, done.stdout[:2_000] + done.stderr
    unchecked = () if find_spec("pyspark") else ("dep2p.spark_analytics.",)  # where `make spark` has not run
    incomplete = {
        symbol["name"]: [diagnostic["message"] for diagnostic in symbol["diagnostics"]]
        for symbol in symbols
        if not symbol["isTypeKnown"] and not symbol["name"].startswith(unchecked)
    }
    assert not incomplete
