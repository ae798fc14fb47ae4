r"""One trainer in a process of its own, told on stdin what to do; answers in JSON lines.

    python trainer_worker.py ours|speculators FOLDER THREADS TTT_STEPS LR frozen|trained ROW \
        float32|bfloat16 stored|computed

`block N`: train N updates; `loss`: the loss of the first batch; `save FILE`: the weights;
`judge FILE` (ours only): held-out accuracy of a drafter's weights; an empty line: end. ROW
(speculators only): how many tokens go through its model at a time, 0 for the whole batch. The last
word (ours only): whether the target's choices come with the states or are computed. Runs in
this harness's environment and in the one of speculators, so that it imports either's packages
only where it needs them.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

DECAY = 0.8
CLIP = 1.0


class Data:
    """The files of `trainer_data`."""

    def __init__(self, folder: Path) -> None:
        self.shape = SimpleNamespace(**json.loads((folder / "shape.json").read_text()))
        self.target = load_file(folder / "target.safetensors")
        self.first = load_file(folder / "drafter.safetensors")
        tensors = load_file(folder / "batches.safetensors")
        self.batches: dict[str, list[dict[str, torch.Tensor]]] = {"train": [], "held_out": []}
        for part, rows in self.batches.items():
            while f"{part}.{len(rows)}.ids" in tensors:
                name = f"{part}.{len(rows)}."
                rows.append(
                    {k.removeprefix(name): v for k, v in tensors.items() if k.startswith(name)}
                )


class Given(NamedTuple):
    """How to train, as the command line says; each side takes what is its own."""

    steps: int
    lr: float
    train_head: bool
    row: int
    precision: str
    choice: str


class Ours:
    """This repository's trainer."""

    def __init__(self, data: Data, given: Given) -> None:
        from trainer_data import SHAPES, drafter_spec

        from drafters.eagle3 import Eagle3Drafter
        from training.adamw import adamw
        from training.data import Batch
        from training.trainer import Captured, TrainSettings, target_head

        self.data, self.steps = data, given.steps
        self.drafter = Eagle3Drafter(drafter_spec(SHAPES[data.shape.name]))
        self.drafter.load_state_dict(data.first)
        self.drafter.embed_tokens.weight.requires_grad_(False)
        self.drafter.lm_head.weight.requires_grad_(given.train_head)
        self.settings = TrainSettings(
            steps=1,
            ttt_steps=given.steps,
            step_decay=DECAY,
            loss="kl",
            precision=given.precision,
        )
        # Made once, as speculators holds the head's rows of the draft vocabulary.
        self.head = target_head(self.drafter, data.target["lm_head"])
        self.optimizer = adamw(self.drafter.named_parameters(), lr=given.lr, betas=(0.9, 0.999))
        self.captured = {
            part: [
                Captured(
                    batch=Batch(**{k: row[k] for k in Batch.__struct_fields__}),
                    aux=row["aux"],
                    last_normed=row["last_normed"],
                    choice=row["choice"] if given.choice == "stored" else None,
                )
                for row in rows
            ]
            for part, rows in data.batches.items()
        }
        self.tokens = [int((row["documents"] >= 0).sum()) for row in data.batches["train"]]
        # The other trainer sums the steps' losses where this one takes their mean.
        self.clip = CLIP / sum(DECAY**i for i in range(given.steps))

    def loss(self, number: int) -> torch.Tensor:
        from training.trainer import drafter_loss

        captured = self.captured["train"][number]
        return drafter_loss(self.drafter, captured, self.head, self.settings).loss

    def update(self, number: int) -> None:
        self.optimizer.zero_grad()
        self.loss(number).backward()
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), self.clip)
        self.optimizer.step()

    def weights(self) -> dict[str, torch.Tensor]:
        return self.drafter.state_dict()

    @torch.no_grad()
    def judge(self, file: str) -> dict[str, Any]:
        import msgspec

        from training.trainer import drafter_loss

        mine = {name: tensor.clone() for name, tensor in self.weights().items()}
        self.drafter.load_state_dict(load_file(file))
        total = None
        for captured in self.captured["held_out"]:
            exact = msgspec.structs.replace(self.settings, precision="float32")
            result = drafter_loss(self.drafter, captured, self.head, exact)
            total = result.counts if total is None else total + result.counts
        self.drafter.load_state_dict(mine)
        assert total is not None
        return {
            "loss": total.loss(DECAY),
            "accuracy": total.accuracy,
            "marginal": total.marginal,
            "conditional": total.conditional,
            "judged": total.get("judged"),
            "outside": total.get("outside"),
        }


class Theirs:
    """speculators' draft model, its loss and its optimizer, as its trainer joins them."""

    def __init__(self, data: Data, given: Given) -> None:
        from speculators.config import SpeculatorsConfig, VerifierConfig
        from speculators.losses import resolve_loss_config
        from speculators.models.eagle3 import Eagle3SpeculatorConfig
        from speculators.models.eagle3.core import Eagle3DraftModel
        from speculators.proposals.greedy import GreedyTokenProposalConfig
        from speculators.train.optimizers import build_optimizers
        from transformers import LlamaConfig

        shape = data.shape
        layer = LlamaConfig(
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_hidden_layers=1,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            vocab_size=shape.vocab,
            rms_norm_eps=1e-6,
            max_position_embeddings=4096,
            pad_token_id=None,
        )
        layer._attn_implementation = "sdpa"
        config = Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=shape.draft_vocab,
            eagle_aux_hidden_state_layer_ids=list(shape.aux_layers),
            speculators_config=SpeculatorsConfig(
                algorithm="eagle3",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=given.steps)],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=[]),
            ),
        )
        self.model = Eagle3DraftModel(config)
        left = self.model.load_state_dict(data.first, strict=False)
        assert not left.unexpected_keys, left.unexpected_keys
        self.model.verifier_lm_head.weight.data = data.target["lm_head"][data.target["kept"]]
        # The states are those behind the target's final norm.
        self.model.verifier_norm = torch.nn.Identity()
        self.model.lm_head.weight.requires_grad_(given.train_head)
        self.model.train()
        self.options = {
            "ttt_steps": given.steps,
            "ttt_step_loss_decay": DECAY,
            "loss_config": resolve_loss_config("kl_div", "eager"),
        }
        (self.optimizer,) = build_optimizers(
            self.model, SimpleNamespace(optimizer="adamw", lr=given.lr, weight_decay=0.0)
        )
        self.steps, self.half = given.steps, given.precision == "bfloat16"
        self.batches = [slots_of(batch, given.row) for batch in data.batches["train"]]
        self.tokens = [int((row["documents"] >= 0).sum()) for row in data.batches["train"]]

    def losses(self, number: int) -> Iterator[torch.Tensor]:
        """The parts' losses, which sum up to the whole batch's.

        Each step's loss is a mean over as many slots as every other step's, so that the parts'
        means, weighted by their slots, give the mean of the whole.
        """
        parts = self.batches[number]
        slots = [int(part["loss_mask"].sum()) for part in parts]
        for part, count in zip(parts, slots, strict=True):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.half):
                _, loss, _ = self.model(**part, **self.options)
            yield loss * (count / sum(slots)) if len(parts) > 1 else loss

    def loss(self, number: int) -> torch.Tensor:
        """Over the sum of the steps' weights, as ours is told."""
        total = sum(loss.detach() for loss in self.losses(number))
        return torch.as_tensor(total) / sum(DECAY**i for i in range(self.steps))

    def update(self, number: int) -> None:
        self.optimizer.zero_grad()
        for loss in self.losses(number):
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()

    def weights(self) -> dict[str, torch.Tensor]:
        return {
            name: tensor
            for name, tensor in self.model.state_dict().items()
            if not name.startswith("verifier_")
        }


def slots_of(row: dict[str, torch.Tensor], most: int) -> list[dict[str, torch.Tensor]]:
    """A packed row as speculators collates it, each document without its first token.

    Slot t holds the states of token t, token t + 1, and the target's state of token t + 1. The
    loss mask is on the same predictions as ours: slot t where token t + 2 carries loss. `most`:
    tokens in one part (0: all).
    """
    documents = row["documents"][0]
    parts: list[list[dict[str, torch.Tensor]]] = [[]]
    filled = 0
    for number in range(int(documents.max()) + 1):
        at = (documents == number).nonzero().flatten()
        if most and filled and filled + len(at) > most:
            parts.append([])
            filled = 0
        filled += len(at)
        mask = row["loss_mask"][0, at]
        parts[-1].append(
            {
                "input_ids": row["ids"][0, at[1:]],
                "hidden_states": row["aux"][0, at[:-1]],
                "verifier_last_hidden_states": row["last_normed"][0, at[1:]],
                "position_ids": row["positions"][0, at[1:]],
                "loss_mask": torch.cat((mask[2:], mask.new_zeros(1))),
                "document_ids": torch.full((len(at) - 1,), number),
            }
        )
    return [
        {key: torch.cat([piece[key] for piece in part]).unsqueeze(0) for key in part[0]}
        for part in parts
    ]


def peak_bytes() -> int:
    """The most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Answer what stdin asks, line by line."""
    side, folder, threads, steps, lr, head, row, precision, choice = sys.argv[1:10]
    torch.set_num_threads(int(threads))
    torch.manual_seed(0)
    data = Data(Path(folder))
    kind: Any = {"ours": Ours, "speculators": Theirs}[side]
    given = Given(
        steps=int(steps),
        lr=float(lr),
        train_head=head == "trained",
        row=int(row),
        precision=precision,
        choice=choice,
    )
    trainer = kind(data, given)
    done, loaded = 0, peak_bytes()
    for line in sys.stdin:
        what, _, argument = line.strip().partition(" ")
        answer: dict[str, Any] = {}
        if what == "block":
            numbers = [(done + i) % len(trainer.tokens) for i in range(int(argument))]
            begun, cpu = time.perf_counter(), time.process_time()
            for number in numbers:
                trainer.update(number)
            answer["seconds"] = time.perf_counter() - begun
            answer["cpu_seconds"] = time.process_time() - cpu
            answer["tokens"] = sum(trainer.tokens[number] for number in numbers)
            done += len(numbers)
        elif what == "loss":
            with torch.no_grad():
                answer["loss"] = float(trainer.loss(0))
        elif what == "save":
            save_file({k: v.contiguous() for k, v in trainer.weights().items()}, argument)
        elif what == "judge":
            answer = trainer.judge(argument)
        else:
            break
        answer |= {"updates": done, "peak_bytes": peak_bytes(), "loaded_bytes": loaded}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
