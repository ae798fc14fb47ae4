"""A small program in the place of the harness: it leaves a run's folder in a moment.

What the night and the bisection do with processes, folders, git and signals is real; only the
engine's figures are made. `behave.json` beside it says how it behaves: `speed` in tokens/s,
`noise`, `exit`, `sleep` seconds before the figures, `ends_with` a file without which it does not
end when it is asked to, `void`; under `entries`, by the value of `seed`, what is otherwise.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import msgspec
from report_run import C1, cell, manifest, metrics, summary

from harness.plan.schema import Plan, as_dict

SCRIPT = """
import json, random, secrets, signal, sys, time
from datetime import datetime, timezone
from pathlib import Path

here = Path(__file__).resolve().parents[1]
arguments = sys.argv[1:]
behave = json.loads((here / "behave.json").read_text())
template = json.loads((here / "template.json").read_text())
now = datetime.now(timezone.utc)
if arguments[0] == "resume":
    folder = Path(arguments[1])
    asked = json.loads((folder / "manifest.json").read_text())["command"][3:]
else:
    asked = arguments
    out = Path(arguments[arguments.index("--out") + 1])
    folder = out / f"{now:%Y%m%d-%H%M%S}-stand-in-{secrets.token_hex(2)}"
    folder.mkdir(parents=True)
if arguments[0] == "resume" and behave.get("refuse"):
    print("harness: cannot go on with it, git commit was a and is b", file=sys.stderr)
    sys.exit(2)
seed = next((a.partition("=")[2] for a in asked if a.startswith("seed=")), "")
behave = {**behave, **behave.get("entries", {}).get(seed, {})}
calls = here / "calls.txt"
with calls.open("a") as file:
    file.write(f"{arguments[0]} {seed}\\n")
random.seed(f"{here.name} {seed} {calls.read_text()}")
manifest, summary = template["manifest"], template["summary"]
manifest.update(command=["python", "-m", "harness", *asked], run_id=folder.name)
manifest.update(created=now.isoformat(timespec="seconds"), **behave.get("manifest", {}))
summary["run_id"] = folder.name
(folder / "manifest.json").write_text(json.dumps(manifest))
print(f"[   0.0 s] writing to {folder}", file=sys.stderr, flush=True)
def end(*_):
    while "ends_with" in behave and not Path(behave["ends_with"]).exists():
        time.sleep(0.02)
    (folder / "ended").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, end)
time.sleep(behave.get("sleep", 0))
for cell in summary["cells"]:
    gain = 1.5 if cell["variant"] == "speculative" else 1.0
    level = behave["speed"] * gain * random.gauss(1, behave.get("noise", 0.002))
    cell["metrics"]["output_tokens_per_s"] = level
if behave.get("void"):
    summary["void"] = "the server sent no tokens"
if behave.get("exit", 0) in (0, 4):
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "report.html").write_text("<p>the run")
    print(folder)
else:
    print("harness: the engine fell over", file=sys.stderr)
sys.exit(behave.get("exit", 0))
"""


def template() -> dict[str, Any]:
    """A run of three starts of each variant, as its two files hold it."""
    cells = tuple(
        cell(v, r, figures=metrics(50.0)) for r in range(3) for v in ("baseline", "speculative")
    )
    told = summary(cells=cells, comparisons=(), cautions=())
    plan = {
        "engines": {"reference": as_dict(Plan())},
        "models": {"reference": {"target": "/m/target", "drafter": "/m/drafter"}},
    }
    made = manifest(told, plan=plan, environment={}, versions={"torch": "2.13.0"}, cells=())
    assert cells[0].load == C1
    return json.loads(msgspec.json.encode({"summary": told, "manifest": made}))


def stand_in(root: Path, **behave: Any) -> Path:
    """A folder that `python -m harness` can be called in."""
    (root / "harness").mkdir(parents=True, exist_ok=True)
    (root / "harness" / "__init__.py").write_text("")
    (root / "harness" / "__main__.py").write_text(SCRIPT)
    (root / "template.json").write_text(json.dumps(template()))
    set_behaviour(root, **behave)
    return root


def set_behaviour(root: Path, **behave: Any) -> None:
    """How the next runs behave."""
    (root / "behave.json").write_text(json.dumps({"speed": 100.0, **behave}))


def calls(root: Path) -> list[str]:
    """What was called so far: run or resume, and the seed."""
    path = root / "calls.txt"
    return path.read_text().splitlines() if path.exists() else []


def git(root: Path, *arguments: str) -> str:
    """git, as nobody in particular."""
    name = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", "-C", str(root), *name, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def history(root: Path, behaviours: list[dict[str, Any]]) -> list[str]:
    """A repository with a commit for each behaviour; their hashes, the oldest first."""
    stand_in(root)
    git(root, "init", "-q", "-b", "main")
    (root / ".gitignore").write_text("calls.txt\n")
    found = []
    for number, behave in enumerate(behaviours):
        set_behaviour(root, **behave)
        (root / "number.txt").write_text(str(number))
        git(root, "add", "-A")
        git(root, "commit", "-q", "-m", f"change {number}")
        found.append(git(root, "rev-parse", "HEAD"))
    return found
