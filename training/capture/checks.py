"""The gate of the capture stage: each check measures one way in which states can be wrong.

A row's cosine is taken per layer, between what was captured and what the same tokens give when
they are computed again: alone in the same engine, and by the reference engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from engines.capture.target import CaptureTarget, final_norm
from training.capture.inputs import Row
from training.capture.store import StatesIndex
from training.files import file_digest
from training.gate import Check
from training.norm_count import ranks, undone
from training.states import StoredStates

if TYPE_CHECKING:
    from torch import Tensor

QUANTILE = 0.01
"""Of the rows' cosines: in low precision an expert chosen otherwise changes a row now and then."""
LIKELY = 50
"""A token sampled at a temperature is among this many of the target's likeliest, as a rule."""
NORM_TOLERANCE = 0.1
FP8_ERROR = 0.05


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """A sample as it was captured (`got`), and as the same engine gives it `alone`: states
    [T, n + 1, H], the last one after the final norm.

    `every`: all hidden states 0 … L of the reference engine [T, L + 1, H].
    """

    row: Row
    got: Tensor
    alone: Tensor
    every: Tensor | None = None


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """Answer tokens that the states before them predict, of how many; per sample the share."""

    hits: int
    of: int
    shares: dict[str, float]

    @property
    def share(self) -> float | None:
        """None without a token."""
        return self.hits / self.of if self.of else None


def stacked(aux: Tensor, last_normed: Tensor) -> Tensor:
    """aux [T, n * H] and last [T, H] -> float32 [T, n + 1, H]."""
    import torch

    width = last_normed.shape[-1]
    return torch.cat((aux.float(), last_normed.float()), dim=-1).unflatten(-1, (-1, width))


def cosines(a: Tensor, b: Tensor) -> Tensor:
    """Per row and layer, [T, layers]; a row of zeros has cosine 0."""
    import torch

    return torch.cosine_similarity(a, b, dim=-1)


def proof(found: Sequence[tuple[Row, Tensor]], head: Tensor, *, within: int = 1) -> Proof:
    """How often an answer's token is among the `within` likeliest after the state before it.

    `found`: samples and their last states [T, H] after the final norm.
    """
    hits = of = 0
    shares: dict[str, float] = {}
    for row, last in found:
        import torch

        begin = max(row.loss_from, 1)
        tokens = torch.tensor(row.token_ids[begin:].tolist(), dtype=torch.int64)
        good = int((ranks(last[begin - 1 : -1], head, tokens) < within).sum())
        hits, of = hits + good, of + len(tokens)
        shares[row.id] = good / len(tokens) if len(tokens) else 1.0
    return Proof(hits=hits, of=of, shares=shares)


def proof_check(
    found: Sequence[tuple[Row, Tensor]],
    facts: CaptureTarget,
    head: Tensor,
    least: float,
    *,
    rounded: bool,
) -> tuple[Check, Proof]:
    """The proof test on greedy samples; where there are none, on sampled ones with more room.

    `rounded`: the states were stored in 8 bits, which turns near ties over: then the answer's token
    may be the second likeliest.
    """
    norm, eps = facts.norm(), facts.norm_eps
    greedy = [(row, last) for row, last in found if row.greedy]
    used = greedy or list(found)
    within = (2 if rounded else 1) if greedy else LIKELY
    measured = proof(used, head, within=within)
    share = measured.share
    passed = share is not None and share >= least
    said = f"of {measured.of} answer tokens of {len(used)} samples"
    if not greedy:
        said += f"; no sample is greedy, so among the {LIKELY} likeliest"
    elif rounded:
        said += "; among the 2 likeliest, for 8 bits turn near ties over"
    advice = ""
    if not passed:
        advice = _likely_cause(used, head, norm, eps, within, share or 0.0)
    check = Check(
        name="proof",
        passed=passed,
        value=share,
        limit=least,
        relation=">=",
        reason=said,
        advice=advice,
    )
    return check, measured


def _likely_cause(
    used: Sequence[tuple[Row, Tensor]],
    head: Tensor,
    norm: Tensor,
    eps: float,
    within: int,
    share: float,
) -> str:
    """What the share would be with the final norm applied once more, and with one undone."""
    more = proof([(row, final_norm(last, norm, eps)) for row, last in used], head, within=within)
    told = f"with the final norm applied once more the share is {_figure(more.share)}"
    less = proof([(row, undone(last, norm)) for row, last in used], head, within=within)
    told += f", with one undone {_figure(less.share)}"
    best = max(more.share or 0.0, less.share or 0.0)
    if best <= share + 0.02:
        return f"{told}: the norm is not the cause; the states are of other tokens or layers"
    if best == less.share:
        return f"{told}: the final norm was applied twice"
    return f"{told}: the final norm is missing in the captured last states"


def _figure(share: float | None) -> str:
    return "not known" if share is None else f"{share:.3f}"


def final_norm_check(found: Sequence[tuple[Row, Tensor]], norm: Tensor) -> Check:
    """A normed row divided by the norm's weight has root mean square 1; one before the norm not.

    It catches a missing norm whose weight is nearly constant, which no argmax can show.
    """
    import torch

    used = norm.abs() > 0
    sizes = torch.cat(
        [(last.float()[:, used] / norm[used]).square().mean(-1).sqrt() for _, last in found]
    )
    middle = float(sizes.median())
    return Check(
        name="final_norm",
        passed=abs(middle - 1) <= NORM_TOLERANCE,
        value=middle,
        limit=1.0,
        relation="==",
        reason=f"root mean square of last state over norm weight, {len(sizes)} rows",
        advice="the final norm is missing in the captured last states, or another one was applied",
    )


def stored_checks(
    folder: Path, index: StatesIndex, stored: StoredStates | None, rows: Sequence[Row]
) -> list[Check]:
    """What is measured of every stored row: checksums, samples, token ids, zeros, numbers."""
    damaged = [s.file for s in index.shards if file_digest(folder / s.file) != s.sha256]
    checks = [
        _none("checksums", damaged, f"damaged shards of {len(index.shards)}", _RECAPTURE),
    ]
    if stored is None or damaged:
        return checks
    wanted = [row.id for row in rows]
    found = list(stored.sample_ids)
    checks.append(
        Check(
            name="samples",
            passed=found == wanted,
            value=len(found),
            limit=len(wanted),
            relation="==",
            reason="the captured samples are the generated ones, in order",
            advice="capture anew into an empty folder",
        )
    )
    if found != wanted:
        return checks
    other = [
        row.id
        for i, row in enumerate(rows)
        if stored.token_ids(i).tolist() != row.token_ids.tolist()
        or stored.loss_from(i) != row.loss_from
    ]
    checks.append(
        _none("token_ids", other, "samples whose token ids are not the sample's", _OTHER_TOKENS)
    )
    zero, broken = _bad_rows(stored)
    checks.append(_none("zero_rows", zero, "samples with a row of zeros", _ZEROS))
    checks.append(_none("finite", broken, "samples with NaN or infinity", _NOT_FINITE))
    return checks


_RECAPTURE = "remove the shard and run capture again: it alone is captured anew"
_OTHER_TOKENS = "the engine was fed other tokens: it adds some of its own, or mixed requests up"
_ZEROS = (
    "the engine did not compute these rows or read them from the wrong cache slots (a cached "
    "prefix, another block size)"
)
_NOT_FINITE = "the engine computes in a precision that overflows: set engine.dtype"


def _none(name: str, wrong: Sequence[str], what: str, advice: str) -> Check:
    """The check that nothing is wrong; the first three that are get named."""
    named = f": {', '.join(wrong[:3])}" if wrong else ""
    return Check(
        name=name,
        passed=not wrong,
        value=len(wrong),
        limit=0,
        relation="==",
        reason=f"{what}{named}",
        advice=advice,
    )


def _bad_rows(stored: StoredStates) -> tuple[list[str], list[str]]:
    """Samples with an all-zero row (of one layer), and those with a number that is none."""
    zero: list[str] = []
    broken: list[str] = []
    for states in stored.stream(range(len(stored.lengths))):
        bad = bad_states(stacked(states.aux, states.last_normed))
        zero += [states.sample_id] if bad[0] else []
        broken += [states.sample_id] if bad[1] else []
    return zero, broken


def bad_states(states: Tensor) -> tuple[bool, bool]:
    """Of states [T, layers, H]: whether a row of a layer is all zero, whether one is not finite."""
    largest = states.abs().amax(-1)
    return bool((largest == 0).any()), not bool(largest.isfinite().all())


def parity_check(name: str, pairs: Sequence[tuple[Row, Tensor, Tensor]], least: float) -> Check:
    """The low quantile of all rows' cosines over all layers, worst and mean beside it."""
    import torch

    each = [cosines(a, b).flatten() for _, a, b in pairs]
    rows = torch.cat(each)
    value = float(rows.nan_to_num(0.0).quantile(QUANTILE))
    worst = min(range(len(pairs)), key=lambda i: float(each[i].nan_to_num(0.0).min()))
    return Check(
        name=name,
        passed=value >= least,
        value=value,
        limit=least,
        relation=">=",
        reason=(
            f"cosine that all but {QUANTILE:.0%} of the rows reach; worst "
            f"{float(each[worst].nan_to_num(0.0).min()):.6f} (sample {pairs[worst][0].id}), mean "
            f"{float(rows.nan_to_num(0.0).mean()):.6f}, {len(pairs)} samples"
        ),
        advice="the engine's states depend on what else is in the batch, or are not the target's",
    )


def own_sample_check(probes: Sequence[Probe], least: float) -> Check:
    """No sample's states are another's: names the sample, and whose states it holds."""
    wrong = []
    for probe in probes:
        own = _mean(probe.got, probe.alone)
        if own >= least:
            continue
        others = [other for other in probes if other.row.id != probe.row.id]
        best = max(others, key=lambda other: _mean(probe.got, other.alone), default=None)
        if best is not None and _mean(probe.got, best.alone) > max(own, least):
            wrong.append(f"{probe.row.id} holds the states of {best.row.id}")
        else:
            wrong.append(f"{probe.row.id} has cosine {own:.3f} to its own states")
    return _none(
        "own_sample",
        wrong,
        f"of {len(probes)} samples hold states that are not theirs",
        "the engine mixed requests up; capture with capture.batch=1 to see whether it stops",
    )


def _mean(got: Tensor, other: Tensor) -> float:
    """The mean cosine over the rows both have."""
    rows = min(len(got), len(other))
    return float(cosines(got[:rows], other[:rows]).nan_to_num(0.0).mean())


def layer_check(probes: Sequence[Probe], layers: Sequence[int]) -> Check:
    """Each captured layer is closest to its own index of the reference engine, not to another.

    `layers`: the indices that the probes' states claim to be, the last one included.
    """
    import torch

    found = []
    for place in range(len(layers)):
        each = [  # of each probe, the mean cosine to each hidden state [L + 1]
            cosines(probe.got[:, place : place + 1], probe.every).nan_to_num(0.0).mean(0)
            for probe in probes
            if probe.every is not None
        ]
        scores = torch.stack(each).mean(0)
        own, best = float(scores[layers[place]]), int(scores.argmax())
        near_enough = own >= float(scores[best]) - 1e-6
        found.append(layers[place] if near_enough else best)
    off = [f"{a} is the reference's {b}" for a, b in zip(layers, found, strict=True) if a != b]
    advice = "the engine counts layers otherwise than was assumed"
    shifts = {b - a for a, b in zip(layers[:-1], found[:-1], strict=True)}
    if shifts in ({1}, {-1}):
        advice += f": its ids are off by one ({shifts.pop():+d})"
    return Check(
        name="layers",
        passed=not off,
        value=str(found),
        limit=str(list(layers)),
        relation="==",
        reason="hidden state " + ", ".join(off) if off else "closest hidden state of the reference",
        advice=advice,
    )


def fp8_check(probes: Sequence[Probe], bytes_share: float) -> list[Check]:
    """What 8 bits cost: the states' relative error, and the bytes beside bfloat16's."""
    import torch

    from training.capture.fp8 import relative_error

    got = torch.cat([probe.got.flatten() for probe in probes])
    true = torch.cat([probe.alone.flatten() for probe in probes])
    return [
        Check(
            name="fp8_error",
            passed=relative_error(got, true) <= FP8_ERROR,
            value=relative_error(got, true),
            limit=FP8_ERROR,
            relation="<=",
            reason="relative error of the stored states against the same computed again",
            advice="store bfloat16 (capture.dtype)",
        ),
        Check(
            name="fp8_bytes",
            passed=bytes_share <= 0.55,
            value=bytes_share,
            limit=0.55,
            relation="<=",
            reason="bytes stored, of bfloat16's, scales and token ids included",
            advice="the target's hidden size is too small for one scale a row: store bfloat16",
        ),
    ]
