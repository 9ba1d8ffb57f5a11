"""All findings of an analysis, the worst first."""

from typing import Final

from dep2p.spark_analytics.findings.apps import of_apps
from dep2p.spark_analytics.findings.model import Finding
from dep2p.spark_analytics.findings.pubsub import of_pubsub
from dep2p.spark_analytics.findings.trace import of_trace
from dep2p.spark_analytics.metrics.analysis import Analysis
from dep2p.spark_analytics.metrics.figures import Figures

_ORDER: Final = {"bad": 0, "look": 1, "note": 2}


def findings(found: Analysis, figures: Figures) -> list[Finding]:
    """Findings about an analysis: sentences with their evidence."""
    result = [*of_pubsub(found, figures), *of_apps(found, figures), *of_trace(found, figures)]
    return sorted(result, key=lambda item: _ORDER[item.level])
