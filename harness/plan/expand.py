"""From a plan to the ordered list of cells: interleaved launches, blocks, loads, seeds."""

from __future__ import annotations

import math

from harness.plan.points import load_label
from harness.plan.points import load_points as load_points
from harness.plan.schema import CompareSection, Plan
from harness.records import Cell, LoadPoint, Variant

FEWEST_TURNS = 3
"""With a precision: of each variant, before the first look at it."""


def variant_order(variants: tuple[Variant, ...], repeat: int) -> tuple[Variant, ...]:
    """ABBA: every other repeat runs the variants the other way round, so that drift cancels."""
    return variants if repeat % 2 == 0 else tuple(reversed(variants))


def first_launches(compare: CompareSection, *, attached: bool) -> int:
    """With a precision: launches before the first look. Attached, a launch is `blocks` turns."""
    least = math.ceil(FEWEST_TURNS / compare.blocks) if attached else FEWEST_TURNS
    return max(compare.launches, least)


def expand(plan: Plan, engine: str, variants: tuple[Variant, ...], *, attached: bool) -> list[Cell]:
    """The cells of one engine, in the order they are run.

    A launched engine is started `compare.launches` times for each variant and measures
    `compare.blocks` blocks in each start. Attached servers run already, so that every block is a
    repeat of its own and the repeats alternate between them. Equal (repeat, block, load) share a
    seed across the variants: the same prompts and arrivals.
    """
    points = load_points(plan.load)
    repeats, blocks = plan.compare.launches, plan.compare.blocks
    if plan.compare.precision is not None:
        repeats = first_launches(plan.compare, attached=attached)
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
