"""What is given for deployment, held against linters, schemas and the harness's own plan."""

from __future__ import annotations

import http.server
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from engines.recipes import RECIPES
from harness.plan.load import build, read_profile

yaml = pytest.importorskip("yaml", reason="the test extra is not installed")

REPO = Path(__file__).resolve().parents[2]
DEPLOY = REPO / "docs" / "deploy"
BATCH, JOB = DEPLOY / "slurm.sbatch", DEPLOY / "kubernetes-job.yaml"
COMPOSE, DOCKERFILE = REPO / "docker-compose.yml", REPO / "Dockerfile"


def program(name: str) -> str:
    found = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"{name} is not installed: it comes with the test extra")
    return found


def said_by(*command: str) -> str:
    ran = subprocess.run(command, capture_output=True, text=True, cwd=REPO)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


def test_the_dockerfile_is_clean_and_a_fault_is_found(tmp_path: Path) -> None:
    hadolint = program("hadolint")
    assert said_by(hadolint, str(DOCKERFILE)) == ""
    spoilt = tmp_path / "Dockerfile"
    spoilt.write_text(DOCKERFILE.read_text() + "\nRUN cd /tmp && sudo pip install torch\n")
    assert subprocess.run([hadolint, str(spoilt)], capture_output=True).returncode != 0


def stages() -> dict[str, str]:
    """Each stage's instructions by its name."""
    parts = re.split(r"^FROM ", DOCKERFILE.read_text(), flags=re.M)[1:]
    return {part.split("\n", 1)[0].rpartition(" AS ")[2]: part for part in parts}


def test_every_image_is_pinned_ends_as_a_user_and_says_whether_it_is_well() -> None:
    text = DOCKERFILE.read_text()
    assert "@sha256:" not in text  # no digest has been verified
    for image in re.findall(r"^ARG \w+_IMAGE=(\S+)$", text, re.M):
        assert re.search(r":\d+\.\d+\.\d+", image), image
    found = stages()
    for name in ("harness", "vllm", "sglang"):
        assert "HEALTHCHECK" in found[name]
        assert "LABEL" in found[name]
    for name, part in found.items():
        users = re.findall(r"^USER (\S+)$", part, re.M)
        assert not users or users[-1] == "10001:10001", name
    known = {*found, *re.findall(r"^ARG (\w+_IMAGE)=", text, re.M)}
    for base in re.findall(r"^FROM \$?\{?(\w[\w-]*)\}? AS", text, re.M):
        assert base == "scratch" or base in known
    for name in re.findall(r"engines install (\S+)", text):
        assert name in RECIPES


def health_command(stage: str) -> list[str]:
    """As docker reads it: lines that end with a backslash are joined."""
    text = stages()[stage].replace("\\\n", "")
    (words,) = re.findall(r"^HEALTHCHECK .*?CMD (\[.*\])$", text, re.M)
    command: list[str] = json.loads(words)
    return [sys.executable, *command[1:]]


class Well(http.server.BaseHTTPRequestHandler):
    """Answers that it is well, to whom asks for that."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.mark.parametrize("stage", ["vllm", "sglang"])
def test_an_engines_image_is_asked_where_it_serves(stage: str) -> None:
    here = {name: value for name, value in os.environ.items() if name != "PORT"}

    def asked(**more: str) -> tuple[int, str]:
        ran = subprocess.run(
            health_command(stage), env={**here, **more}, capture_output=True, text=True
        )
        return ran.returncode, ran.stderr

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Well) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]
        assert asked(PORT=str(port)) == (0, "")
        server.shutdown()
    code, said = asked(PORT=str(port))
    assert code != 0 and "refused" in said
    assert "or '8000'" in health_command(stage)[-1]


def copied() -> set[str]:
    harness = stages()["harness"].replace("\\\n", " ")
    lines = re.findall(r"^COPY --chown=\S+ (.*) \S+$", harness, re.M)
    return {word for line in lines for word in line.split()}


def test_the_image_holds_every_package_and_nothing_that_is_not_there() -> None:
    assert copied() >= {"harness", "engines", "drafters", "training", "pyproject.toml", "Makefile"}
    for name in copied():
        assert (REPO / name).exists()


def test_the_batch_file_is_clean() -> None:
    said_by("bash", "-n", str(BATCH))
    said_by(program("shellcheck"), str(BATCH))
    lines = BATCH.read_text().splitlines()
    assert lines[0] == "#!/bin/bash"
    options = [line for line in lines if line.startswith("#SBATCH ")]
    assert all(re.fullmatch(r"#SBATCH --[a-z-]+(=\S+)?", line) for line in options)
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert all(lines.index(line) < first for line in options)  # later ones Slurm does not read


def test_the_manifest_fits_kubernetes_own_schema(tmp_path: Path) -> None:
    validate = program("kubernetes-validate")
    assert "passed" in said_by(validate, "--strict", str(JOB))
    job = yaml.safe_load(JOB.read_text())
    job["spec"]["template"]["spec"]["containers"][0]["resource"] = {}
    spoilt = tmp_path / "job.yaml"
    spoilt.write_text(yaml.safe_dump(job))
    ran = subprocess.run([validate, "--strict", str(spoilt)], capture_output=True)
    assert ran.returncode != 0


def compose() -> dict[str, Any]:
    told: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())
    return told


def test_compose_starts_the_harness_once_the_engine_is_well() -> None:
    services = compose()["services"]
    assert set(services) == {"engine", "harness"}
    assert services["harness"]["depends_on"]["engine"]["condition"] == "service_healthy"
    for service in services.values():
        assert service["build"]["target"] in stages()
    assert services["harness"]["healthcheck"] == {"disable": True}  # nothing beside the load
    command = " ".join(services["engine"]["command"])
    port = re.search(r"--port=(\d+)", command)
    assert port is not None
    assert f"--url=http://engine:{port[1]}" in services["harness"]["command"]
    assert f":{port[1]}/health" in services["engine"]["healthcheck"]["test"][-1]
    (config,) = [w for w in services["engine"]["command"] if w.startswith("--speculative-config=")]
    value = re.sub(r"\$\{K:-(\d)\}", r"\1", config.partition("=")[2])
    assert json.loads(value)["num_speculative_tokens"] == 3


def settings() -> dict[str, list[str]]:
    """The --set items of each file."""
    batch = re.findall(r'--set "?([^"\s]+)"?', BATCH.read_text())
    batch = [re.sub(r"\$\{\w+:-(\w+)\}", r"\1", item) for item in batch]
    args = yaml.safe_load(JOB.read_text())["spec"]["template"]["spec"]["containers"][0]["args"]
    attached = compose()["services"]["harness"]["command"]
    return {
        "model slurm": batch,
        "model kubernetes": [a.partition("--set=")[2] for a in args if a.startswith("--set=")],
        "attach compose": [a.partition("--set=")[2] for a in attached if a.startswith("--set=")],
    }


@pytest.mark.parametrize("name", ["model slurm", "model kubernetes", "attach compose"])
def test_every_setting_is_a_key_of_the_plan(name: str) -> None:
    items = settings()[name]
    assert items
    plan = build(read_profile(name.split()[0]), "vllm", items)
    assert plan.load.concurrency == (1, 8, 32)


def batch_run(tmp_path: Path, script: str, **env: str) -> subprocess.Popen[str]:
    """The batch file as Slurm would run it, with a harness that is a script."""
    fake = tmp_path / ".venv" / "bin" / "python"
    fake.parent.mkdir(parents=True)
    fake.write_text(f"#!/bin/bash\n{script}\n")
    fake.chmod(0o755)
    return subprocess.Popen(
        ["bash", str(BATCH)],
        env={"PATH": os.environ["PATH"], "HARNESS": str(tmp_path), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_the_batch_file_ends_with_the_harness_s_code(tmp_path: Path) -> None:
    job = batch_run(tmp_path, 'echo "told: $*"; exit 4', TARGET="/m/t", DRAFTER="/m/d")
    told, _ = job.communicate(timeout=300)
    assert job.returncode == 4
    assert "told: -m harness run --engine vllm --profile model --set target.path=/m/t" in told


def test_the_batch_file_hands_the_signal_on_and_waits(tmp_path: Path) -> None:
    job = batch_run(
        tmp_path,
        "trap 'sleep 0.3; echo kept; exit 143' TERM; touch begun; while :; do sleep 0.05; done",
        RUN="results/r",
    )
    deadline = time.monotonic() + 300
    while not (tmp_path / "begun").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    job.send_signal(signal.SIGTERM)
    told, _ = job.communicate(timeout=300)
    assert "kept" in told
    assert job.returncode == 143
