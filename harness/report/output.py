"""The report's section on output: which checks were made, and what each found."""

from __future__ import annotations

from collections.abc import Iterable

from harness.analyse.degenerate import lengths, pool
from harness.findings import EngineIntegrity, ParityFinding, Summary
from harness.report import words

OUTPUT_COLUMNS = ("engine", "check", "found")
Row = tuple[str, str, str]


def output_rows(summary: Summary) -> list[Row]:
    """One row for each check that was made of an engine's output."""
    rows: list[Row] = []
    for found in summary.integrity:
        name = words.one_line(found.engine, 80)
        for check, text in (*_greedy(found), *_sampled(found)):
            rows.append((name, check, text))
        rows += [(name, "degenerate answers", text) for text in _degenerate(summary, found.engine)]
        rows += [(name, "computes the right model", t) for t in _parity(summary, found.engine)]
    return rows


def _greedy(found: EngineIntegrity) -> Iterable[tuple[str, str]]:
    if not found.compared:
        return
    parts = [f"{words.share(found.diverged, found.compared)} outputs differ"]
    if found.diverged and found.near_tie is not None:
        parts.append(f"{words.plural(found.near_tie, 'near-tie')}")
    if found.diverged:
        parts.append(
            "not known which are near-ties"
            if found.errors is None
            else words.plural(found.errors, "error")
        )
    yield "speculative against baseline", ", ".join(parts)
    if found.floor_compared:
        text = f"{words.share(found.floor_diverged, found.floor_compared)} prompts differ"
        if found.p_value is not None and found.diverged:
            text += f"; that speculation is no worse: p = {found.p_value:.2g}"
        yield "baseline against itself", text
    if found.floor_loads_compared:
        yield (
            "baseline in other batches",
            f"{words.share(found.floor_loads_diverged, found.floor_loads_compared)} prompts differ",
        )


def _sampled(found: EngineIntegrity) -> Iterable[tuple[str, str]]:
    if found.sampling_p is not None:
        yield (
            "sampled tokens and lengths",
            f"p = {found.sampling_p:.2g} that they are the baseline's, over "
            f"{words.plural(found.sampling_prompts, 'prompt')}",
        )


def _degenerate(summary: Summary, engine: str) -> Iterable[str]:
    for variant in ("baseline", "speculative"):
        whole = pool(
            [c.degenerate for c in summary.cells if (c.engine, c.variant) == (engine, variant)]
        )
        if whole is None:
            continue
        text = f"{variant}: {words.share(whole.degenerate, whole.judged)}, of those long enough"
        looped, sane = lengths(whole)
        if whole.degenerate and looped is not None:
            text += (
                f"; acceptance length {words.fixed(looped)} in them, {words.fixed(sane)} in the "
                "others"
            )
        yield text


def _parity(summary: Summary, engine: str) -> Iterable[str]:
    """What differs, and what could not be compared, each; starts that agree together."""
    agreeing: dict[tuple[str, str, float], list[ParityFinding]] = {}
    for f in summary.parity:
        if f.engine != engine:
            continue
        if f.difference is not None and not f.differs:
            agreeing.setdefault((f.variant, f.against, f.bound), []).append(f)
            continue
        where = f"{f.variant}, start {f.repeat + 1}, against {words.one_line(f.against, 80)}"
        if f.difference is None:
            yield f"{where}: nothing could be compared"
        else:
            yield f"{where}: another model, {_nats(f)} (allowed {f.bound:g})"
    for (variant, against, bound), own in agreeing.items():
        worst = max(own, key=lambda f: f.difference or 0.0)
        many = f"{len(own)} starts" if len(own) > 1 else f"start {worst.repeat + 1}"
        most = " at most" if len(own) > 1 else ""
        yield (
            f"{variant}, {many}, against {words.one_line(against, 80)}: the same,{most} "
            f"{_nats(worst)} (allowed {bound:g})"
        )


def _nats(f: ParityFinding) -> str:
    low = f.difference is not None and 0 < f.difference < 1e-4
    apart = "below 0.0001" if low else words.number(f.difference, 2)
    return f"{apart} nats on average of {f.tokens:,d} tokens"
