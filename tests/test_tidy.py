"""Rules of the house that no linter knows."""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections import Counter
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CORES = ("protocols", "gossipsub")


def python_files(*folders: str) -> list[Path]:
    """The files of some top-level folders, links not followed."""
    installed = {"node_modules", "venv"}
    return sorted(path for name in folders for path in (ROOT / name).rglob("*.py") if not installed & {*path.parts})


@pytest.mark.parametrize("path", python_files("dep2p", *CORES, "cli", "spark_analytics", "bench", "examples"), ids=str)
def test_a_file_over_800_lines_has_two_jobs(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 800, "split it"


def test_a_folder_over_20_modules_lacks_a_package() -> None:
    files = python_files("dep2p", *CORES, "cli", "spark_analytics", "bench", "examples")
    modules = Counter(path.parent for path in files if path.name != "__init__.py")
    assert modules
    assert not {folder: count for folder, count in modules.items() if count > 20}, (
        "make a package of what belongs together"
    )


_IS_OPTION = re.compile(r"Annotated\[|\w+(?:Option|Argument)$|Invocation$|QueueTarget$")


def test_only_commands_and_the_opening_of_a_node_have_eight_parameters() -> None:
    """ruff holds the rest. Its exceptions are whole files, in which other functions must not hide."""
    found: list[str] = []
    for path in python_files("dep2p", *CORES, "cli", "spark_analytics", "bench", "examples"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            given = [each for each in arguments if each.arg not in ("self", "cls")]
            is_command = all(each.annotation and _IS_OPTION.match(ast.unparse(each.annotation)) for each in given)
            if len(given) >= 8 and not is_command:
                found.append(f"{path.relative_to(ROOT)} {node.name}")
    assert found == ["dep2p/node/node.py open"], "give it a parameter object"


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


def test_the_library_reads_no_environment() -> None:
    """Programs do: the daemon's and the command line's. What they read comes to the library as an argument. The client
    of a daemon reads it in one place, to find the daemon that the command line finds."""
    programs = (ROOT / "dep2p/daemon/__main__.py", ROOT / "dep2p/client/opening.py")
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in python_files("dep2p", *CORES)
        if path not in programs
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute | ast.Name)
        if (node.attr if isinstance(node, ast.Attribute) else node.id) in ("getenv", "getenvb", "environb")
        or ast.unparse(node) == "os.environ"
    ]
    assert not found


def test_the_public_names_load_and_the_package_alone_loads_nothing_heavy() -> None:
    code = (
        "import sys, dep2p\n"
        "heavy = {'trio', 'libp2p', 'pyspark', 'httpx', 'starlette'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "for name in dep2p.__all__: getattr(dep2p, name)\n"
        "from dep2p.client import Client\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


_WITHOUT_ACTOR = re.compile(
    r"\b(?:is|are|was|were|be|been|being) told\b|\bfor ever\b|\b(?:some|no|every)body\b|\bwhoever\b", re.IGNORECASE
)


@pytest.mark.parametrize("folder", ["dep2p", *CORES, "cli", "spark_analytics", "bench", "examples", "docs"])
def test_sentences_name_who_acts(folder: str) -> None:
    """CONTRIBUTING.md says what to write in place of these words; the glossary and decision 25 quote them."""
    quoting = ("glossary.md", "0025-layout-by-feature.md")
    pages = [path for path in (ROOT / folder).rglob("*.md") if path.name not in quoting]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in [*python_files(folder), *pages]
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if _WITHOUT_ACTOR.search(line)
    ]
    assert not found


_RIDDLE = re.compile(r"(?:What|Who|Of)\b")


@pytest.mark.parametrize("folder", ["dep2p", *CORES, "cli", "spark_analytics", "bench", "examples"])
def test_docstrings_begin_with_a_noun_or_a_verb(folder: str) -> None:
    """A reader understands "Bytes of one body at most." and "Return the peers that …", not "Of one body."."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value.value.strip()[:80]}"
        for path in python_files(folder)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if _RIDDLE.match(node.value.value.lstrip())
    ]
    assert not found


def test_deep_nesting_is_an_error_like_others_wherever_json_or_toml_is_read() -> None:
    """A thousand brackets raise RecursionError, which is no ValueError. The client reads only its own daemon."""
    readers = {"json.loads", "json.load", "tomllib.load", "tomllib.loads", "msgspec.json.decode"}
    for path in python_files("dep2p", *CORES, "cli", "spark_analytics"):
        if path.parent.name == "client":
            continue
        tree = ast.parse(path.read_text())
        guarded = [
            call
            for node in ast.walk(tree)
            if isinstance(node, ast.Try)
            and any("RecursionError" in ast.unparse(each.type or node) for each in node.handlers)
            for call in ast.walk(ast.Module(node.body, []))
        ]
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in readers:
                assert node in guarded, f"{path}:{node.lineno}: catch RecursionError, too"


_IMPORT = re.compile(r"from ((?:dep2p|tests|bench)[\w.]*) import (\w[\w, ]*)")


def test_code_in_texts_imports_names_that_exist() -> None:
    """No checker reads programs that start from a text: a renamed class would break them silently."""
    wanted: dict[tuple[str, str], str] = {}
    for path in python_files("dep2p", *CORES, "cli", "spark_analytics", "bench", "examples", "tests"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for module, names in _IMPORT.findall(node.value):
                    for name in names.split(","):
                        wanted[module, name.split(" as ")[0].strip()] = f"{path.relative_to(ROOT)}:{node.lineno}"
    assert wanted
    for (module, name), place in wanted.items():
        try:
            found = hasattr(importlib.import_module(module), name) or find_spec(f"{module}.{name}")
        except ModuleNotFoundError as error:
            assert error.name and not error.name.startswith(("dep2p", "tests", "bench")), f"{place}: {error}"
            continue
        assert found, f"{place}: {module} has no {name}"


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
    for path in python_files("dep2p", *CORES, "cli", "spark_analytics", "bench", "examples", "tests"):
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


def test_a_class_name_stands_for_one_class() -> None:
    places: dict[str, list[str]] = {}
    for path in python_files("dep2p", *CORES, "cli", "spark_analytics"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not {name: found for name, found in places.items() if len(found) > 1}, "qualify the name of one of them"
