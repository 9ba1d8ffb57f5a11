"""Rules of the house that no linter knows."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CORES = ("protocols", "gossipsub")


def python_files(*folders: str) -> list[Path]:
    """The files of some top-level folders, links not followed."""
    installed = {"node_modules", "venv"}
    return sorted(path for name in folders for path in (ROOT / name).rglob("*.py") if not installed & {*path.parts})


@pytest.mark.parametrize("path", python_files("dep2p", *CORES, "cli", "spark_analytics", "bench"), ids=str)
def test_a_file_over_500_lines_has_two_jobs(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 520, "split it"


@pytest.mark.parametrize("path", python_files(*CORES), ids=str)
def test_cores_never_iterate_a_set(path: Path) -> None:
    """Hash seeds would change runs; dicts are the ordered sets."""
    for node in ast.walk(ast.parse(path.read_text())):
        loops = [node.iter] if isinstance(node, ast.For | ast.comprehension) else []
        for iterated in loops:
            call = iterated.func if isinstance(iterated, ast.Call) else None
            assert not isinstance(iterated, ast.Set | ast.SetComp), f"{path}:{iterated.lineno}"
            assert not (isinstance(call, ast.Name) and call.id in ("set", "frozenset")), f"{path}:{iterated.lineno}"


def test_the_library_never_uses_the_root_logger_or_prints() -> None:
    for path in python_files("dep2p", *CORES):
        if path.name in ("__main__.py",):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            if isinstance(node.func, ast.Name):
                assert node.func.id != "print", f"{path}:{node.lineno}"
            elif isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                is_root = node.func.value.id == "logging" and node.func.attr in ("debug", "info", "warning", "error")
                assert not is_root, f"{path}:{node.lineno}"


def test_the_public_names_load_and_the_package_alone_loads_nothing_heavy() -> None:
    code = (
        "import sys, dep2p\n"
        "heavy = {'trio', 'libp2p', 'pyspark', 'httpx', 'starlette'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "for name in dep2p.__all__: getattr(dep2p, name)\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def imported(path: Path) -> set[str]:
    """The top-level packages that a file imports, at whatever depth."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def test_checkers_answer_alike_with_and_without_what_the_spark_extra_brings() -> None:
    """`make check` runs before `make spark` in CI: pyright must not look into what imports packages of the latter."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    optional = {
        module.partition(".")[0]
        for override in tools["mypy"]["overrides"]
        if "pyspark.*" in override["module"]
        for module in override["module"]
    }
    ignored = {found for pattern in tools["pyright"]["ignore"] for found in ROOT.glob(pattern)}
    ignored |= {found.resolve() for found in ignored}
    locked = {
        name.lower() for name in re.findall(r"^([\w.-]+)==", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    }
    locked |= {"dep2p", "pip"}
    distributions = packages_distributions()
    for path in python_files("dep2p", *CORES, "cli", "spark_analytics", "bench", "tests"):
        packages = imported(path)
        if "reportMissingImports=false" in path.read_text().partition('"""\n')[2][:300]:
            continue  # a foreign client, which runs in an environment of its own
        if packages & optional:
            inside = [path, *path.parents]
            assert any(place in ignored for place in inside), (
                f"{path} imports {packages & optional}: pyright's `ignore`"
            )
        for package in packages - optional - sys.stdlib_module_names:
            brought = {re.sub("[._]", "-", name).lower() for name in distributions.get(package, [])}
            here = (ROOT / package).exists() or any((folder / f"{package}.py").exists() for folder in path.parents)
            assert here or brought & locked, f"{path} imports {package}, which requirements.lock does not bring"
