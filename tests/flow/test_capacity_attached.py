"""`python -m harness capacity` against running servers of known capacity."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from attached import REPO, Start, harness, measured

QUICK = ["--seconds", "1", "--attain", "0.7", "--resolution", "1"]
QUICK += ["--set", "load.warmup_requests=1"]
TWO_AT_ONCE = ("--slots", "2", "--step-ms", "20")


@measured
def test_both_capacities_are_bracketed_and_can_be_computed_again(
    start: Start, tmp_path: Path
) -> None:
    # Two at once, 12 steps of 10 ms: 16 requests/s at most; with three tokens a step 40.
    urls = [f"baseline={start('--slots', '2', '--step-ms', '10')}"]
    urls += [f"speculative={start('--slots', '2', '--step-ms', '10', '--drafts', '3')}"]
    options = [word for url in urls for word in ("--url", url)]
    done = harness(
        "capacity", *options, *QUICK, "--slo", "ttft=100ms", "--start", "10", "--out", str(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip().splitlines()[-1])
    found = json.loads((folder / "capacity.json").read_text())
    base, spec = found["variants"]
    assert base["lowest_missed"] is not None
    assert (base["highest_met"] or 0) < 24  # short blocks may outlive a slight overload
    assert spec["highest_met"] > (base["highest_met"] or 0)
    assert "held up to" in done.stdout
    for name in ("plots/frontier.svg", "plots/attainment.svg", "report.html", "summary.json"):
        assert (folder / name).stat().st_size > 0
    assert "once more" in done.stderr or "met the levels" in done.stderr

    answer = (folder / "capacity.json").read_bytes()
    (folder / "capacity.json").unlink()
    again = harness("analyse", str(folder))
    assert again.returncode == 0, again.stderr
    assert (folder / "capacity.json").read_bytes() == answer
    (folder / "capacity.json").unlink()
    resumed = harness("resume", str(folder))
    assert resumed.returncode == 0, resumed.stderr
    assert (folder / "capacity.json").read_bytes() == answer


@measured
def test_a_concurrency_is_found(start: Start, tmp_path: Path) -> None:
    # Two at once: a third under way waits for a whole answer, 240 ms.
    done = harness(
        "capacity", "--url", start(*TWO_AT_ONCE), *QUICK, "--by", "concurrency",
        "--slo", "ttft=120ms", "--out", str(tmp_path), "--most", "8", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["variants"]
    assert found["highest_met"] == 2
    assert found["lowest_missed"] in (3, 4)
    assert Path(done.stderr.strip().splitlines()[-1]).is_dir()


@measured
def test_a_load_that_the_server_refuses_is_missed(start: Start, tmp_path: Path) -> None:
    server = start("--refuse-above", "2", "--step-ms", "40")
    done = harness(
        "capacity", "--url", server, *QUICK, "--resolution", "0.1", "--by", "concurrency",
        "--start", "2", "--most", "8", "--slo", "ttft=5", "--out", str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip().splitlines()[-1])
    (found,) = json.loads((folder / "capacity.json").read_text())["variants"]
    assert (found["highest_met"], found["lowest_missed"]) == (2, 3)


@measured
def test_a_search_that_is_cut_short_goes_on_from_its_looks(start: Start, tmp_path: Path) -> None:
    options = ["--url", start(*TWO_AT_ONCE), *QUICK, "--by", "concurrency", "--most", "8"]
    process = subprocess.Popen(
        [sys.executable, "-m", "harness", "capacity", *options, "--slo", "ttft=120ms",
         "--out", str(tmp_path / "out")],
        cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if "met the levels" in line:
            process.send_signal(signal.SIGINT)
            break
    told, complaint = process.communicate(timeout=300)
    assert process.returncode == 130, complaint
    assert "harness resume" in complaint
    folder = Path(told.strip().splitlines()[-1])
    (before,) = json.loads((folder / "capacity.json").read_text())["variants"]
    kept = {c: (folder / "cells" / c / "requests.parquet").read_bytes()
            for p in before["probes"] for c in p["cells"]}  # fmt: skip
    assert kept
    assert before["finished"] is False
    assert "The search was cut short" in told
    assert "The search was cut short" in (folder / "report.html").read_text()
    done = harness("resume", str(folder))
    assert done.returncode == 0, done.stderr
    (after,) = json.loads((folder / "capacity.json").read_text())["variants"]
    assert after["highest_met"] == 2
    assert after["finished"] is True
    assert "cut short" not in done.stdout
    assert len(after["probes"]) > len(before["probes"])
    for name, data in kept.items():
        assert (folder / "cells" / name / "requests.parquet").read_bytes() == data


@measured
def test_a_damaged_look_is_measured_anew_and_counted_once(start: Start, tmp_path: Path) -> None:
    options = ["--url", start("--slots", "2"), *QUICK, "--by", "concurrency", "--most", "2"]
    done = harness("capacity", *options, "--slo", "ttft=5", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip().splitlines()[-1])
    (before,) = json.loads((folder / "capacity.json").read_text())["variants"]
    names = before["probes"][-1]["cells"]
    for name in names:
        (folder / "cells" / name / "requests.parquet").write_bytes(b"torn")
    stuck = harness("analyse", str(folder))
    assert stuck.returncode == 2
    assert "harness resume` measures the cell anew" in stuck.stderr
    again = harness("resume", str(folder))
    assert again.returncode == 0, again.stderr
    assert all(f"{name}: its files cannot be read" in again.stderr for name in names)
    (after,) = json.loads((folder / "capacity.json").read_text())["variants"]
    assert after["highest_met"] == before["highest_met"] == 2
    assert after["probes"][-1]["cells"][0] == names[0]
    assert all(len(p["cells"]) == len(set(p["cells"])) for p in after["probes"])
    manifest = json.loads((folder / "manifest.json").read_text())
    named = [c["cell_id"] for c in manifest["cells"]]
    assert len(named) == len(set(named))
    assert any((folder / "cells").glob(f".{names[0]}-damaged-*/requests.parquet"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "no service level is set; give --slo"),
        (["--slo", "speed=1"], "no level 'speed'"),
        (["--slo", "ttft=1", "--by", "users"], "give rate or concurrency"),
        (["--slo", "ttft=1", "--attain", "2"], "--attain 2"),
    ],
)
def test_a_slip_is_one_line_and_nothing_is_written(
    start: Start, tmp_path: Path, options: list[str], said: str
) -> None:
    out = tmp_path / "results"
    done = harness("capacity", "--url", start(), "--out", str(out), *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not out.exists()


def test_a_server_that_refuses_everything_fails_the_search(start: Start, tmp_path: Path) -> None:
    done = harness("capacity", "--url", start("--refuse", "503"), "--slo", "ttft=1",
                   "--variants", "baseline", "--out", str(tmp_path))  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert "warm-up" in done.stderr
