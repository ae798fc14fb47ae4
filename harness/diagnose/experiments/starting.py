"""The start of the engine that is diagnosed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from drafters.engines import ENGINES
from engines.base import Adapter, EngineUsageError, ServeSpec
from engines.process import EngineProcess
from harness.errors import one_line


@contextmanager
def started(
    adapter: Adapter,
    spec: ServeSpec,
    place: Path,
    deadline_s: float,
    on_stage: Callable[[str], None],
) -> Iterator[EngineProcess]:
    """The engine's process, started and perhaps not yet ready; its files lie in `place`.

    A drafter that the harness refuses to translate is served as it is: what the engine makes of it
    is what is to be found out. Raises `EngineUsageError`.
    """

    def on_phase(phase: str, elapsed_s: float) -> None:
        on_stage(f"starting {adapter.name}: {phase}")

    def process_of(spec: ServeSpec) -> EngineProcess:
        return EngineProcess(
            adapter,
            spec,
            workdir=place / "work",
            log_path=place / "engine.log",
            deadline_s=deadline_s,
            on_phase=on_phase,
        )

    with ExitStack() as stack:
        process = stack.enter_context(process_of(spec))
        try:
            process.start()
        except EngineUsageError as refused:
            if adapter.name not in ENGINES:
                raise
            on_stage(f"the drafter is served as it is: {one_line(str(refused))}")
            process = stack.enter_context(process_of(replace(spec, as_given=True)))
            process.start()
        yield process
