"""Questions to a server that are not load: which model it computes, and how close two tokens are.

A server that does not answer costs a line in a record, never the run.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from engines.base import EngineUsageError
from engines.checkpoint import read_json as read_config
from harness.analyse.data import CellData, pairs
from harness.analyse.integrity import Divergence, divergences, near_tie_bound
from harness.errors import UsageError, one_line
from harness.load.prompts.datasets import Prompt
from harness.load.prompts.tokens import TargetTokenizer
from harness.load.streaming.client import PATHS, request_body
from harness.load.streaming.plain import plain_client
from harness.measure.logprobs import LogprobReader, NoLogprobs, gap_of
from harness.measure.store import RunFolder, read_json, to_json, write_atomic
from harness.prepare import Prepared, api_key
from harness.progress import Progress
from harness.records import Cell, ParityAnswer, ParityRecord, Tie, Ties, Variant
from harness.serving import Server, asking_of
from harness.stored import PARITY, read_cell, read_parity, ties_path

GOLDEN = Path(__file__).resolve().parents[1] / "results" / "baselines" / "parity"
TOKENS = 16
MOST_ASKED = 24
"""Divergences asked about after one start."""
MOST_S = 60.0
SAMPLE = 65_536
"""Bytes of weights read at each of several places of each file."""
PROMPTS: dict[str, str] = {
    "prose": (
        "The lighthouse keeper wrote down the weather every evening for forty years: the wind, the "
        "height of the waves, the ships that passed, and whether the lamp had been trimmed in "
        "time. When the lamp became electric nobody needed the book any more, but he went on "
        "writing. On the last page he noted that the wind had turned to the north, that two ships "
        "had passed, and that"
    ),
    "code": (
        "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n"
        "    return total / len(values)\n\n\ndef median(values):\n    ordered = sorted(values)\n"
    ),
    "numbers": "2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34,",
    "dialogue": (
        "Question: Which day comes three days after Monday?\nAnswer: Thursday.\n"
        "Question: Which day comes two days after Friday?\nAnswer:"
    ),
}


@contextmanager
def beside_the_load(progress: Progress) -> Iterator[None]:
    """Whatever goes wrong with a question beside the load costs a line, not the run.

    But for a disk that cannot be written to: there the run ends as it does elsewhere.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        kind = type(error).__name__
        progress.say(f"a check of the output was left out ({kind}: {one_line(str(error))})")


def ask_parity(
    prepared: Prepared, server: Server, cell: Cell, folder: RunFolder, launch: Path
) -> None:
    """Ask this start's server for the fixed prompts' log-probabilities, and keep what it says.

    A server that runs already is asked once: each of its turns would ask the same process.
    """
    if not prepared.plan.target.ask_logprobs:
        return
    if prepared.attached and any(
        (r.engine, r.variant) == (cell.engine, cell.variant) for r in read_parity(folder)
    ):
        return
    answers: list[ParityAnswer] = []
    note: str | None = None
    with _reader(prepared, server, server.url) as reader:
        end = time.monotonic() + MOST_S
        for name, text in PROMPTS.items():
            try:
                answers.append(reader.greedy(name, text, TOKENS))
            except NoLogprobs as why:
                note = str(why)
            if time.monotonic() > end or server.gone() is not None:
                note = note or "it did not answer in time"
                break
    record = ParityRecord(
        engine=cell.engine,
        variant=cell.variant,
        repeat=cell.repeat,
        target=prepared.models()["target"],
        weights=weights_key(prepared.target),
        dtype=dtype_of(prepared),
        answers=tuple(answers),
        note=note,
    )
    write_atomic(launch / PARITY, to_json(record))


@contextmanager
def _reader(prepared: Prepared, server: Server, url: str) -> Iterator[LogprobReader]:
    model = asking_of(prepared, server, "baseline").model
    with plain_client(url, prepared.plan.client, api_key(prepared.plan)) as http:
        yield LogprobReader(http, url, model)


def golden_of(prepared: Prepared) -> ParityRecord | None:
    """The stored answers that the engine is held to. Raises `UsageError` at a broken file.

    The plan's `target.parity`, else the file named after the target's weights, if there is one.
    """
    named = prepared.plan.target.parity
    if named is not None:
        path = Path(named).expanduser()
        if not path.is_file():
            raise UsageError(
                f"target.parity={named}: no such file; `docs/integrity.md` tells how one is made"
            )
        return read_json(path, ParityRecord)
    key = weights_key(prepared.target)
    path = GOLDEN / f"{key}.json"
    return read_json(path, ParityRecord) if key is not None and path.is_file() else None


def keep_golden(prepared: Prepared, folder: RunFolder) -> None:
    """Copy the golden answers into the run, so that it can be analysed anywhere."""
    golden = golden_of(prepared)
    if golden is not None:
        write_atomic(folder.path / "golden" / f"{prepared.name}.json", to_json(golden))


def weights_key(target: Path | None) -> str | None:
    """Identifies a checkpoint's weights and tokenizer by samples of them; None: not at hand.

    The config is left out on purpose: a wrong one must not have a golden file of its own.
    """
    if target is None:
        return None
    digest = hashlib.sha256()
    try:
        files = [*sorted(target.glob("*.safetensors")), target / "tokenizer.json"]
        for path in files:
            if not path.is_file():
                continue
            size = path.stat().st_size
            digest.update(f"{path.name}:{size}\n".encode())
            with path.open("rb") as file:
                for part in range(8):
                    file.seek(size * part // 8)
                    digest.update(file.read(SAMPLE))
    except OSError:
        return None
    return digest.hexdigest()[:16]


def dtype_of(prepared: Prepared) -> str | None:
    """The precision the target is served in; None where that is not known."""
    said = prepared.plan.engine.dtype
    if said != "auto" or prepared.target is None:
        return None if said == "auto" else said
    try:
        config: dict[str, Any] = read_config(prepared.target / "config.json")
        inner = config.get("text_config")
        text = inner if isinstance(inner, dict) else config
        own = text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype")
    except EngineUsageError:
        return None
    return str(own) if own else None


def ask_ties(prepared: Prepared, server: Server, cells: Sequence[Cell], folder: RunFolder) -> None:
    """Ask about the divergences known by now that no server was asked about yet.

    A baseline's server is asked. Where none is to come, the last speculative one is: a single token
    after a given prefix is computed by the target alone.
    """
    plan = prepared.plan
    if plan.sampling.temperature != 0 or not plan.target.ask_logprobs:
        return
    path = ties_path(folder, prepared.name)
    ties = read_json(path, Ties) if path.exists() else Ties(engine=prepared.name, dtype=None)
    variant = cells[0].variant
    url = prepared.urls.get("baseline", server.url).partition(",")[0]
    if variant != "baseline" and not prepared.attached and _baseline_to_come(prepared, cells):
        return
    parted = {
        cand.cell.cell_id: divergences(base, cand)[1]
        for base, cand in pairs(_stored(folder, prepared, done=ties.cells))
    }
    asked: Variant = "baseline" if url != server.url else variant
    found = _ask_all(prepared, server, url, [d for some in parted.values() for d in some])
    told = tuple(
        Tie(
            cell_id=d.key[0],
            index=d.key[1],
            prompt_id=d.prompt_id,
            position=d.place["position"],
            gap=gap,
            asked=asked,
        )
        for d, gap in found
    )
    ties = msgspec.structs.replace(
        ties, dtype=dtype_of(prepared), cells=(*ties.cells, *parted), ties=(*ties.ties, *told)
    )
    write_atomic(path, to_json(ties))


def _baseline_to_come(prepared: Prepared, cells: Sequence[Cell]) -> bool:
    after = prepared.cells[prepared.cells.index(cells[-1]) + 1 :]
    return any(c.variant == "baseline" for c in after)


def _stored(folder: RunFolder, prepared: Prepared, *, done: Sequence[str]) -> list[CellData]:
    """The engine's whole cells whose pair is whole and was not asked about yet."""
    saved = [c for c in prepared.cells if folder.has_cell(c.cell_id)]
    key = {c.cell_id: (c.load, c.repeat, c.block) for c in saved}
    wanted = {key[c.cell_id] for c in saved if c.variant == "speculative" and c.cell_id not in done}
    both = wanted & {key[c.cell_id] for c in saved if c.variant == "baseline"}
    return [read_cell(folder, c) for c in saved if key[c.cell_id] in both]


def _ask_all(
    prepared: Prepared, server: Server, url: str, parted: Sequence[Divergence]
) -> list[tuple[Divergence, float | None]]:
    """The gap of each divergence that could be asked about; those beyond the limit are left out."""
    wanted = [d for d in parted if _can_ask(d)]
    step = max(1, -(-len(wanted) // MOST_ASKED))
    prompts = {p.id: p for p in prepared.prompts}
    found: list[tuple[Divergence, float | None]] = []
    end = time.monotonic() + MOST_S
    with _reader(prepared, server, url) as reader:
        for d in wanted[::step]:
            if time.monotonic() > end or server.gone() is not None:
                break
            prompt = prompts.get(d.prompt_id)
            if prompt is not None:
                found.append((d, _gap(prepared, server, reader, prompt, d)))
    return found


def _can_ask(d: Divergence) -> bool:
    """Whether both sides have a token there, after a prefix that can be sent again."""
    place = d.place
    both = place["baseline"] is not None and place["candidate"] is not None
    return place["unit"] == "token" and both and d.turn == 0


def _gap(
    prepared: Prepared, server: Server, reader: LogprobReader, prompt: Prompt, d: Divergence
) -> float | None:
    place = d.place
    try:
        ids = _prompt_ids(prepared, server, reader, prompt)
        best = reader.next_token([*ids, *d.shared_tokens])
    except NoLogprobs:
        return None
    bound = near_tie_bound(dtype_of(prepared))
    return gap_of(best, (place["baseline"], place["candidate"]), bound)


def _prompt_ids(
    prepared: Prepared, server: Server, reader: LogprobReader, prompt: Prompt
) -> Sequence[int]:
    """The prompt's tokens: its own, the server's, or those of the target's tokenizer at hand."""
    if prompt.token_ids is not None:
        return prompt.token_ids
    ask = asking_of(prepared, server, "baseline")
    body = request_body(ask, prompt, 0)
    body = {k: v for k, v in body.items() if k not in ("stream", "stream_options", "ignore_eos")}
    try:
        return reader.prompt_ids(PATHS[ask.endpoint], body)
    except NoLogprobs:
        if prepared.target is None or prompt.messages is None:
            raise
    try:
        trust = prepared.plan.engine.trust_remote_code
        tokens = TargetTokenizer(prepared.target, trust_remote_code=trust)
        return tokens.chat_ids(prompt.messages, prepared.plan.workload.chat_template_kwargs)
    except Exception as why:  # a chat template is a program of its own: it raises anything
        raise NoLogprobs(str(why)) from None
