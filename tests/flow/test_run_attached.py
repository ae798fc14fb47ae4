"""The whole command line against servers that run already: the good case and the faults."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from attached import REPO, Start, harness, measured

QUICK = ["--set", "load.num_requests=4", "--set", "load.concurrency=1,2", "--set"]
QUICK += ["load.warmup_requests=1", "--set", "compare.blocks=3"]
# On a machine that does something else besides, figures may be void: they are not what is tested.
QUICK += ["--set", "load.allow_client_bound=true"]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    right = " ".join(str(i) for i in range(12))
    rows = [{"id": f"p{i}", "prompt": f"say {i}", "answer": right} for i in range(40)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def run_against(
    tmp_path: Path, prompts: Path, urls: list[str], *more: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any], Path]:
    arguments = ["run", "--out", str(tmp_path / "results"), *QUICK]
    arguments += ["--set", f"workload.dataset={prompts}", *more]
    for url in urls:
        arguments += ["--url", url]
    done = harness(*arguments)
    lines = done.stdout.strip().splitlines()
    assert lines, done.stderr
    folder = Path(lines[-1])
    return done, json.loads((folder / "summary.json").read_text()), folder


@measured
def test_two_servers_are_compared(start: Start, prompts: Path, tmp_path: Path) -> None:
    slow, fast = start("--step-ms", "20"), start("--drafts", "3", "--step-ms", "20")
    done, summary, folder = run_against(
        tmp_path, prompts, [f"baseline={slow}/v1", f"speculative={fast}"]
    )
    assert done.returncode == 0, done.stderr
    assert len(summary["cells"]) == 12
    order = [c["variant"][0] for c in summary["cells"] if c["load"]["concurrency"] == 1]
    assert "".join(order) == "bssbbs"
    speculative = next(c for c in summary["cells"] if c["variant"] == "speculative")
    # Each answer: 1 token, then steps of 3, 3, 3 and a last one cut to 2.
    acceptance = speculative["acceptance"]
    assert acceptance["source"] == "counters"
    assert (acceptance["drafts"], acceptance["accepted"]) == (16, 32)
    assert acceptance["per_position"] == [1.0, 1.0, 0.0]
    assert acceptance["sources"]["client"]["accepted"] == 28
    assert speculative["integrity"]["identical"] == 4
    assert speculative["metrics"]["task_accuracy"] == 1.0
    speeds = [c for c in summary["comparisons"] if c["metric"] == "output_tokens_per_s"]
    assert len(speeds) == 2
    assert all(c["ratio"] > 1 and c["pairs"] == 3 for c in speeds)
    for name in ("manifest.json", "report.html"):
        assert (folder / name).stat().st_size > 0
    lies = {c["code"] for cell in summary["cells"] for c in cell["cautions"]}
    assert not lies & {kind for _, _, _, kind, _ in LIES}
    assert "acceptance_sources_disagree" not in lies
    profile = json.loads((folder / "speculation_profile.json").read_text())
    assert profile["num_speculative_tokens"] == 3
    assert profile["marginal_accept_rates"] == [1.0, 1.0, 0.0]
    for cell in summary["cells"]:
        assert (folder / "cells" / cell["cell_id"] / "requests.parquet").exists()
    assert "tok" in done.stdout
    assert "concurrency 2" in done.stderr


# 1 request of the warm-up, then cells of 4: at concurrency 1 requests 2 to 5, at 2 requests 6 to 9.
LIES = [
    (
        "rank-missing",
        4,
        0,
        "counters_rank_missing",
        "1 of 2 ranks read before the load are missing",
    ),
    (
        "rank-missing",
        4,
        1,
        "counters_short",
        "server counted 24 output tokens in the window, but 48",
    ),
    ("reset", 8, 1, "counters_reset", "ran backwards, from 20 to 8"),
    ("other-traffic", 1, 0, "other_traffic", "8 finished requests, this client sent 4"),
    ("bonus", 1, 0, "counters_count_bonus", "48 draft tokens are told as accepted in 16 drafts"),
    ("scrape-fails", 4, 0, "counters_unread", "after the load (HTTP 500)"),
]


@pytest.mark.parametrize(("lie", "begin", "at", "code", "said"), LIES)
def test_counters_that_lie_are_caught(
    lie: str, begin: int, at: int, code: str, said: str,
    start: Start, prompts: Path, tmp_path: Path,
) -> None:  # fmt: skip
    url = start("--drafts", "3", "--lie", lie, "--lie-from", str(begin))
    more = ["--variants", "speculative", "--set", "compare.blocks=1"]
    done, summary, _ = run_against(tmp_path, prompts, [url], *more)
    assert done.returncode == 0, done.stderr
    found = {c["code"]: c["text"] for c in summary["cells"][at]["cautions"]}
    kinds = {kind for _, _, _, kind, _ in LIES}
    assert kinds & set(found) == {code}, found
    assert said in found[code]
    assert summary["cells"][at]["acceptance"]["source"] == "client"


def test_a_precision_adds_turns_until_it_is_reached_or_may_not(
    start: Start, prompts: Path, tmp_path: Path
) -> None:
    urls = [f"baseline={start()}", f"speculative={start('--drafts', '3')}"]
    more = ["--precision", "0.2%", "--set", "compare.blocks=1", "--set", "compare.max_launches=5"]
    done, summary, folder = run_against(tmp_path, prompts, urls, *more)
    assert done.returncode == 0, done.stderr
    speeds = [c for c in summary["comparisons"] if c["metric"] == "output_tokens_per_s"]
    turns = speeds[0]["pairs"]
    assert 3 <= turns <= 5
    widths = [(c["ci_high"] / c["ci_low"]) ** 0.5 - 1 for c in speeds]
    reached = max(widths) <= 0.002
    assert reached or turns == 5
    cautioned = "precision_not_reached" in [c["code"] for c in summary["cautions"]]
    assert cautioned is not reached
    manifest = json.loads((folder / "manifest.json").read_text())
    assert len(manifest["cells"]) == len(summary["cells"]) == 4 * turns
    assert "starts of each" in done.stderr
    again = harness("resume", str(folder))
    assert again.returncode == 0, again.stderr
    assert "0 of" in again.stderr
    assert json.loads((folder / "manifest.json").read_text()) == manifest


def test_a_wrong_token_is_found(start: Start, prompts: Path, tmp_path: Path) -> None:
    fast = start("--drafts", "3", "--wrong-every", "4")
    done, summary, _ = run_against(
        tmp_path, prompts, [f"baseline={start()}", f"speculative={fast}"]
    )
    assert done.returncode == 4, done.stderr
    diverged = [c["integrity"]["diverged"] for c in summary["cells"] if c["integrity"]]
    assert sum(diverged) > 0
    assert {"outputs_diverged", "not_lossless"} <= {c["code"] for c in summary["cautions"]}
    first = next(c for c in summary["cells"] if c["integrity"] and c["integrity"]["diverged"])
    shown = first["integrity"]["first_divergence"][0]
    assert (shown["position"], shown["baseline"], shown["candidate"]) == (5, 5, 99)
    assert shown["gap"] == pytest.approx(8.3)
    assert first["integrity"]["errors"] == first["integrity"]["diverged"]
    assert "output broken" in summary["void"]
    assert all(c["verdict"] == "undecided" for c in summary["comparisons"])


def test_a_wrong_token_in_every_200th_verification_is_found(
    start: Start, prompts: Path, tmp_path: Path
) -> None:
    fast = start("--drafts", "3", "--wrong-step", "200", "--step-ms", "1")
    done, summary, _ = run_against(
        tmp_path, prompts, [f"baseline={start('--step-ms', '1')}", f"speculative={fast}"],
        *("--set", "load.num_requests=16"),
    )  # fmt: skip
    assert done.returncode == 4, done.stderr
    (found,) = summary["integrity"]
    assert found["compared"] == 96
    assert 1 <= found["diverged"] <= 3
    assert found["errors"] == found["diverged"]
    assert found["floor_compared"] >= 16 <= found["floor_loads_compared"]
    assert found["floor_diverged"] == found["floor_loads_diverged"] == 0
    assert "output broken" in summary["void"]


def test_near_ties_are_no_errors(start: Start, prompts: Path, tmp_path: Path) -> None:
    urls = [f"baseline={start('--tie')}"]
    urls += [f"speculative={start('--drafts', '3', '--wrong-every', '4', '--tie')}"]
    done, summary, folder = run_against(tmp_path, prompts, urls)
    assert done.returncode == 0, done.stderr
    (found,) = summary["integrity"]
    assert found["diverged"] > 0
    assert (found["near_tie"], found["errors"]) == (found["diverged"], 0)
    assert "not_lossless" not in [c["code"] for c in summary["cautions"]]
    assert "of them near ties" in done.stdout or "of them a near tie" in done.stdout
    before = (folder / "summary.json").read_bytes()
    assert harness("analyse", str(folder)).returncode == 0
    assert (folder / "summary.json").read_bytes() == before


def test_a_server_without_log_probabilities_leaves_near_ties_unknown(
    start: Start, prompts: Path, tmp_path: Path
) -> None:
    urls = [f"baseline={start('--no-logprobs')}"]
    urls += [f"speculative={start('--drafts', '3', '--wrong-every', '4')}"]
    done, summary, _ = run_against(tmp_path, prompts, urls)
    assert done.returncode == 0, done.stderr
    (found,) = summary["integrity"]
    assert found["diverged"] > 0
    assert found["near_tie"] is found["errors"] is None
    assert "outputs_diverged" in [c["code"] for c in summary["cautions"]]


def test_a_server_of_another_model_is_found(start: Start, prompts: Path, tmp_path: Path) -> None:
    urls = [f"baseline={start()}", f"speculative={start('--drafts', '3', '--shift', '0.3')}"]
    done, summary, _ = run_against(tmp_path, prompts, urls)
    assert done.returncode == 4, done.stderr
    assert "target_differs" in [c["code"] for c in summary["cautions"]]
    (odd,) = summary["parity"]
    assert odd["variant"] == "speculative"
    assert odd["difference"] == pytest.approx(0.3)
    assert "target differs" in summary["void"]


def test_a_loop_is_found_and_its_acceptance_told_apart(
    start: Start, prompts: Path, tmp_path: Path
) -> None:
    loop = ("--loop", "--tokens", "60", "--step-ms", "1")
    urls = [f"baseline={start(*loop)}", f"speculative={start('--drafts', '3', *loop)}"]
    done, summary, _ = run_against(tmp_path, prompts, urls)
    assert done.returncode == 4, done.stderr
    assert "output degenerate" in summary["void"]
    cell = next(c for c in summary["cells"] if c["variant"] == "speculative")
    assert cell["degenerate"]["degenerate"] == cell["degenerate"]["judged"] == 4
    assert cell["degenerate"]["acceptance_degenerate"]["drafts"] > 0
    assert cell["degenerate"]["acceptance_healthy"] is None
    assert "output_degenerate" in [c["code"] for c in summary["cautions"]]


def test_json_puts_the_summary_alone_on_stdout(start: Start, prompts: Path, tmp_path: Path) -> None:
    arguments = ["run", "--out", str(tmp_path), *QUICK, "--set", f"workload.dataset={prompts}"]
    done = harness(*arguments, "--json", "--url", f"speculative={start('--drafts', '3')}")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert {c["variant"] for c in summary["cells"]} == {"speculative"}
    assert summary["comparisons"] == []
    assert Path(done.stderr.strip().splitlines()[-1]).is_dir()


def test_the_servers_context_leaves_long_built_in_prompts_out(start: Start, tmp_path: Path) -> None:
    url = start("--max-model-len", "2048")
    more = ["--set", "load.num_requests=120", "--set", "load.concurrency=16"]
    done, summary, _ = run_against(tmp_path, Path("builtin"), [url], *more)
    assert done.returncode == 0, done.stderr
    assert "openai: 6 of 103 built-in prompts are left out" in done.stderr
    assert "target.path makes it exact" in done.stderr
    assert "; model scripted; " in done.stderr
    assert summary["cells"]


@pytest.mark.parametrize(
    ("options", "variant"), [(("--drafts", "3"), "speculative"), ((), "baseline")]
)
def test_one_server_is_labelled_by_its_counters(
    start: Start, prompts: Path, tmp_path: Path, options: tuple[str, ...], variant: str
) -> None:
    done, summary, _ = run_against(tmp_path, prompts, [start(*options)])
    assert done.returncode == 0, done.stderr
    assert {c["variant"] for c in summary["cells"]} == {variant}
    assert f"the server is {variant}" in done.stderr


def test_a_server_without_counters_cannot_be_told(
    start: Start, prompts: Path, tmp_path: Path
) -> None:
    done, summary, _ = run_against(tmp_path, prompts, [start("--no-metrics", "--drafts", "3")])
    assert done.returncode == 0, done.stderr
    assert "variant_unknown" in [c["code"] for c in summary["cautions"]]


def test_a_server_that_dies_ends_with_3_and_keeps_what_was_done(
    start: Start, prompts: Path, tmp_path: Path
) -> None:
    urls = [f"baseline={start('--die-after', '12')}", f"speculative={start('--drafts', '3')}"]
    done, summary, folder = run_against(tmp_path, prompts, urls)
    assert done.returncode == 3, done.stderr
    states = [c["status"] for c in summary["cells"]]
    assert states.count("ok") == len(states) - 1 >= 2
    dead = next(c for c in summary["cells"] if c["status"] != "ok")
    assert dead["metrics"]["requests_failed"] > 0
    assert summary["failures"]
    (line,) = [text for text in done.stderr.splitlines() if text.startswith("harness:")]
    assert "does not answer any more" in line or "requests in a row failed" in line
    assert "Traceback" not in done.stderr
    assert (folder / "report.html").exists()


def test_a_server_that_refuses_everything_ends_with_3_before_measuring(
    start: Start, prompts: Path, tmp_path: Path
) -> None:
    urls = [f"baseline={start('--refuse', '500')}", f"speculative={start()}"]
    done, summary, _ = run_against(tmp_path, prompts, urls)
    assert done.returncode == 3
    assert "HTTP 500: refused" in done.stderr
    assert summary["cells"] == []


def test_ctrl_c_keeps_the_finished_cells_and_resume_goes_on(
    start: Start, prompts: Path, tmp_path: Path
) -> None:
    hold = tmp_path / "hold"  # the baseline's second turn does not end while it is there
    hold.touch()
    held = start("--hold", str(hold), "--hold-after", "11")
    urls = [f"baseline={held}", f"speculative={start('--drafts', '3')}"]
    arguments = ["run", "--out", str(tmp_path), *QUICK, "--set", f"workload.dataset={prompts}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "harness", *arguments, "--url", urls[0], "--url", urls[1]],
        cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob("*/cells/[!.]*/timeline.json")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "resume" in err
    hold.unlink()
    folder = Path(out.strip().splitlines()[-1])
    summary = json.loads((folder / "summary.json").read_text())
    kept = {c["cell_id"] for c in summary["cells"]}
    assert 1 <= len(kept) < 12
    stamps = {c: (folder / "cells" / c / "requests.parquet").stat().st_mtime_ns for c in kept}

    done = harness("resume", str(folder))
    assert done.returncode == 0, done.stderr
    summary = json.loads((folder / "summary.json").read_text())
    assert len(summary["cells"]) == 12
    assert f"{12 - len(kept)} of 12 cells are missing" in done.stderr
    for cell, stamp in stamps.items():
        assert (folder / "cells" / cell / "requests.parquet").stat().st_mtime_ns == stamp

    before = (folder / "summary.json").read_bytes()
    again = harness("analyse", str(folder))
    assert again.returncode == 0, again.stderr
    assert (folder / "summary.json").read_bytes() == before
    assert harness("report", str(folder)).stdout.strip() == str(folder / "report.html")


def test_open_loop_tells_the_queueing(start: Start, prompts: Path, tmp_path: Path) -> None:
    done, summary, _ = run_against(
        tmp_path, prompts, [f"baseline={start()}"],
        *("--set", "load.concurrency=none", "--set", "load.request_rate=40"),
        *("--set", "load.num_requests=20", "--set", "compare.blocks=1"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (cell,) = summary["cells"]
    assert cell["load"]["mode"] == "open"
    assert cell["metrics"]["request_rate_achieved"] > 0
    due, sent = cell["metrics"]["ttft_from_due_s"], cell["metrics"]["ttft_s"]
    assert due["mean"] >= sent["mean"]


def test_replicas_share_the_load_and_their_counters_are_summed(
    start: Start, prompts: Path, tmp_path: Path
) -> None:
    first, second = start("--drafts", "3"), start("--drafts", "3")
    done, summary, folder = run_against(
        tmp_path, prompts, [f"speculative={first},{second}/v1"], "--set", "load.concurrency=2"
    )
    assert done.returncode == 0, done.stderr
    for cell in summary["cells"]:
        assert cell["status"] == "ok"
        acceptance = cell["acceptance"]
        assert acceptance["source"] == "counters"
        assert (acceptance["drafts"], acceptance["accepted"]) == (16, 32)  # as of one server
        counters = json.loads((folder / "cells" / cell["cell_id"] / "counters.json").read_text())
        grown = [
            after["generation_tokens"] - before["generation_tokens"]
            for before, after in zip(
                counters["before"]["ranks"], counters["after"]["ranks"], strict=True
            )
            if after["rank"] in ("replica=0", "replica=1")
        ]
        assert grown == [24, 24]  # two of four requests each
        assert "acceptance_sources_disagree" not in {c["code"] for c in cell["cautions"]}


def test_replicas_of_different_models_or_a_missing_one_are_told(
    start: Start, prompts: Path, tmp_path: Path
) -> None:
    one = start()
    for other, said in ((one, "names a replica twice"), ("http://127.0.0.1:9", "nothing answers")):
        done = harness("run", "--url", f"{one},{other}", "--out", str(tmp_path))
        assert done.returncode == 2
        assert said in done.stderr.strip().splitlines()[-1]
    assert not list(tmp_path.glob("*openai*"))
