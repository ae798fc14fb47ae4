"""The diagnosis as one self-contained page: the verdict first, then what it stands on."""

from __future__ import annotations

from harness.diagnose.page.figures import figures
from harness.diagnose.records import Diagnosis, Dossier
from harness.diagnose.view import (
    CAUSES_TABLE,
    EXPERIMENTS_TABLE,
    FINDINGS_TABLE,
    WATERFALL,
    View,
    view_of,
)
from harness.report.templating import page_templates


def render_page(dossier: Dossier, diagnosis: Diagnosis) -> str:
    """The page as one HTML document that asks nothing of the network."""
    view = view_of(dossier, diagnosis)
    drawn = figures(dossier, diagnosis)
    return (
        page_templates()
        .get_template("diagnosis.html.j2")
        .render(
            view=view,
            plots=drawn,
            sections=_sections(view, bool(drawn)),
            waterfall_columns=WATERFALL,
            cause_columns=CAUSES_TABLE,
            experiment_columns=EXPERIMENTS_TABLE,
            finding_columns=FINDINGS_TABLE,
        )
    )


def _sections(view: View, drawn: bool) -> list[tuple[str, str]]:
    """Anchor and heading of each part that there is."""
    to_do = view.remedy or view.mending or view.next_experiments
    return [
        *([("remedy", "What to do")] if to_do else []),
        *([("lost", "Where it is lost")] if view.waterfall or drawn else []),
        *([("causes", "Causes")] if view.causes or view.excluded else []),
        ("experiments", "Experiments"),
        *([("read", "What was read")] if view.findings else []),
    ]
