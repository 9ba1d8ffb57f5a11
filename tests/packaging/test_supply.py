"""What an installation brings: each package pinned with its hashes, and named in the bill of materials."""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_each_locked_package_has_its_hashes() -> None:
    """pip then refuses any other file, and any package that is not named."""
    entries = re.split(r"^(?=\S)", (ROOT / "requirements.lock").read_text(), flags=re.MULTILINE)
    packages = [entry for entry in entries if entry.strip()]
    assert len(packages) > 50
    for entry in packages:
        assert re.match(r"[\w.-]+(\[[\w,-]+\])?==\S+", entry) and "--hash=sha256:" in entry, entry


def test_the_bill_of_materials_names_what_is_installed_as_it_is_locked() -> None:
    done = subprocess.run([sys.executable, ROOT / "packaging" / "sbom.py"], capture_output=True, text=True, check=True)
    bill = json.loads(done.stdout)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.5")
    components = {each["name"]: each for each in bill["components"]}
    assert {"libp2p", "trio", "cryptography", "starlette"} <= set(components)
    assert not {"pytest", "ruff", "hypothesis", "mypy", "dep2p"} & set(components)
    lock = (ROOT / "requirements.lock").read_text().lower()
    for name, component in components.items():
        assert re.search(rf"^{re.escape(name)}(\[[^]]*\])?=={re.escape(component['version'])}\s", lock, re.MULTILINE), (
            name
        )
        assert component["properties"], name
    refs = {each["ref"] for each in bill["dependencies"]}
    assert refs == set(components) | {"dep2p"}
    assert all(set(each["dependsOn"]) <= refs for each in bill["dependencies"])
