"""The diagnosis as Markdown, for a pull request or an issue: the same content as the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harness.diagnose.records import Diagnosis, Dossier
from harness.diagnose.view import (
    EXPERIMENTS_TABLE,
    FINDINGS_TABLE,
    WATERFALL,
    CauseRow,
    View,
    view_of,
)
from harness.report.markdown import escape

MOST_CAUSES = 8


def to_markdown(dossier: Dossier, diagnosis: Diagnosis) -> str:
    """The verdict first, then what it stands on; foreign text is escaped."""
    view = view_of(dossier, diagnosis)
    lines = [f"# {escape(view.title)}", "", escape(view.meta), "", f"**{escape(view.verdict)}**"]
    lines += [*_remedy(view), *_mending(view)]
    if view.next_experiments:
        lines += ["", "## What would settle it", ""]
        lines += [f"- {escape(n)}" for n in view.next_experiments]
    if view.waterfall:
        lines += ["", "## Where it is lost", "", *_table(WATERFALL, view.waterfall)]
    lines += _causes(view)
    lines += ["", "## Experiments", "", *_table(EXPERIMENTS_TABLE, view.experiments)]
    if view.findings:
        lines += ["", "## What was read", "", *_table(FINDINGS_TABLE, view.findings)]
    return "\n".join(lines).strip() + "\n"


def _remedy(view: View) -> list[str]:
    if not view.remedy:
        return []
    lines = ["", "## What to do", "", escape(view.remedy)]
    if view.details:
        lines += ["", *(f"- {escape(name)}: {escape(value)}" for name, value in view.details)]
    if view.upstream:
        lines += ["", escape(f"Seen in {', '.join(view.upstream)}.")]
    return lines


def _mending(view: View) -> list[str]:
    if not view.mending:
        return []
    return ["", "## What --fix did", "", *(f"- {escape(line)}" for line in view.mending)]


def _causes(view: View) -> list[str]:
    if not (view.causes or view.unseen or view.excluded):
        return []
    lines = ["", "## Causes"]
    for row in view.causes[:MOST_CAUSES]:
        lines += ["", f"### {escape(row.title)}", "", escape(_head(row))]
        lines += ["", *(f"- for: {escape(s)}" for s in row.evidence_for)]
        lines += [f"- against: {escape(s)}" for s in row.evidence_against]
        lines += [f"- neither: {escape(s)}" for s in row.undecided]
        lines += [f"- remedy: {escape(row.remedy)}"]
    return [*lines, *_unseen(view), *_excluded(view)]


def _unseen(view: View) -> list[str]:
    """Their names: what was looked at, the page tells."""
    if not view.unseen:
        return []
    names = ", ".join(row.cause for row in view.unseen)
    them = "it" if len(view.unseen) == 1 else "them"
    return ["", escape(f"Not excluded, with nothing for {them}: {names}.")]


def _excluded(view: View) -> list[str]:
    """Their names, a line for each stage: what each says, the page tells."""
    count = sum(len(ruled.causes) for ruled in view.excluded)
    if not count:
        return []
    lines = ["", f"Excluded: {count} cause{'' if count == 1 else 's'}.", ""]
    told = [f"{ruled.stage}: {', '.join(ruled.causes)}" for ruled in view.excluded]
    return [*lines, *(f"- {escape(line)}" for line in told)]


def _head(row: CauseRow) -> str:
    kin = f"; {row.kin}" if row.kin else ""
    return f"{row.cause}, {row.strength} (score {row.score}){kin}"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    return [*lines, *("| " + " | ".join(escape(cell) for cell in row) + " |" for row in rows)]
