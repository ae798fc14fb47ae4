"""Stage generate: the target's own answers to the plan's prompts, sample by sample.

The folder: `samples-*.jsonl` (append-only), `made_from.json` (what they are made from, written
first), `dropped.json`, `failures.json`, `manifest.json`, and `gate.json`, written last.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from engines.base import EngineUsageError
from harness.errors import UsageError
from harness.load.prompts.datasets import load_prompts
from harness.load.prompts.prompt import Prompt
from harness.load.streaming.client import check_prompts
from harness.plan.secret import hidden
from training.files import file_digest, locked, write_record
from training.folders import Stage, stage_folder
from training.gate import GATE, Gate, check_line, read_gate, require, write_gate
from training.generate.made_from import Begun, MadeFrom, changes, read_begun, write_begun
from training.generate.meter import Meter, Pace
from training.generate.server import check_server, context_for, own_context, serving
from training.generate.shards import ShardWriter
from training.generate.text import TargetText, read_text
from training.generate.wanted import Talk, Wanted, answered, talks, wanted_samples
from training.kept import refuse_changed
from training.plan import TrainingPlan
from training.progress import note
from training.samples import read_samples, shard_paths, whole_lines
from training.targets import demo_prompts, target_folder, target_identity

STAGE: Stage = "generate"
MANIFEST = "manifest.json"
FAILURES = "failures.json"


def run(plan: TrainingPlan, work: Path) -> Gate:
    """Make the samples that are missing, judge all of them, and write the gate.

    Raises `GateFailed` where it does not pass, `UsageError` for what cannot be asked or was begun
    from something else, `EngineFailed` where the server does not last; what is there is kept.
    """
    check_server(plan)
    target = target_folder(plan)
    text = read_text(target, trust_remote_code=plan.engine.trust_remote_code)
    prompts = prompts_of(plan, target)
    wanted = wanted_samples(prompts, plan)
    made = made_from(plan, target, prompts)
    folder = stage_folder(work, STAGE)
    with locked(folder):
        return _run(plan, folder, _Job(text=text, target=target, wanted=wanted, made=made))


class _Job(msgspec.Struct, frozen=True, kw_only=True):
    text: TargetText
    target: Path
    wanted: list[Wanted]
    made: MadeFrom


def _run(plan: TrainingPlan, folder: Path, job: _Job) -> Gate:
    begun = _begun(folder, job.made)
    before = _still(folder, read_gate(folder))
    if before is not None and before.passed and _limits(plan) == begun.limits:
        note(f"generate: nothing to do, {folder} is finished and passed its gate")
        return before
    (folder / GATE).unlink(missing_ok=True)
    if before is None or not before.passed:
        left = talks(job.wanted, _have(folder))
        if left:
            begun = _collect(plan, folder, job, left)
    return require(_judge(plan, folder, job, begun), folder)


def _still(folder: Path, gate: Gate | None) -> Gate | None:
    """The gate if it speaks of the samples that are there now; None: they changed since."""
    if gate is None or not gate.passed:
        return gate
    from training.generate.judge import digest

    if gate.output == digest(read_samples(folder)):
        return gate
    note(f"generate: the samples in {folder} changed since they passed their gate")
    return None


def prompts_of(plan: TrainingPlan, target: Path) -> list[Prompt]:
    """The plan's prompts. Raises `UsageError` where they cannot be read or asked."""
    workload = plan.workload
    if workload.ignore_eos:
        raise UsageError(
            "workload.ignore_eos=true: answers would go on behind their end, and a drafter would "
            "learn that; leave it out"
        )
    try:
        prompts = load_prompts(
            workload,
            demo_prompts=demo_prompts(plan),
            tokenizer=target,
            seed=plan.seed,
            context=plan.engine.max_model_len or own_context(target),
            trust_remote_code=plan.engine.trust_remote_code,
        )
    except EngineUsageError as error:
        raise UsageError(str(error)) from None
    check_prompts(workload.endpoint, prompts)
    return prompts


def made_from(plan: TrainingPlan, target: Path, prompts: Sequence[Prompt]) -> MadeFrom:
    """What the samples depend on; how fast they are made, and how they are judged, is not in it."""
    engine = msgspec.to_builtins(plan.engine)
    for key in ("port", "max_num_seqs", "kv_cache_gib", "threads", "startup_deadline_s"):
        engine.pop(key)
    engine.pop("api_key_env")
    sections: dict[str, Any] = {
        "seed": plan.seed,
        "generate": {
            "engine": plan.generate.engine,
            "samples": plan.generate.samples,
            "max_tokens": plan.generate.max_tokens,
        },
        "engine": engine,
        "workload": msgspec.to_builtins(plan.workload),
        "sampling": msgspec.to_builtins(plan.sampling),
    }
    return MadeFrom(
        plan=hidden(sections),  # another key makes no other samples
        prompts=hashlib.sha256(msgspec.json.encode(list(prompts))).hexdigest(),
        target=target_identity(target),
    )


def _limits(plan: TrainingPlan) -> dict[str, Any]:
    told = msgspec.to_builtins(plan.generate)
    return {key: told[key] for key in told if key.startswith(("most_", "least_", "keep_"))}


def _begun(folder: Path, made: MadeFrom) -> Begun:
    """What the folder was begun from. Raises `UsageError` where that is not what the plan says."""
    begun = read_begun(folder)
    if begun is None:
        if shard_paths(folder):
            raise UsageError(
                f"{folder}: holds samples, but nothing says what they were made from; give "
                "another --out, or remove that folder"
            )
        begun = Begun(made=made)
        write_begun(folder, begun)
    changed = changes(begun.made, made)
    if changed and next(whole_lines(folder), None) is None:  # nothing to mix with
        (folder / GATE).unlink(missing_ok=True)
        begun = Begun(made=made)
        write_begun(folder, begun)
    elif changed:
        refuse_changed(folder, changed)
    return begun


def _have(folder: Path) -> dict[str, str]:
    """What the samples that are there answered, by id."""
    have: dict[str, str] = {}
    for sample in read_samples(folder, dropped=True):
        have |= answered([sample])
    return have


def _collect(plan: TrainingPlan, folder: Path, job: _Job, left: list[Talk]) -> Begun:
    """Ask what is left; every sample is on the disk when this returns or raises."""
    from training.generate.collect import Collector, prompt_ids

    todo = sum(len(talk.wanted) for talk in left)
    done = len(job.wanted) - todo
    note(f"generate: {todo} samples to go of {len(job.wanted)}, {done} are there")
    longest, pace = 0, Pace("generate: prompts measured", len(left))
    for talk in left:
        most = talk.prompt.max_tokens or plan.generate.max_tokens
        longest = max(longest, len(prompt_ids(job.text, talk.prompt, plan)) + most)
        pace.step()
    with serving(plan, job.target, context_for(plan, job.target, longest), folder) as server:
        attached = None if plan.generate.url is None else server.host.url
        begun = _begin(folder, server.name, server.version, attached)
        meter = Meter(len(job.wanted), done)
        with ShardWriter(folder, plan.generate.shard_samples) as writer:
            collector = Collector(plan, job.text, server, writer)
            try:
                reason = collector.collect(left, meter)
            finally:
                meter.close()
                write_record(folder / FAILURES, collector.failures)
        if reason is not None:
            failed = server.host.failed(reason)
            raise type(failed)(
                f"{failed}; {meter.done} of {len(job.wanted)} samples are kept, run the same "
                "command again to go on",
                phase=failed.phase,
                cause=failed.cause,
                log_path=failed.log_path,
                tail=failed.tail,
            )
    return begun


def _begin(folder: Path, engine: str, version: str | None, url: str | None) -> Begun:
    """Note down that a server was asked from now on."""
    begun = read_begun(folder)
    assert begun is not None
    start = {
        "engine": engine,
        "version": version,
        "url": url,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    before = begun.starts[-1] if begun.starts else None
    if before is not None and before["version"] != version:
        note(f"generate: caution: {engine} is {version} now, it was {before['version']} before")
    begun = msgspec.structs.replace(begun, starts=(*begun.starts, start))
    write_begun(folder, begun)
    return begun


def _judge(plan: TrainingPlan, folder: Path, job: _Job, begun: Begun) -> Gate:
    from training.generate.judge import Found, checks_of, examine

    note("generate: judging the samples")
    found: Found = examine(folder, job.text, plan, job.wanted)
    checks = checks_of(found, plan.generate, len(job.wanted), _failures(folder))
    gate = Gate.of(
        STAGE,
        checks,
        output=found.output,
        inputs={"prompts": job.made.prompts, "target": job.made.target_digest},
    )
    begun = msgspec.structs.replace(begun, limits=_limits(plan))
    write_begun(folder, begun)
    counts = {
        "wanted": len(job.wanted),
        "samples": found.samples,
        "failed": len(job.wanted) - found.samples,
        "kept": found.kept,
        "faults": dict(found.faults),
        "finish_reasons": dict(found.finish_reasons),
        "ids_from": dict(found.ids_from),
        "kept_categories": dict(found.categories),
    }
    tokens = {
        "prompt": found.prompt_tokens,
        "answer": found.answer_tokens,
        "kept": found.kept_tokens,
        "kept_answer": found.kept_answer_tokens,
    }
    manifest = {
        "made_from": begun.made,
        "engine": begun.starts[-1] if begun.starts else None,
        "starts": begun.starts,
        "counts": counts,
        "tokens": tokens,
        "shards": [_shard(path) for path in shard_paths(folder)],
        "output": found.output,
    }
    write_record(folder / MANIFEST, manifest)
    write_gate(folder, gate)
    _tell(found.kept, found.samples, tokens, gate)
    return gate


def _failures(folder: Path) -> dict[str, str]:
    """Why samples were missing at the end of the last asking, by id."""
    try:
        return msgspec.json.decode((folder / FAILURES).read_bytes(), type=dict[str, str])
    except (OSError, msgspec.DecodeError):
        return {}


def _shard(path: Path) -> dict[str, Any]:
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": file_digest(path)}


def _tell(kept: int, samples: int, tokens: dict[str, int], gate: Gate) -> None:
    for check in gate.checks:
        note(f"generate: {check_line(check)}")
    note(
        f"generate: {kept} of {samples} samples kept, {tokens['kept_answer']:,} answer tokens "
        f"in {tokens['kept']:,}"
    )
