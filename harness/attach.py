"""Servers that run already: who answers, which model, and does it speculate?"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from engines.base import Adapter
from engines.catalog import adapter as adapter_named
from harness.choose import choose_profile
from harness.errors import UsageError, one_line
from harness.load.prompts.choose import surely_fits
from harness.load.prompts.datasets import Prompt
from harness.load.streaming.origin import Origin
from harness.load.streaming.plain import plain_client
from harness.load.streaming.pool import check_client
from harness.measure.counters import CounterReader
from harness.measure.fetch import FetchError, fetch
from harness.plan.expand import expand, load_points
from harness.plan.load import build
from harness.plan.schema import Plan
from harness.prepare import (
    Prepared,
    Request,
    api_key,
    demo_pair,
    prepare,
    prompts_for,
)
from harness.records import VARIANTS, Variant
from harness.serving import AttachedServer, asking, warm_up

OWNERS = {"vllm": "vllm", "sglang": "sglang", "spec-harness": "reference"}
"""The engines by whom they name as a model's owner in `/v1/models`."""


def prepare_all(request: Request) -> list[Prepared]:
    """Every engine that is asked for, each once: to be started, or running already."""
    make_ready = prepare_attached if request.urls else prepare
    return [make_ready(request, name) for name in dict.fromkeys(request.engines)]


def prepare_attached(request: Request, name: str) -> Prepared:
    """Make ready servers that run already, and find out what they are.

    Raises `UsageError` where one does not answer, `EngineFailed` where it answers no request.
    """
    adapter = adapter_named(name)
    source, why = choose_profile(request, name)
    plan = build(source, name, list(request.sets))
    load_points(plan.load)
    check_client(plan.client)
    if plan.speculative.forced_length is not None:
        raise UsageError(
            "speculative.forced_length: a running server cannot be told how much to accept; let "
            "the harness start the engine"
        )
    roots = {
        label: ",".join(origin.root for origin in Origin.several(url))
        for label, url in request.urls.items()
    }
    replicas = {root: label for label, urls in roots.items() for root in urls.split(",")}
    served = {root: served_model(root, plan) for root in replicas}
    models = {replicas[root]: one.name for root, one in served.items()}
    if len({one.name for one in served.values()}) > 1:
        told = ", ".join(f"{replicas[root] or root} {one.name}" for root, one in served.items())
        raise UsageError(
            f"--url: the servers serve different models ({told}); set target.served_name"
        )
    pair = demo_pair(plan) if plan.workload.dataset == "demo" else None
    prompts, notes = fitting_prompts(plan, pair, [one.context for one in served.values()])
    label, variant_known = None, True
    if "" in roots:
        given = request.variants[0] if request.variants and len(request.variants) == 1 else None
        found, label = label_server(adapter, roots[""], models[""], plan, prompts, given=given)
        variant, variant_known = found or "baseline", found is not None
        roots = {variant: roots[""]}
    variants = tuple(v for v in VARIANTS if v in roots)
    return Prepared(
        name=name,
        adapter=adapter,
        plan=plan,
        why=why,
        target=None,
        drafter=None,
        urls=roots,
        prompts=prompts,
        cells=expand(plan, name, variants, attached=True),
        model=next(iter(models.values())),
        label=label,
        variant_known=variant_known,
        notes=notes,
    )


def served_by(request: Request, root: str) -> str | None:
    """The engine that answers at `root`, by its own word; None: it names none of ours.

    Raises `UsageError` where nothing fitting answers.
    """
    source, _ = choose_profile(request, "openai")
    plan = build(source, "openai", list(request.sets))
    check_client(plan.client)
    return served_model(root, plan).engine


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """The model a server serves, its longest context in tokens and its engine (`OWNERS`).

    None: it does not say.
    """

    name: str
    context: int | None = None
    engine: str | None = None


def fitting_prompts(
    plan: Plan, pair: Path | None, contexts: list[int | None]
) -> tuple[list[Prompt], tuple[str, ...]]:
    """The prompts that fit the servers' `contexts`, and what is to be told of those left out.

    `engine.max_model_len` wins over what the servers say. Without the target's tokenizer built-in
    prompts are left out unless their bytes alone show that they fit. Raises `UsageError`.
    """
    told = [context for context in contexts if context is not None]
    context = plan.engine.max_model_len or min(told, default=None)
    prompts = prompts_for(_in_context(plan, context), pair, attached=True)
    if plan.workload.dataset != "builtin" or context is None:
        return prompts, ()
    exact = plan.target.path is not None
    every = len(prompts)
    if exact:
        every = len(prompts_for(_in_context(plan, None), pair, attached=True))
    else:
        prompts = [prompt for prompt in prompts if surely_fits(prompt, context)]
    if not prompts:
        raise UsageError(
            f"workload.dataset=builtin: no prompt is sure to fit the server's context of {context} "
            "tokens; set target.path to have them counted, or give prompts of your own"
        )
    if len(prompts) == every:
        return prompts, ()
    how = "" if exact else " by a safe estimate (target.path makes it exact)"
    return prompts, (
        f"{every - len(prompts)} of {every} built-in prompts are left out: too long for the "
        f"server's context of {context} tokens{how}",
    )


def _in_context(plan: Plan, context: int | None) -> Plan:
    engine = msgspec.structs.replace(plan.engine, max_model_len=context)
    return msgspec.structs.replace(plan, engine=engine)


def served_model(root: str, plan: Plan) -> Served:
    """What a running server serves. Raises `UsageError` where nothing fitting answers."""
    try:
        with plain_client(root, plan.client, api_key(plan)) as client:
            status, body = fetch(client, f"{root}/v1/models", deadline_s=10.0)
    except FetchError as error:
        if "certificate" in str(error).lower():
            raise UsageError(
                f"--url {root}: its certificate is not trusted ({_in_words(error)}); "
                "set client.ca_file, or client.verify_tls=false"
            ) from None
        raise UsageError(
            f"--url {root}: nothing answers there ({_in_words(error)}); is the server running?"
        ) from None
    if status in (401, 403):
        raise UsageError(
            f"--url {root}: answers {status}; name the variable that holds the key "
            "with --set engine.api_key_env=NAME"
        )
    models = served_models(body)
    names = [model.name for model in models]
    if status != 200 or not names:
        raise UsageError(
            f"--url {root}: /v1/models answers {status} and no model; "
            "is it an OpenAI-compatible server?"
        )
    wanted = plan.target.served_name
    if wanted is not None and wanted not in names:
        raise UsageError(f"--url {root}: serves {', '.join(names)}, not {wanted}")
    return models[0 if wanted is None else names.index(wanted)]


class _Model(msgspec.Struct):
    id: str
    max_model_len: Any = None
    owned_by: Any = None


class _Models(msgspec.Struct):
    data: list[_Model]


def served_models(body: bytes) -> list[Served]:
    """The models in an answer of `/v1/models`; none where it is no such answer."""
    try:
        models = msgspec.json.decode(body, type=_Models).data
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []
    return [
        Served(
            name=model.id,
            context=_context(model.max_model_len),
            engine=OWNERS.get(str(model.owned_by)),
        )
        for model in models
        if model.id and model.id.isprintable() and len(model.id) <= 1000
    ]


def _context(said: object) -> int | None:
    return said if type(said) is int and 0 < said <= 10**9 else None


def _in_words(error: Exception) -> str:
    return one_line(re.sub(r"^\[errno -?\d+\] ", "", str(error).lower()), 160)


def label_server(
    adapter: Adapter,
    url: str,
    model: str,
    plan: Plan,
    prompts: list[Prompt],
    *,
    given: Variant | None,
) -> tuple[Variant | None, str]:
    """Which variant an attached server is, and how that was found out; None: it was not.

    Asks one request and looks whether the server counted drafts for it.
    """
    if given is not None:
        return given, f"{given}, as --variants says"
    first = url.partition(",")[0]  # the one request that is asked goes to the first replica
    reader = CounterReader(adapter, first, plain_client(first, plan.client, api_key(plan)))
    try:
        before = reader.read()
        warm_up(
            asking(adapter, url, model, plan, speculative=True),
            tuple(prompts[:1]),
            [],
            AttachedServer(url, plan.client),
        )
        after, _ = reader.settled()
    finally:
        reader.close()
    if after is None:
        return None, (
            "the server publishes no counters, so it cannot be told whether it speculates; "
            "it is called baseline"
        )
    if (after.drafts or 0) > ((before.drafts if before else None) or 0):
        return "speculative", "speculative: its counters count drafts"
    return "baseline", "baseline: its counters count no draft"
