# Images of the harness and of the engines. Written with care, checked by hadolint, and not built
# yet on a machine with Docker and GPUs (docs/deploy.md).
#
#   docker build --target harness -t spec-harness .          the harness, for CPUs and as a client
#   docker build --target vllm    -t spec-harness:vllm .     with vLLM for GPUs
#   docker build --target sglang  -t spec-harness:sglang .   with SGLang for GPUs
#   docker build --target sglang-sm120 -t spec-harness:sglang-sm120 \
#       --build-context sgl-kernel-source=/path/to/sglang .  with kernels built for 12.0a
#
# Tags are pinned to a patch release. No digest is given: none has been verified here.

ARG PYTHON_IMAGE=python:3.11.13-slim-bookworm
ARG CUDA_IMAGE=nvidia/cuda:13.0.1-devel-ubuntu24.04

# ---- the harness alone ------------------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS harness

LABEL org.opencontainers.image.title="spec-harness" \
      org.opencontainers.image.description="Is this drafter worth shipping? The harness." \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0"

# Versions of Debian's packages are those of the image's own release.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends make gcc g++ libnuma1 git openssh-client \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 harness \
    && mkdir /app \
    && chown harness:harness /app

WORKDIR /app
USER 10001:10001
COPY --chown=harness:harness pyproject.toml Makefile README.md LICENSE ./
COPY --chown=harness:harness constraints constraints
COPY --chown=harness:harness harness harness
COPY --chown=harness:harness engines engines
COPY --chown=harness:harness drafters drafters
COPY --chown=harness:harness training training
COPY --chown=harness:harness results/README.md results/README.md
RUN make .venv/installed

ENTRYPOINT [".venv/bin/python", "-m", "harness"]
CMD ["run"]
HEALTHCHECK --interval=60s --timeout=20s --start-period=10s --retries=3 \
    CMD [".venv/bin/python", "-m", "harness", "engines", "list"]

# ---- what both engines need: the CUDA toolkit, as their kernels are compiled in part at run time
FROM ${CUDA_IMAGE} AS cuda

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        make gcc g++ git libnuma1 openssh-client python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 harness \
    && mkdir /app /opt/engines \
    && chown harness:harness /app /opt/engines

ENV SPEC_HARNESS_VENVS=/opt/engines
WORKDIR /app
USER 10001:10001
COPY --from=harness --chown=harness:harness /app/pyproject.toml /app/Makefile /app/README.md \
    /app/LICENSE ./
COPY --from=harness --chown=harness:harness /app/constraints constraints
COPY --from=harness --chown=harness:harness /app/harness harness
COPY --from=harness --chown=harness:harness /app/engines engines
COPY --from=harness --chown=harness:harness /app/drafters drafters
COPY --from=harness --chown=harness:harness /app/training training
COPY --from=harness --chown=harness:harness /app/results results
RUN make .venv/installed

ENTRYPOINT [".venv/bin/python", "-m", "harness"]
CMD ["engines", "list"]

# ---- vLLM -------------------------------------------------------------------------------------
FROM cuda AS vllm
LABEL org.opencontainers.image.title="spec-harness with vLLM" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN .venv/bin/python -m harness engines install vllm
HEALTHCHECK --interval=30s --timeout=10s --start-period=45m --retries=3 \
    CMD ["python3", "-c", "import os, urllib.request as r; \
r.urlopen('http://127.0.0.1:' + (os.environ.get('PORT') or '8000') + '/health', timeout=8)"]

# ---- SGLang -----------------------------------------------------------------------------------
FROM cuda AS sglang
LABEL org.opencontainers.image.title="spec-harness with SGLang" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN .venv/bin/python -m harness engines install sglang
HEALTHCHECK --interval=30s --timeout=10s --start-period=45m --retries=3 \
    CMD ["python3", "-c", "import os, urllib.request as r; \
r.urlopen('http://127.0.0.1:' + (os.environ.get('PORT') or '8000') + '/health', timeout=8)"]

# ---- SGLang's kernels for 12.0a, from a source tree given as a build context --------------------
# Replaced by --build-context sgl-kernel-source=PATH; empty otherwise, which the build says.
FROM scratch AS sgl-kernel-source

FROM sglang AS sgl-kernel
ARG SGL_ARCH=12.0a
USER 0:0
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ccache \
    && rm -rf /var/lib/apt/lists/*
USER 10001:10001
RUN /opt/engines/.venvs/sglang/bin/python -m pip install --no-cache-dir \
    cmake==4.1.0 ninja==1.13.0 scikit-build-core==0.11.6
ENV PATH=/opt/engines/.venvs/sglang/bin:${PATH} \
    CCACHE_DIR=/opt/engines/ccache
RUN --mount=type=bind,from=sgl-kernel-source,source=.,target=/source,rw \
    --mount=type=cache,target=/opt/engines/ccache,uid=10001 \
    .venv/bin/python -m harness engines build sgl-kernel --arch "${SGL_ARCH}" --source /source \
    && mkdir /opt/engines/wheels \
    && cp /opt/engines/.venvs/build-sgl-kernel/*/wheels/*.whl /opt/engines/wheels/

FROM sglang AS sglang-sm120
LABEL org.opencontainers.image.title="spec-harness with SGLang, kernels for 12.0a"
RUN --mount=type=bind,from=sgl-kernel,source=/opt/engines/wheels,target=/wheels \
    /opt/engines/.venvs/sglang/bin/python -m pip install --no-cache-dir --no-deps \
    --force-reinstall /wheels/*.whl

# What `docker build .` makes.
FROM harness AS default
