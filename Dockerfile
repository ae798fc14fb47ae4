# The harness on a machine without GPUs: `docker build -t spec-harness .`, then
#   docker run --rm -v "$PWD/results:/app/results" spec-harness run
# For GPUs start from the engine's own image and install the harness beside it in its own
# environment (docs/eight-gpus.md).
FROM python:3.11-slim

RUN apt-get update \
    && apt-get install --yes --no-install-recommends make gcc g++ libnuma1 git \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /app
COPY pyproject.toml Makefile README.md LICENSE ./
COPY constraints constraints
COPY harness harness
COPY engines engines
COPY drafters drafters
COPY training training
COPY results/README.md results/README.md
RUN make .venv/installed

ENTRYPOINT [".venv/bin/python", "-m", "harness"]
CMD ["run"]
