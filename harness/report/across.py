"""Runs compared with each other, as text for a terminal and as Markdown.

What was not the same when they were made stands first; what got better or worse, last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.analyse.across.records import Across, Area, Difference, Row, Versus
from harness.report import words
from harness.report.markdown import escape
from harness.report.tables import VERDICT_STYLE
from harness.report.width import WIDTH

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

ARROW = "->"
SIDES = {"baseline": "baseline", "speculative": "speculative", "ratio": "speed-up"}
LABELS = {
    "output_tokens_per_s": "output tokens/s",
    "requests_per_s": "requests/s",
    "goodput_per_s": "goodput, requests/s",
    "acceptance_length": "acceptance length",
    "acceptance_rate": "acceptance rate",
    "answered": "answered requests",
    "task_accuracy": "task accuracy",
    "identical": "identical outputs",
    "startup_s": "start-up, s",
    "startup_rss_bytes": "start-up memory, GiB",
    "startup_gpu_bytes": "start-up GPU memory, GiB",
    "gpu.memory_used_bytes.most": "GPU memory, GiB",
}
LATENCIES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2el_s": "E2E latency"}
SCALES = {"s": 1e3, "bytes": 1 / 2**30}
"""From a row's unit to its label's. Start-ups and ratios stay as they are."""
COLUMNS = ("metric", "of", "A", "B", "B / A (interval)", "verdict")
MOST_CAUSES = 6
ALIKE = (
    "Both variants moved alike: what changed is not the drafter, but the engine or the machine, or "
    "how busy the machine was."
)
KINDS = {"question": "the question", "figure": "figures beside it", "detail": "details"}
"""What the comparisons of a family are of."""


def label(row: Row) -> str:
    """A metric in the reader's words."""
    stem, _, part = row.metric.partition(".")
    if stem in LATENCIES:
        unit = "" if row.side == "ratio" else ", ms"
        return f"{LATENCIES[stem]} {part}{unit}"
    if stem == "per_position":
        return f"accepted at position {part}"
    return LABELS.get(row.metric, row.metric)


def values(row: Row) -> tuple[str, str]:
    """Both sides' figures in the label's unit."""
    scaled = row.side != "ratio" and row.metric != "startup_s"
    scale = SCALES.get(row.unit, 1.0) if scaled else 1.0
    both = (row.reference, row.candidate)
    ends = tuple(words.number(None if v is None else v * scale) for v in both)
    return ends[0], ends[1]


def ratio(row: Row) -> str:
    """The effect with its interval, by as many digits as a small one needs."""
    if row.ratio is None:
        return words.DASH
    if row.ci_low is None or row.ci_high is None:
        return f"{row.ratio:.3f}x"
    ends = ("100+" if end > 100 else f"{end:.3f}" for end in (row.ci_low, row.ci_high))
    return f"{row.ratio:.3f}x ({words.DASH.join(ends)})"


def difference(told: Difference) -> str:
    """What differs, and what it may move."""
    ends = [words.DASH if end is None else end for end in (told.reference, told.candidate)]
    return f"{told.key}: {ends[0]} {ARROW} {ends[1]}"


def areas(told: Difference) -> str:
    """What a difference may move, in brackets; empty where it moves no figure."""
    if not told.affects:
        return ""
    return "[any figure]" if len(told.affects) == 5 else f"[{', '.join(told.affects)}]"


def loads(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """The rows of each engine and load with its name; those of no load come as they stand."""
    several = len({row.engine for row in rows}) > 1
    found: dict[str, list[Row]] = {}
    for row in rows:
        name = "start-up" if row.load is None else words.load_words(row.load)
        found.setdefault(f"{row.engine}, {name}" if several else name, []).append(row)
    return list(found.items())


def pairing(rows: Sequence[Row]) -> str:
    """How the units of a load were held against each other, and why not in pairs."""
    row = next((row for row in rows if row.area != "output"), rows[0])
    how = row.method.partition(", ")[0]
    if row.paired or row.unpaired is None:
        return how
    return f"{how}, unpaired ({row.unpaired})"


def notes(rows: Sequence[Row]) -> list[str]:
    """Why rows have no interval or no verdict: each reason once, with the metrics it is for."""
    found: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.note is not None and row.category is None:
            found.setdefault(row.note, {})[label(row).removesuffix(", ms")] = None
    some = {note: list(names) for note, names in found.items()}
    return [f"{', '.join(n) if len(n) <= 4 else 'These figures'}: {t}" for t, n in some.items()]


def correction(versus: Versus) -> str:
    """What the verdicts were drawn from; empty where there is none."""
    rows = [row for row in versus.rows if row.corrected_confidence is not None]
    if not rows:
        return ""
    families = {row.kind: row.family for row in rows}
    parts = [f"{n} of {KINDS[kind]}" for kind, n in families.items()]
    tolerances: dict[float, dict[str, None]] = {}
    for row in rows:
        tolerances.setdefault(row.tolerance, {})[row.metric] = None
    usual = max(tolerances, key=lambda t: len(tolerances[t]))
    told = [f"{100 * t:.3g}% of {', '.join(n)}" for t, n in tolerances.items() if t != usual]
    return (
        f"Verdicts: by intervals corrected for the number of comparisons ({', '.join(parts)}); "
        f"tolerance {'; '.join([f'{100 * usual:.3g}%', *told])}."
    )


def conclusion(versus: Versus, reference: str) -> list[str]:
    """What may be said in all: first what got worse, with what may have caused it."""
    if versus.void is not None:
        return [f"No verdict is drawn: {words.one_line(versus.void)}."]
    told: list[str] = []
    for verdict in ("worse", "better"):
        rows = [row for row in versus.rows if row.verdict == verdict]
        if rows:
            told.append(f"{verdict.capitalize()} than {reference}: {'; '.join(map(_named, rows))}.")
        for area in dict.fromkeys(row.area for row in rows if verdict == "worse"):
            told.append(_causes(versus, area))
    if told:
        return [*told, *([ALIKE] if _alike(versus) else [])]
    same = sum(row.verdict == "same" for row in versus.rows)
    unclear = sum(row.verdict == "undecided" for row in versus.rows)
    return [
        f"Nothing was shown to be better or worse: {words.plural(same, 'figure')} the same, "
        f"{unclear} undecided."
    ]


def _alike(versus: Versus) -> bool:
    """Whether, of the question, both variants moved and the speed-up was not shown to."""
    found: dict[object, dict[str, str]] = {}
    for row in versus.rows:
        if row.kind == "question":
            found.setdefault((row.engine, row.load), {})[row.side] = row.verdict
    return any(
        told.get("baseline") == told.get("speculative") != "same"
        and told.get("baseline") in VERDICT_STYLE
        and told.get("ratio") not in ("better", "worse")
        for told in found.values()
    )


def _named(row: Row) -> str:
    place = [SIDES[row.side]]
    place += [words.load_words(row.load)] if row.load is not None else []
    place += [row.category] if row.category is not None else []
    return f"{label(row).removesuffix(', ms')} ({', '.join(place)}) {ratio(row)}"


def _causes(versus: Versus, area: Area) -> str:
    found = versus.causes(area)
    if not found:
        return f"Nothing that is recorded differs and moves {area}: look at the machine."
    shown = "; ".join(difference(d) for d in found[:MOST_CAUSES])
    more = f"; and {len(found) - MOST_CAUSES} more" if len(found) > MOST_CAUSES else ""
    return f"What may have moved {area}: {shown}{more}."


def render_text(across: Across, width: int = WIDTH, *, categories: bool = False) -> str:
    """Plain text of at most `width` columns, without colour or control codes."""
    import io

    from rich.console import Console

    sink = io.StringIO()
    console = Console(file=sink, width=width, color_system=None, force_terminal=False)
    console.print(_stack(across, categories=categories))
    return "\n".join(line.rstrip() for line in sink.getvalue().splitlines()) + "\n"


def print_across(across: Across, *, categories: bool = False) -> None:
    """Print to stdout: in colour on a terminal, else as plain text."""
    import sys

    from rich.console import Console

    from harness.report.width import output_width

    if not sys.stdout.isatty():
        sys.stdout.write(render_text(across, output_width(), categories=categories))
        return
    console: Console = Console()
    console.print(_stack(across, categories=categories), width=min(WIDTH, console.width))


def _stack(across: Across, *, categories: bool) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    for versus in across.comparisons:
        parts += [Text(f"A: {_side(across.reference, across.run_ids)} (the reference)")]
        parts += [Text(f"B: {_side(versus.candidate, versus.run_ids)}", style="bold"), Text("")]
        parts += _before(versus)
        for name, rows in loads(versus.rows):
            parts += _load(name, rows, categories=categories)
        hidden = sum(_hidden(row, categories=categories) for row in versus.rows)
        if hidden:
            parts.append(
                Text(f"{hidden} figures by category are not shown (--categories).", style="dim")
            )
        parts += [Text(correction(versus), style="dim")]
        parts += [Text(line, style="bold") for line in conclusion(versus, across.reference)]
        parts.append(Text(""))
    return Group(*parts[:-1])


def _side(name: str, run_ids: Sequence[str]) -> str:
    if len(run_ids) > 1:
        return f"{name} ({len(run_ids)} runs, {run_ids[0]} to {run_ids[-1]})"
    return name if name == run_ids[0] else f"{name} ({run_ids[0]})"


def _before(versus: Versus) -> list[RenderableType]:
    """What is to be known before the figures: differences, hindrances, what only one has."""
    from rich.padding import Padding
    from rich.text import Text

    parts: list[RenderableType] = []
    if versus.hindrances:
        parts.append(Text("Compared all the same, although they are not alike:", style="bold red"))
        parts += [Padding(Text(why), (0, 0, 0, 2)) for why in versus.hindrances]
    if versus.differences:
        parts.append(Text("Differences, A -> B, with what each may move:", style="bold"))
        for told in versus.differences:
            style = "" if told.affects else "dim"
            mark = "! " if told.affects else "  "
            text = Text(f"{mark}{difference(told)}  {areas(told)}".rstrip(), style=style)
            parts.append(Padding(text, (0, 0, 0, 2)))
    else:
        parts.append(Text("Differences: none that is recorded.", style="bold"))
    parts += [Padding(Text(f"! {line}"), (0, 0, 0, 2)) for line in versus.mixed]
    if versus.left_out:
        parts.append(Text("Not compared:", style="bold"))
        parts += [Padding(Text(line), (0, 0, 0, 2)) for line in versus.left_out]
    return [*parts, Text("")]


def _hidden(row: Row, *, categories: bool) -> bool:
    return row.category is not None and not categories and row.verdict in ("same", "undecided")


def _load(name: str, rows: Sequence[Row], *, categories: bool) -> list[RenderableType]:
    from rich.text import Text

    table = _table(f"{name}: {pairing(rows)}")
    for row in rows:
        if not _hidden(row, categories=categories):
            what = label(row) if row.category is None else f"{row.category}: {label(row)}"
            style = VERDICT_STYLE.get(row.verdict)
            verdict = f"[{style}]{row.verdict}[/{style}]" if style else row.verdict
            table.add_row(_plain(what), SIDES[row.side], *values(row), ratio(row), verdict)
    return [table, *(Text(note, style="dim") for note in notes(rows)), Text("")]


def _plain(text: str) -> str:
    from rich.markup import escape as plain

    return plain(words.one_line(text, 80))


def _table(title: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(
        title=_plain(title),
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        expand=True,
        pad_edge=False,
        padding=(0, 1),
    )
    for i, name in enumerate(COLUMNS):
        right = 2 <= i < 5
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    return table


def render_markdown(across: Across) -> str:
    """The same with every row, for a pull request."""
    lines: list[str] = []
    for versus in across.comparisons:
        lines += [f"## {escape(versus.candidate)} against {escape(across.reference)}", ""]
        lines += [escape(line) for line in conclusion(versus, across.reference)] + [""]
        if versus.hindrances:
            lines += ["Compared all the same, although they are not alike:", ""]
            lines += [f"- {escape(why)}" for why in versus.hindrances] + [""]
        lines += _markdown_differences(versus)
        for name, rows in loads(versus.rows):
            lines += _markdown_load(name, [r for r in rows if r.category is None])
            lines += _markdown_categories(name, [r for r in rows if r.category is not None])
        lines += [escape(correction(versus)), ""]
    return "\n".join(lines).rstrip() + "\n"


def _markdown_differences(versus: Versus) -> list[str]:
    lines = ["### Differences", ""]
    if versus.differences:
        lines += ["| what | A | B | may move |", "|---|---|---|---|"]
        for d in versus.differences:
            ends = [words.DASH if e is None else escape(e) for e in (d.reference, d.candidate)]
            lines.append(f"| {escape(d.key)} | {ends[0]} | {ends[1]} | {areas(d)[1:-1]} |")
    else:
        lines.append("None that is recorded.")
    lines += ["", *(f"- {escape(line)}" for line in versus.mixed)] if versus.mixed else []
    if versus.left_out:
        lines += ["", "Not compared:", "", *(f"- {escape(line)}" for line in versus.left_out)]
    return [*lines, ""]


def _markdown_load(name: str, rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    lines = [f"### {escape(name)}", "", escape(pairing(rows)) + ".", ""]
    lines += _markdown_table(rows)
    told = [f"- {escape(note)}" for note in notes(rows)]
    return [*lines, "", *told, *([""] if told else [])]


def _markdown_categories(name: str, rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    summary = f"<details><summary>{escape(name)}, by category</summary>"
    return [summary, "", *_markdown_table(rows), "", "</details>", ""]


def _markdown_table(rows: Sequence[Row]) -> list[str]:
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---|---|---:|---:|---:|---|"]
    for row in rows:
        what = label(row) if row.category is None else f"{row.category}: {label(row)}"
        verdict = f"**{row.verdict}**" if row.verdict in ("better", "worse") else row.verdict
        cells = (escape(what), SIDES[row.side], *values(row), ratio(row), verdict)
        lines.append("| " + " | ".join(cells) + " |")
    return lines
