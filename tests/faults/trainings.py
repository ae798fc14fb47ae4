"""Drafters that are trained for a case, kept in a cache that the code and the recipe name.

They are the demo's drafter in every respect but the recipe's: a flag of the architecture, or a
mistake that trainers have really made. Nothing here is quick enough for one case, so that a
training is made once and lies under `$SPEC_HARNESS_FAULTS` (else ~/.cache/spec-harness-faults).
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from faults.pair import Pair, tokenizer
from faults.recipes import FLAGS, RECIPES, Recipe
from training.demo.pair import configs, drafter_key, source_digest

if TYPE_CHECKING:
    from torch import Tensor

    from drafters.eagle3 import Eagle3Drafter
    from training.demo.config import DrafterConfig
    from training.demo.model import DemoTarget
    from training.trainer import Captured


SAMPLES = "samples"


def cache_root() -> Path:
    """Where trained drafters are kept."""
    named = os.environ.get("SPEC_HARNESS_FAULTS")
    return Path(named) if named else Path.home() / ".cache" / "spec-harness-faults"


def trained(pair: Pair, name: str) -> Path:
    """The folder of the drafter of `RECIPES[name]` for this pair; trained where it is not cached.

    What a training with few samples saw lies beside it in `samples/`, as `trained_samples` says.
    """
    recipe = RECIPES[name]
    folder = cache_root() / f"{pair.kind}-{name}-{_key(pair, recipe)}"
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "config.json").is_file():
            partial = folder.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            _train(pair, recipe, partial)
            os.rename(partial, folder)
    return folder


def trained_samples(folder: Path) -> tuple[tuple[tuple[int, ...], int], ...] | None:
    """Token ids of what a drafter was trained on, each with where its loss begins; None: unsaid."""
    try:
        lines = json.loads((folder / f"{SAMPLES}.json").read_text())
    except OSError:
        return None
    return tuple((tuple(line["ids"]), int(line["loss_from"])) for line in lines)


def _key(pair: Pair, recipe: Recipe) -> str:
    target, drafter = configs(pair.kind, pair.kind)
    parts = (
        drafter_key(target, drafter),
        source_digest([Path(__file__)]),
        json.dumps(msgspec.to_builtins(recipe), sort_keys=True),
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _train(pair: Pair, recipe: Recipe, folder: Path) -> None:
    import torch

    from drafters import checkpoint
    from training.demo.drafter import padded
    from training.demo.export import load_target
    from training.trainer import TrainSettings, train_drafter

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # what is trained is the same on every machine
    target_config, config = configs(pair.kind, pair.kind)
    config = msgspec.structs.replace(config, seed=recipe.seed)
    target = load_target(pair.target, target_config)
    made = _untrained(target, config, recipe, pair)
    settings = TrainSettings(
        steps=recipe.steps,
        ttt_steps=recipe.ttt_steps,
        step_decay=config.step_decay,
        muon_lr=config.muon_lr,
        adam_lr=config.adam_lr,
        tokens="own" if recipe.own_tokens else "teacher",
    )
    data, samples = _data(target, config, recipe, pair)
    train_drafter(made, data, target.lm_head.weight.detach(), settings)
    checkpoint.save(padded(made), folder)
    if samples is not None:
        (folder / f"{SAMPLES}.json").write_text(json.dumps(samples), encoding="utf-8")
    torch.set_num_threads(threads)


def _untrained(
    target: DemoTarget, config: DrafterConfig, recipe: Recipe, pair: Pair
) -> Eagle3Drafter:
    """The demo's untrained drafter with what the recipe changes in its shape."""
    import torch

    from drafters.eagle3 import Eagle3Drafter, MlaProjections
    from training.demo.drafter import new_drafter

    plain = new_drafter(target, config, tokenizer(pair.target))
    flags = {flag: getattr(recipe, flag) for flag in FLAGS}
    size = recipe.draft_vocabulary or plain.spec.draft_vocab_size
    made = Eagle3Drafter(msgspec.structs.replace(plain.spec, draft_vocab_size=size, **flags))
    state = plain.state_dict()
    if recipe.draft_vocabulary is not None:
        kept = frequent_tokens(pair, size)
        made.set_vocabulary(kept)
        state["lm_head.weight"] = state["lm_head.weight"][kept]
    made.load_state_dict(state, strict=False)
    mine, theirs = made.layer.self_attn, plain.layer.self_attn
    if isinstance(mine, MlaProjections) and isinstance(theirs, MlaProjections):
        mine.kv_a_layernorm.eps = theirs.kv_a_layernorm.eps  # of the latent that is padded later
    if recipe.own_embeddings:
        made.embed_tokens.weight = torch.nn.Parameter(target.embed_tokens.weight.detach().clone())
    else:
        made.share(embeddings=target.embed_tokens.weight.detach())
    return made


def frequent_tokens(pair: Pair, size: int) -> Tensor:
    """The `size` most frequent tokens of the corpus' replies, ascending."""
    import torch

    from training.data import token_documents
    from training.demo.corpus import training_documents

    documents = token_documents(training_documents(5), tokenizer(pair.target))
    counts = torch.zeros(configs(pair.kind, pair.kind)[0].vocab_size, dtype=torch.int64)
    for document in itertools.islice(documents, 800):
        replies = torch.tensor(document.ids[document.loss_from :])
        counts += torch.bincount(replies, minlength=len(counts))
    return counts.topk(size).indices.sort().values


def _data(
    target: DemoTarget, config: DrafterConfig, recipe: Recipe, pair: Pair
) -> tuple[Iterator[Captured], list[dict[str, object]] | None]:
    """The batches of a recipe, and the documents where these are few."""
    from training.data import pack, token_documents
    from training.demo import corpus
    from training.demo.target import batches

    tokens, seed = tokenizer(pair.target), target.config.seed + 1000 + config.seed
    if recipe.samples is None:
        stream = batches(target.config, tokens, seed)
        return _captured(target, recipe, stream), None
    endless = token_documents(corpus.training_documents(seed), tokens)
    limit = target.config.row_length
    short = (document for document in endless if len(document.ids) <= limit)
    few = list(itertools.islice(short, recipe.samples))
    stream = pack(itertools.cycle(few), target.config.rows, limit)
    return _captured(target, recipe, stream), [
        {"ids": document.ids, "loss_from": document.loss_from} for document in few
    ]


def _captured(target: DemoTarget, recipe: Recipe, stream: Iterator[object]) -> Iterator[Captured]:
    import torch

    from training.demo.drafter import capture

    generator = torch.Generator().manual_seed(recipe.seed)
    norm = target.norm
    for batch in stream:
        if recipe.unnormed:
            target.norm = torch.nn.Identity()
        captured = capture(target, batch)
        target.norm = norm
        if recipe.mixed:
            rows = captured.aux.shape[0]
            wrong = torch.rand(rows, generator=generator) < recipe.mixed
            other = torch.where(wrong, (torch.arange(rows) + 1) % rows, torch.arange(rows))
            captured = msgspec.structs.replace(
                captured, aux=captured.aux[other], last_normed=captured.last_normed[other]
            )
        yield captured
