"""A small training for the tests of the stage `train`: target, samples and states in memory.

    python tests/unit/train_stage_job.py ROOT OUT key=value…

trains in a process of its own (or in several, under torchrun), on what `make_root` wrote.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]  # run as a script

from reference_models import build_target  # noqa: E402

from engines.reference.config import read_config  # noqa: E402
from engines.reference.engine import Engine  # noqa: E402
from engines.reference.loading import load_model  # noqa: E402
from engines.reference.sampling import SamplingParams  # noqa: E402
from training.heads import read_facts  # noqa: E402
from training.kept import begin_stage  # noqa: E402
from training.plan import TrainingPlan, read_plan  # noqa: E402
from training.states import SampleStates  # noqa: E402
from training.train.job import Asked, Job, make_job  # noqa: E402

LAYERS = (0, 1, 2)
USED = (5, 45)  # token ids that occur
PLAN = """
[target]
path = "{target}"
[train]
epochs = 2
lr = 3e-3
batch_tokens = 160
row_tokens = 80
held_out = 0.2
serve_check = 3
warmup = 0.1
[drafter]
intermediate_size = 96
"""


class MemoryStates:
    """States in memory, as a `StateSource`; `delay` seconds a sample, for slow disks."""

    def __init__(self, samples: Sequence[SampleStates], *, delay: float = 0.0) -> None:
        self.samples, self.delay = list(samples), delay
        self.aux_layers = LAYERS
        self.lengths = [len(s.token_ids) for s in samples]
        self.sample_ids = [s.sample_id for s in samples]

    def read(self, index: int) -> SampleStates:
        return self.samples[index]

    def stream(self, order: Sequence[int]) -> Iterator[SampleStates]:
        for index in order:
            if self.delay:
                time.sleep(self.delay)
            yield self.read(index)

    def close(self) -> None:
        pass


def make_root(root: Path, *, family: str = "llama", count: int = 40) -> Path:
    """Write a random target, its greedy answers and their states under `root`."""
    from tiny_tokenizers import save

    target = root / "target"
    save(target)
    _make_readable(build_target(family, target, vocab_size=800), target)
    config = read_config(target)
    model = load_model(target, config, torch.float32, "cpu")
    engine = Engine(model, tokenizer=None, max_len=200, slots=1)
    generator = torch.Generator().manual_seed(1)
    samples: list[dict[str, Any]] = []
    for number in range(count):
        length = 4 + number % 5
        prompt = torch.randint(USED[0], USED[1], (length,), generator=generator).tolist()
        answer_length = 12 + number % 7
        (request,) = engine.generate(
            [prompt], SamplingParams(max_tokens=answer_length, temperature=0.0)
        )
        tokens = prompt + request.output
        states = engine.capture(tokens, (*LAYERS, config.layers)).clone()
        samples.append(
            {
                "sample_id": f"s{number}",
                "category": None,
                "token_ids": torch.tensor(tokens),
                "loss_from": length,
                "aux": states[:, :-1].flatten(1).clone(),
                "last_normed": states[:, -1].clone(),
            }
        )
    torch.save(samples, root / "states.pt")
    (root / "plan.toml").write_text(PLAN.format(target=target))
    return root


def _make_readable(model: Any, folder: Path) -> None:
    """Let each token follow from the one before it, so that a drafter can learn it in seconds."""
    generator = torch.Generator().manual_seed(2)
    first, end = USED
    follows = torch.randperm(end - first, generator=generator) + first
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.mul_(0.05)
        model.lm_head.weight.mul_(0.1)
        model.lm_head.weight[follows] = model.model.embed_tokens.weight[first:end] * 10
        model.model.norm.weight.uniform_(0.6, 1.4)
    model.save_pretrained(folder)


def read_states(root: Path) -> list[SampleStates]:
    return [SampleStates(**fields) for fields in torch.load(root / "states.pt")]


def make_plan(root: Path, *sets: str) -> TrainingPlan:
    return read_plan(str(root / "plan.toml"), sets)


def job_of(
    root: Path,
    out: Path,
    *sets: str,
    samples: Sequence[SampleStates] | None = None,
    vocabulary: torch.Tensor | None = None,
    greedy: bool = True,
    delay: float = 0.0,
) -> Job:
    """The job of a plan over `make_root`'s states; two samples share a prompt."""
    plan = make_plan(root, *sets)
    source = MemoryStates(samples if samples is not None else read_states(root), delay=delay)
    ids = source.sample_ids
    return make_job(
        plan,
        out,
        read_facts(Path(plan.target.path or "")),
        source,
        asked={s: Asked(prompt_id=f"p{n // 2}", greedy=greedy) for n, s in enumerate(ids)},
        vocabulary=vocabulary,
    )


def run_job(job: Job, **console: Any) -> Any:
    """Train a job in this process as the stage does; its gate."""
    from training.train.console import Console
    from training.train.parallel import barrier, enter
    from training.train.stage import STAGE, sections, train_job

    with enter() as world:
        told = Console(speaks=world.first, **console)
        with told.speaking():
            if world.first:
                begin_stage(job.folder, STAGE, sections(job.plan), {})
            barrier(world)
            return train_job(job, {}, world, told, barrier=barrier)


def main() -> None:
    from training.ending import training_exit_code

    torch.set_num_threads(1)
    root, out, *sets = sys.argv[1:]
    try:
        run_job(job_of(Path(root), Path(out), *sets, delay=float(os.environ.get("DELAY", "0"))))
    except Exception as error:
        sys.exit(training_exit_code(error))


if __name__ == "__main__":
    main()
