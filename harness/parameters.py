"""Options of `report`, `capacity` and `calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the plan; repeat it."),
]
RunFolders = Annotated[
    list[Path], typer.Argument(metavar="RUN", help="The folder of a run, or of several.")
]
PageOut = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="Of several runs: where their page is written."),
]
Levels = Annotated[
    list[str] | None,
    typer.Option(
        "--slo",
        metavar="LEVELS",
        help="Service levels, such as ttft=0.2,tpot=50ms. Required, here or in the plan's [slo].",
    ),
]
By = Annotated[str, typer.Option(metavar="rate|concurrency", help="What to search for.")]
Attain = Annotated[float, typer.Option(metavar="SHARE", help="Share that must meet the levels.")]
Confidence = Annotated[float, typer.Option(metavar="SHARE", help="Confidence of the answer.")]
Resolution = Annotated[
    float, typer.Option(metavar="SHARE", help="How close, as a share of the load.")
]
Start = Annotated[float | None, typer.Option(metavar="LOAD", help="The first load. Default: 1.")]
Most = Annotated[
    float | None,
    typer.Option(metavar="LOAD", help="No load above it is tried. Default: 1024 x the start."),
]
Requests = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Requests of a look that count. Default: as few as can show that the share holds.",
    ),
]
Seconds = Annotated[
    float, typer.Option(metavar="S", help="A look at a rate lasts as long or longer.")
]
AnswerJson = Annotated[
    bool, typer.Option("--json", help="Print the answer, capacity.json, not as text.")
]
AnyJson = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print the summary, of a capacity search its answer, as JSON, not as a table.",
    ),
]

Streams = Annotated[str, typer.Option(metavar="N,N…", help="Loads: so many streams at once.")]
RequestsPerStream = Annotated[
    int, typer.Option(min=1, max=10_000, metavar="N", help="Requests of each stream.")
]
Rounds = Annotated[
    int, typer.Option(min=1, max=1000, metavar="N", help="How often each client has each load.")
]
Chunks = Annotated[
    int, typer.Option(min=1, max=100_000, metavar="N", help="Chunks of each answer.")
]
FirstMs = Annotated[float, typer.Option(min=0, max=1e6, metavar="MS", help="To the first chunk.")]
GapMs = Annotated[float, typer.Option(min=0, max=1e6, metavar="MS", help="Between chunks.")]
Tokens = Annotated[str, typer.Option(metavar="N,N…", help="Tokens that the chunks carry in turn.")]
Workers = Annotated[
    int | None,
    typer.Option(
        min=1, max=256, metavar="N", help="Our client's processes. Default: as the load needs."
    ),
]
CalibrationOut = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Write the JSON there as well.")
]
CalibrationJson = Annotated[bool, typer.Option("--json", help="Print JSON, not a table.")]
