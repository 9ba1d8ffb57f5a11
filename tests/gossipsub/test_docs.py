"""The documents say what the code does: every parameter with its values, and the vectors of the specification."""

import ast
from dataclasses import fields
from pathlib import Path

import pytest

from dep2p.gossipsub.params import GossipParams, go_defaults
from dep2p.gossipsub.scoring.params import ScoreParams, ScoreThresholds, TopicScoreParams
from tests.gossipsub import test_codec_realm as realm
from tests.gossipsub.test_batch_signing import VECTOR_BATCH

ROOT = Path(__file__).resolve().parents[2]
PARAMS = (ROOT / "docs/reference/gossipsub-params.md").read_text()
SPEC = (ROOT / "docs/spec/pubsub.md").read_text()


def described() -> dict[str, str]:
    """The docstring below each parameter in the source."""
    tree = ast.parse((ROOT / "gossipsub/params.py").read_text())
    (node,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "GossipParams"]
    texts: dict[str, str] = {}
    for field, text in zip(node.body, node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                texts[field.target.id] = " ".join(str(text.value.value).split())
    return texts


@pytest.mark.parametrize("name", [field.name for field in fields(GossipParams)])
def test_each_parameter_is_documented_in_the_source_and_in_the_reference(name: str) -> None:
    row = f"| `{name}` | {getattr(GossipParams(), name)} | {getattr(go_defaults(), name)} | {described()[name]} |"
    assert row in PARAMS


@pytest.mark.parametrize("kind", [TopicScoreParams, ScoreThresholds, ScoreParams])
def test_each_score_parameter_is_in_the_reference(kind: type) -> None:
    for field in fields(kind):
        assert f"`{field.name}`" in PARAMS


def test_the_specification_holds_the_vectors_that_are_tested() -> None:
    text = "".join(SPEC.split())
    for vector in (realm.VECTOR_KEY, realm.VECTOR_MESSAGE, realm.VECTOR_ID, realm.VECTOR_CONTROL, VECTOR_BATCH):
        assert vector in text
