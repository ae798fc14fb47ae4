"""From what the user asked for to what can be run: profile, models, prompts, checks.

Every mistake of the user that can be seen beforehand is raised here, before anything is started
or written.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from drafters.headers import read_headers
from drafters.validate import check_fit
from engines.base import Adapter, EngineUsageError, ServeSpec
from engines.catalog import adapter as adapter_named
from engines.checkpoint import read_json
from engines.prefix import check_prefix
from engines.process import check_port, free_port
from engines.supervise import die_with_parent
from harness.choose import choose_profile
from harness.errors import EngineFailure, UsageError, one_line
from harness.load.prompts.datasets import (
    MADE,
    Prompt,
    check_workload,
    load_prompts,
    needs_tokenizer,
)
from harness.load.prompts.synthetic import DEFAULT_PROMPTS
from harness.load.schedule.trace import Trace, read_trace
from harness.load.streaming.client import check_prompts
from harness.load.streaming.pool import check_client
from harness.plan.expand import expand, load_points
from harness.plan.load import build, set_to_none
from harness.plan.schema import EngineSection, Plan
from harness.plan.serve import flag_arguments, most_sequences, serve_spec
from harness.records import VARIANTS, Cell, Variant

LONGEST_CONTEXT = 4096
"""`engine.max_model_len` where the plan says none: the model's own, at most this."""

MOST_MADE = 10_000
"""Made prompts of a plan that says no `workload.num_prompts`; then they come again."""
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tiktoken.model", "tokenizer.model"),
    *("tekken.json", "vocab.json", "vocab.txt"),
)
"""Any one of these may be what an engine makes its tokenizer of; a GGUF file holds its own."""
OWN_TOKENIZER = ("--tokenizer", "--tokenizer-path", "--skip-tokenizer-init")
"""Engines' arguments with which the target's tokenizer is not read."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line asked for. `urls` are attached servers; the key "" is unlabelled."""

    engines: tuple[str, ...] = ("reference",)
    profile: str | None = None
    urls: dict[str, str] = {}
    sets: tuple[str, ...] = ()
    variants: tuple[Variant, ...] | None = None
    out: Path = Path("results")
    command: tuple[str, ...] = ()


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """One engine ready to be measured. `urls` by variant; empty where the harness launches it.

    `searching`: loads are tried that the plan does not name. `notes`: to be told before it starts.
    """

    name: str
    adapter: Adapter
    plan: Plan
    why: str
    target: Path | None
    drafter: Path | None
    urls: dict[str, str]
    prompts: list[Prompt]
    cells: list[Cell]
    model: str | None = None
    label: str | None = None
    variant_known: bool = True
    searching: bool = False
    notes: tuple[str, ...] = ()

    @property
    def attached(self) -> bool:
        """Whether the servers run already."""
        return bool(self.urls)

    def models(self) -> dict[str, str | None]:
        """What is served, for the manifest: paths of a launch, the name of an attached model."""
        return {
            "target": str(self.target) if self.target else self.model,
            "drafter": str(self.drafter) if self.drafter else None,
        }

    def served_words(self) -> str:
        """What is served, for the line that a run begins with."""
        if self.target is None:
            return f"model {one_line(self.model or '', 80)}"
        return f"target {self.target}, " + (
            f"drafter {self.drafter}" if self.drafter else "no drafter"
        )

    def spec(self, variant: Variant) -> ServeSpec:
        """What to serve for `variant`."""
        assert self.target is not None
        engine = self.plan.engine
        return serve_spec(
            self.plan,
            variant,
            target=self.target,
            drafter=self.drafter,
            port=engine.port or free_port(),
            max_model_len=engine.max_model_len or context_of(self.target),
            # A search tries loads that the plan does not name.
            max_num_seqs=None if self.searching else most_sequences(self.plan),
        )


def environment_of(adapter: Adapter, plan: Plan) -> str | None:
    """The engine's own environment, None where it has none; the plan's device alone decides."""
    spec = ServeSpec(target=Path(), served_name="", port=1, device=plan.engine.device)
    return adapter.environment(spec)


def prepare(request: Request, name: str) -> Prepared:
    """Make ready an engine that is launched.

    Raises `UsageError`, `EngineUsageError` or `DrafterError`.
    """
    adapter = adapter_named(name)
    if name == "openai":
        raise UsageError("--engine openai attaches to a running server: give its --url")
    source, why = choose_profile(request, name)
    plan = build(source, name, list(request.sets))
    load_points(plan.load)
    check_client(plan.client)
    variants = request.variants or VARIANTS
    check_asked(request, plan, variants)
    for key, path in (("target.path", plan.target.path), ("drafter.path", plan.drafter.path)):
        if path is not None:
            check_checkpoint(path_of(path), key)
    if plan.target.path is not None and own_tokenizer(plan.engine, variants) is None:
        check_tokenizer(path_of(plan.target.path))
    if "speculative" in variants and plan.target.path and not plan.drafter.path:
        raise UsageError(
            "drafter.path: not set; give --set drafter.path=DIR, or --variants baseline"
        )
    check_prefix(plan.engine.command_prefix)
    if plan.engine.port is not None and plan.engine.reach is None:
        check_port(plan.engine.host, plan.engine.port)
    prompts = _early_prompts(plan)
    if needs_pair(plan):
        check_engine(adapter, plan)
    pair = demo_pair(plan) if needs_pair(plan) else None
    prepared = Prepared(
        name=name,
        adapter=adapter,
        plan=plan,
        why=why,
        target=_path(plan.target.path, pair, "target"),
        drafter=_path(plan.drafter.path, pair, f"drafter-{plan.demo.drafter}")
        if "speculative" in variants
        else None,
        urls={},
        # With a pair once more: only now the context that they must fit is known.
        prompts=prompts_for(plan, pair) if prompts is None or pair is not None else prompts,
        cells=expand(plan, name, variants, attached=False),
    )
    _check_served(prepared, variants)
    return prepared


def check_asked(request: Request, plan: Plan, variants: tuple[Variant, ...]) -> None:
    """Raise `UsageError` where the demo pair would stand in for what the user meant."""
    if request.profile == "model" and plan.target.path is None:
        raise UsageError(
            "--profile model: target.path is not set; give --set target.path=DIR and "
            "--set drafter.path=DIR, or --profile demo for the demo pair"
        )
    check_place(plan)
    if plan.engine.nodes > 1:
        raise UsageError(
            f"engine.nodes = {plan.engine.nodes}: several machines are started by hand, with the "
            "commands that `python -m harness engines show` prints for each; then give --url"
        )
    if "speculative" in variants and set_to_none(request.sets, "drafter.path"):
        raise UsageError(
            "--set drafter.path=none: without a drafter nothing is speculative; give its folder, "
            "or --variants baseline"
        )


def check_place(plan: Plan) -> None:
    """Raise `UsageError` where a profile is for a public target and nobody says where it lies."""
    if plan.target.model is None or plan.target.path is not None:
        return
    drafter = f" and --set drafter.path=DIR ({plan.drafter.model})" if plan.drafter.model else ""
    raise UsageError(
        f"target.path is not set: give --set target.path=DIR ({plan.target.model}){drafter}"
    )


def needs_pair(plan: Plan) -> bool:
    """Whether the demo pair is the target or gives the prompts."""
    return plan.target.path is None or plan.workload.dataset == "demo"


def check_engine(adapter: Adapter, plan: Plan) -> None:
    """Raise what the engine has to say before minutes are spent on making the pair it serves.

    What it says of the pair's own folder does not count: that is still to be made.
    """
    unmade = Path("demo-pair-still-to-be-made")
    spec = ServeSpec(
        target=unmade,
        served_name="demo",
        port=plan.engine.port or 1,
        device=plan.engine.device,
        extra_args=(*flag_arguments(plan.engine.flags, "speculative"), *plan.engine.extra_args),
    )
    try:
        adapter.check(spec)
    except EngineUsageError as error:
        if str(unmade) not in str(error):
            raise


def _path(given: str | None, pair: Path | None, part: str) -> Path:
    if given is not None:
        return path_of(given)
    assert pair is not None
    return pair / part


def _early_prompts(plan: Plan) -> list[Prompt] | None:
    """The prompts, before anything is made; None where the demo pair holds what they need.

    Raises `UsageError` where they cannot be read or asked.
    """
    workload = plan.workload
    made = replayed(plan) is not None or needs_tokenizer(workload)
    if workload.dataset == "demo" or (plan.target.path is None and made):
        check_workload(workload, plan.engine.max_model_len)
        uncounted = msgspec.structs.replace(
            workload,
            min_input_tokens=None,
            max_input_tokens=None,
            chat_template="server",
            chat_template_kwargs={},
        )
        if workload.dataset != "demo" and not needs_tokenizer(uncounted):
            load_prompts(uncounted)  # what is wrong with a file is told now
        return None
    return prompts_for(plan, None)


def prompts_for(plan: Plan, pair: Path | None, *, attached: bool = False) -> list[Prompt]:
    """The plan's prompts. Raises `UsageError` where they cannot be read or asked.

    `attached`: the server runs already, and its context is known only where the plan says it.
    """
    target = _path(plan.target.path, pair, "target") if plan.target.path or pair else None
    workload = plan.workload
    if workload.dataset in MADE and workload.num_prompts is None:
        workload = msgspec.structs.replace(workload, num_prompts=_asked(plan))
    prompts = load_prompts(
        workload,
        demo_prompts=None if pair is None else pair / "prompts.jsonl",
        tokenizer=target,
        seed=plan.seed,
        context=plan.engine.max_model_len if attached else _context(plan, target),
        trust_remote_code=plan.engine.trust_remote_code,
        replay=replayed(plan),
    )
    check_prompts(plan.workload.endpoint, prompts)
    return prompts


def replayed(plan: Plan) -> Trace | None:
    """The trace that gives the prompts too. Raises `UsageError` where it cannot be read.

    A trace of times alone leaves the prompts to the data set.
    """
    if plan.load.trace is None:
        return None
    trace = read_trace(plan.load.trace)
    says = trace.prompts() is not None or trace.rows[0].input_tokens is not None
    return trace if says else None


def _asked(plan: Plan) -> int:
    """How many prompts one start asks, so that as many are made and none is asked twice."""
    each = sum(load.num_requests or DEFAULT_PROMPTS for load in load_points(plan.load))
    return min(MOST_MADE, each * plan.compare.blocks + plan.load.warmup_requests)


def _context(plan: Plan, target: Path | None) -> int | None:
    """The context a launched engine is given; None where the target is still to be made."""
    if plan.engine.max_model_len is not None or target is None:
        return plan.engine.max_model_len
    return context_of(target) if (target / "config.json").is_file() else None


def _check_served(prepared: Prepared, variants: tuple[Variant, ...]) -> None:
    assert prepared.target is not None
    if prepared.drafter is not None:
        with understanding(prepared.drafter, prepared.target):
            check_fit(prepared.drafter, prepared.target)
    for variant in variants:
        spec = prepared.spec(variant)
        with understanding(prepared.target):
            prepared.adapter.check(spec)


def context_of(target: Path) -> int:
    """The model's own context, at most `LONGEST_CONTEXT`."""
    config = read_json(target / "config.json")
    inner = config.get("text_config")
    longest = (inner if isinstance(inner, dict) and inner else config).get(
        "max_position_embeddings"
    )
    if longest is not None and (type(longest) is not int or longest < 1):
        raise UsageError(
            f"{target / 'config.json'}: max_position_embeddings is {longest!r}, not a number of "
            "tokens; set engine.max_model_len"
        )
    return min(longest or LONGEST_CONTEXT, LONGEST_CONTEXT)


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def path_of(given: str) -> Path:
    """A path as the plan gives it, absolute, `~` resolved. Raises `UsageError`."""
    try:
        path = Path(given).expanduser().resolve()
        path.exists()  # raises where the name is no name at all
    except (OSError, RuntimeError, ValueError) as error:
        said = getattr(error, "strerror", None) or error
        raise UsageError(f"{given[:200]}: cannot be a path: {said}") from None
    return path


def check_checkpoint(folder: Path, key: str) -> None:
    """Raise `UsageError` or `EngineUsageError` naming the first file that a checkpoint lacks.

    `key`: the plan's, that names the folder.
    """
    if not folder.is_dir():
        raise UsageError(f"{key}={folder}: no such folder; give the folder of a checkpoint")
    read_json(folder / "config.json")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OSError) as error:
            raise UsageError(f"{index}: not an index of weights: {error}") from None
        others = sorted(name for name in names if not name.endswith(".safetensors"))
        if others:
            raise UsageError(
                f"{index}: names {one_line(others[0], 80)!r}, which is no .safetensors file; fetch "
                "it again"
            )
        missing = sorted(name for name in names if not (folder / name).is_file())
        if missing:
            raise UsageError(
                f"{folder / missing[0]}: missing, {len(missing)} of {len(names)} files of the "
                "checkpoint are; fetch it again"
            )
    elif not any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "*.bin", "*.gguf")):
        raise UsageError(f"{folder / 'model.safetensors'}: missing, and no other weights there")
    if index.is_file() or any(folder.glob("*.safetensors")):
        with understanding(folder):
            read_headers(folder)


def check_tokenizer(folder: Path) -> None:
    """Raise `UsageError` where a target has no tokenizer: its engine would start, then fail."""
    if any((folder / name).is_file() for name in TOKENIZER_FILES) or any(folder.glob("*.gguf")):
        return
    first, *others = TOKENIZER_FILES
    raise UsageError(
        f"{folder / first}: missing, and so is every other file of a tokenizer "
        f"({', '.join(others)}); put the model's tokenizer into the folder"
    )


def own_tokenizer(engine: EngineSection, variants: Sequence[Variant]) -> str | None:
    """The argument by which each variant is given a tokenizer from elsewhere, or is to have none.

    None where one of them is left with the target's own.
    """
    given = [
        next((word for word in arguments if _names_tokenizer(word)), None)
        for variant in variants
        for arguments in [(*flag_arguments(engine.flags, variant), *engine.extra_args)]
    ]
    return None if None in given else given[0]


def _names_tokenizer(word: str) -> bool:
    return word.partition("=")[0].replace("_", "-") in OWN_TOKENIZER


@contextmanager
def understanding(*folders: Path) -> Iterator[None]:
    """What a reader stumbles over in the files of `folders` is told as the user's mistake."""
    try:
        yield
    except (
        *(AttributeError, LookupError, TypeError, ValueError),
        *(ArithmeticError, RecursionError, OSError),
    ) as error:
        said = f"{type(error).__name__}: {error}"
        if isinstance(error, KeyError):
            said = f"the key {error} is missing"
        raise UsageError(
            f"{' or '.join(map(str, folders))}: not a checkpoint that can be understood "
            f"({said[:200]}); fetch it again"
        ) from error


def demo_pair(plan: Plan) -> Path:
    """The demo pair's folder, made first where it is not there yet (minutes, with progress).

    Its maker does not outlive this process, however that ends.
    """
    command = [sys.executable, "-m", "training", "demo"]
    command += ["--target", plan.demo.target, "--drafter", plan.demo.drafter]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=False, preexec_fn=die_with_parent
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode == 130:
        raise KeyboardInterrupt
    if done.returncode != 0 or not lines:
        raise EngineFailure(
            f"the demo pair could not be made: `python -m training demo --target "
            f"{plan.demo.target} --drafter {plan.demo.drafter}` ended with {done.returncode}"
        )
    return Path(lines[-1])


def api_key(plan: Plan) -> str | None:
    """The key for attached servers, from the environment variable the plan names."""
    name = plan.engine.api_key_env
    if name is None:
        return None
    key = os.environ.get(name, "").strip()
    if not key:
        raise UsageError(f"engine.api_key_env: the environment has no variable {name}")
    if not (key.isascii() and key.isprintable()):
        raise UsageError(f"engine.api_key_env: {name} holds characters that no key can have")
    return key
