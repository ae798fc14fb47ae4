"""What an import is: another tool's results, as they are read and as they are kept."""

from __future__ import annotations

from typing import Literal

from harness.history.figures import Figure
from harness.history.records import Point
from harness.records import Record

IMPORT_VERSION = "1.0"
IMPORT = "import.json"
IMPORTED = "imported"
"""The folder below the results' root that holds every import."""

ForeignVariant = Literal["baseline", "speculative"]


class Foreign(Record, frozen=True, kw_only=True):
    """One measurement in another tool's file.

    `created`: ISO text in UTC, None where the file does not say when it was. `variant` None: the
    file does not say whether the server speculated. `run` numbers the file's runs from 0; what has
    the same number was measured in the same run. `model`, `drafter`: their names.
    """

    engine: str
    workload: str
    load: str
    figures: tuple[Figure, ...]
    created: str | None = None
    variant: ForeignVariant | None = None
    model: str | None = None
    drafter: str | None = None
    engine_version: str | None = None
    git_commit: str | None = None
    tool_version: str | None = None
    run: int = 0


class Given(Record, frozen=True, kw_only=True):
    """What the user says of results where their file does not, or says it otherwise."""

    engine: str | None = None
    variant: ForeignVariant | None = None
    workload: str | None = None
    profile: str | None = None
    engine_version: str | None = None
    created: str | None = None


class Import(Record, frozen=True, kw_only=True):
    """`import.json`: one imported file.

    `file` is its name, `sha256` of all its bytes, `size` their number, `original` the name of the
    copy beside `import.json`, None where the file was too large to keep. `created` is when the
    first of its results was measured, `created_from` how that is known: told by the file's content
    or by the user, else the time the file was last changed. `notes`: what was assumed, or left out.
    """

    schema_version: str
    tool: str
    tool_version: str | None
    file: str
    sha256: str
    size: int
    original: str | None
    created: str
    created_from: Literal["content", "user", "file"]
    imported: str
    points: tuple[Point, ...]
    notes: tuple[str, ...] = ()
