"""Type checkers find dep2p from a folder outside of the checkout, after an editable install and after a wheel's."""

import shutil
import subprocess
import sys
import sysconfig
import venv
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


def installed(folder: Path, *options: str) -> str:
    """The Python of a new environment that has dep2p, and the packages of this one."""
    venv.create(folder, with_pip=False)
    python = str(folder / "bin" / "python")
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
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
