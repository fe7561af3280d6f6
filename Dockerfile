# syntax=docker/dockerfile:1
# One image for router, controller and workers. `--target cpu` has torch for CPUs, `--target cuda` that for CUDA 13, with
# what compiles kernels at a first start. `--build-arg TORCH_INDEX=…` names torch's own index of the builds for that target
# (its installation page has it); without one the default build is taken, which is CUDA's for both. Everything is pinned by
# constraints.txt, but CUDA's torch by TORCH below. `--build-arg BASE=…` is another image of Debian with `python` on its path
# (and its headers, for `cuda`): a mirror's, or your own.
ARG BASE=python:3.12-slim-bookworm

FROM scratch AS source
WORKDIR /build
COPY pyproject.toml README.md LICENSE ./
COPY cluster cluster
COPY kernels kernels
COPY loadtests loadtests
COPY proto proto
COPY router router
COPY workers workers

# pip stays inside: known models come out of wheels (`headrace model fetch`). uv trusts whom the base trusts, as pip does.
FROM ${BASE} AS installer
# Compiled here, as nobody can write beside the sources later: else each process compiles all that it imports anew.
ENV UV_SYSTEM_CERTS=true \
    UV_COMPILE_BYTECODE=1
WORKDIR /build
COPY constraints.txt ./
RUN python -m venv /opt/headrace \
    && /opt/headrace/bin/pip install --no-cache-dir --constraint constraints.txt uv

# torch is a layer of its own, below the sources: a change of these fetches none of its gigabytes again.
FROM installer AS build-cpu
ARG TORCH_INDEX=
RUN /opt/headrace/bin/pip install --no-cache-dir --constraint constraints.txt \
        ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch
COPY --from=source /build ./
RUN /opt/headrace/bin/uv pip install --no-cache --python /opt/headrace/bin/python \
        --constraint constraints.txt --build-constraint constraints.txt ".[tracing]" "ray[default,client]"

FROM installer AS build-cuda
ARG TORCH=2.11.0
ARG TORCH_INDEX=
RUN /opt/headrace/bin/pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "torch==${TORCH}"
COPY --from=source /build ./
# torch, triton and their CUDA are a set of their own: not those of constraints.txt, which are for CPUs.
RUN grep -vE '^(torch|triton|setuptools|sympy|networkx|fsspec)==' constraints.txt > /build/constraints-cuda.txt \
    && /opt/headrace/bin/uv pip install --no-cache --python /opt/headrace/bin/python \
        --constraint constraints-cuda.txt ".[gpu,nvml,rdma,tracing]" "ray[default,client]"
# Kernels of these models (known shapes), for this card and these tensor parallel sizes; those of others compile at their
# first start. No GPU is needed here: docs/operations.md, "Compiled kernels".
ARG KERNELS=llama-3.1-8b
ARG KERNELS_CARD=h200
ARG KERNELS_TP="1 2"
# hadolint ignore=DL3008,SC2046,SC2086
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/* \
    && CC=gcc /opt/headrace/bin/headrace kernels compile ${KERNELS} --card "${KERNELS_CARD}" \
        $(printf -- '--tp %s ' ${KERNELS_TP}) --out /opt/headrace/kernels

FROM ${BASE} AS base
# KubeRay asks a node how it is by wget, in a login shell, which knows no ENV: hence the profile.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends wget && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --create-home headrace \
    && echo "export PATH=/opt/headrace/bin:\$PATH" > /etc/profile.d/headrace.sh
ENV PATH=/opt/headrace/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    RAY_USAGE_STATS_ENABLED=0
USER 10001:10001
WORKDIR /tmp
ENTRYPOINT []
CMD ["headrace", "--help"]

FROM base AS cuda
USER 0
# For kernels that are not shipped Triton compiles a launcher each: it needs a C compiler.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY --from=build-cuda /opt/headrace /opt/headrace
ENV TRITON_CACHE_MANAGER=kernels.shipped:ShippedCache \
    HEADRACE_KERNELS=/opt/headrace/kernels \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    CC=gcc
USER 10001:10001

FROM base AS cpu
COPY --from=build-cpu /opt/headrace /opt/headrace
