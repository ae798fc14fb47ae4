"""A night as JUnit XML: a test suite for each entry, a test case for the run and every check."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from harness.nightly.records import EntryState, Finding, GateResult, Night

FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 cannot hold, however it is written."""
ERRORS = ("failed", "void")


def to_junit(night: Night) -> str:
    """The whole document. A regression or a gate is a failure, a broken run an error."""
    root = ElementTree.Element("testsuites", name=_text(f"{night.suite} {night.night}"))
    totals = [0, 0, 0, 0]
    for entry in night.entries:
        suite = _suite(root, night, entry)
        for i, key in enumerate(("tests", "failures", "errors", "skipped")):
            totals[i] += int(suite.get(key, "0"))
    for key, value in zip(("tests", "failures", "errors"), totals, strict=False):
        root.set(key, str(value))
    root.set("time", f"{night.spent_s:.3f}")
    ElementTree.indent(root)
    body = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{body}\n'


def _suite(root: ElementTree.Element, night: Night, entry: EntryState) -> ElementTree.Element:
    seconds = entry.attempt.seconds if entry.attempt else 0.0
    began = (entry.attempt.begun if entry.attempt else night.begun)[:19]
    suite = ElementTree.SubElement(root, "testsuite", name=_text(f"{night.suite}.{entry.name}"))
    cases = [_run_case(night, entry)]
    cases += [_gate_case(night, g) for g in night.gates if g.entry == entry.name]
    cases += [_finding_case(night, f) for f in night.findings if f.entry == entry.name]
    kinds = [child.tag for case in cases for child in case]
    for key, value in (
        ("tests", str(len(cases))),
        ("failures", str(kinds.count("failure"))),
        ("errors", str(kinds.count("error"))),
        ("skipped", str(kinds.count("skipped"))),
        ("time", f"{seconds:.3f}"),
        ("timestamp", began),
        ("hostname", "localhost"),
    ):
        suite.set(key, value)
    suite.extend(cases)
    return suite


def _case(night: Night, entry: str, name: str, seconds: float = 0.0) -> ElementTree.Element:
    return ElementTree.Element(
        "testcase",
        name=_text(name),
        classname=_text(f"{night.suite}.{entry}"),
        time=f"{seconds:.3f}",
    )


def _run_case(night: Night, entry: EntryState) -> ElementTree.Element:
    attempt = entry.attempt
    case = _case(night, entry.name, "run", attempt.seconds if attempt else 0.0)
    said = (attempt.error if attempt else None) or entry.why
    if entry.status in ERRORS:
        _said(case, "error", said, entry.status)
    elif entry.status != "done":
        ElementTree.SubElement(
            case, "skipped", message=_text(f"{entry.status.replace('_', ' ')}: {said}")
        )
    return case


def _gate_case(night: Night, gate: GateResult) -> ElementTree.Element:
    case = _case(night, gate.entry, f"gate: {gate.rule}: {gate.series}")
    if gate.status == "fail":
        _said(case, "failure", gate.text, "gate")
    elif gate.status != "pass":
        ElementTree.SubElement(case, "skipped", message=_text(f"{gate.status}: {gate.text}"))
    return case


def _finding_case(night: Night, finding: Finding) -> ElementTree.Element:
    case = _case(night, finding.entry, f"{finding.source}: {finding.series}")
    if finding.status == "confirmed" and finding.direction == "worse":
        more = "\n".join((finding.text, *finding.changed))
        _said(case, "failure", finding.text, "regression", more)
    elif finding.direction == "worse":
        message = _text(f"{finding.status}: {finding.text}")
        ElementTree.SubElement(case, "skipped", message=message)
    return case


def _said(
    case: ElementTree.Element, tag: str, message: str, kind: str, text: str | None = None
) -> None:
    element = ElementTree.SubElement(case, tag, message=_text(message), type=kind)
    element.text = _text(text or message)


def _text(text: str) -> str:
    return FORBIDDEN.sub("\ufffd", text)
