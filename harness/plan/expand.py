"""From a plan to the ordered list of cells: interleaved launches, blocks, loads, seeds."""

from __future__ import annotations

from harness.errors import UsageError
from harness.plan.schema import LoadSection, Plan
from harness.records import Cell, LoadPoint, Variant

DEFAULT_REQUESTS = 16
MOST_REQUESTS = 1_000_000


def load_points(load: LoadSection) -> list[LoadPoint]:
    """The loads of the plan in order: closed loop first, then open loop."""
    if load.num_requests is not None and load.duration_s is not None:
        raise UsageError("load: give num_requests or duration_s, not both")
    count = load.num_requests
    if count is None and load.duration_s is None:
        count = DEFAULT_REQUESTS
    concurrencies = load.concurrency
    if concurrencies is None:
        concurrencies = () if load.request_rate else (1,)
    points = [
        LoadPoint(mode="closed", concurrency=c, num_requests=count, duration_s=load.duration_s)
        for c in concurrencies
    ]
    points += [
        LoadPoint(mode="open", request_rate=r, num_requests=count, duration_s=load.duration_s)
        for r in load.request_rate or ()
    ]
    if not points:
        raise UsageError("load: no load point; give load.concurrency or load.request_rate")
    _check_points(points)
    return points


def _check_points(points: list[LoadPoint]) -> None:
    """Raise `UsageError` where two points would be one cell, or one is beyond any machine."""
    labels = [load_label(point) for point in points]
    for point, label in zip(points, labels, strict=True):
        if labels.count(label) > 1:
            key = "concurrency" if point.mode == "closed" else "request_rate"
            raise UsageError(f"load.{key}: {label[1:]} is given twice; give each load point once")
        due = (point.request_rate or 0.0) * (point.duration_s or 0.0)
        if due > MOST_REQUESTS:
            raise UsageError(
                f"load.request_rate: {point.request_rate:g} a second for {point.duration_s:g} s "
                f"are {due:.0f} requests; a cell holds at most {MOST_REQUESTS}"
            )


def load_label(load: LoadPoint) -> str:
    """`c4` for a concurrency of 4, `q2.5` for 2.5 requests per second."""
    if load.mode == "closed":
        return f"c{load.concurrency}"
    return f"q{load.request_rate:g}"


def variant_order(variants: tuple[Variant, ...], repeat: int) -> tuple[Variant, ...]:
    """ABBA: every other repeat runs the variants the other way round, so that drift cancels."""
    return variants if repeat % 2 == 0 else tuple(reversed(variants))


def expand(plan: Plan, engine: str, variants: tuple[Variant, ...], *, attached: bool) -> list[Cell]:
    """The cells of one engine, in the order they are run.

    A launched engine is started `compare.launches` times for each variant and measures
    `compare.blocks` blocks in each start. Attached servers run already, so that every block is a
    turn of its own and the turns alternate between them. Equal (repeat, block, load) share a seed
    across the variants: the same prompts and arrivals.
    """
    points = load_points(plan.load)
    repeats, blocks = plan.compare.launches, plan.compare.blocks
    if attached:
        repeats, blocks = repeats * blocks, 1
    cells: list[Cell] = []
    for repeat in range(repeats):
        for variant in variant_order(variants, repeat):
            for block in range(blocks):
                for i, load in enumerate(points):
                    cells.append(
                        Cell(
                            cell_id=cell_id(
                                engine, variant, load, repeat, block if blocks > 1 else None
                            ),
                            engine=engine,
                            variant=variant,
                            repeat=repeat,
                            block=block,
                            load=load,
                            seed=plan.seed * 1_000_003
                            + (repeat * blocks + block) * len(points)
                            + i,
                        )
                    )
    return cells


def cell_id(engine: str, variant: Variant, load: LoadPoint, repeat: int, block: int | None) -> str:
    """A name that is a folder's name too, for example `vllm-speculative-c4-r0-b1`."""
    tail = "" if block is None else f"-b{block}"
    return f"{engine}-{variant}-{load_label(load)}-r{repeat}{tail}"


def launches_of(cells: list[Cell]) -> list[list[Cell]]:
    """Neighbouring cells that share one start of the engine, grouped in order."""
    groups: list[list[Cell]] = []
    for cell in cells:
        key = (cell.engine, cell.variant, cell.repeat)
        if groups and (groups[-1][0].engine, groups[-1][0].variant, groups[-1][0].repeat) == key:
            groups[-1].append(cell)
        else:
            groups.append([cell])
    return groups
