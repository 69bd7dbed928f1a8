# One file for all images:
#
#   docker build --target engine-cuda -t ghcr.io/minisglang/minisglang-engine-cuda:dev .
#
#   engine-cuda   every role on NVIDIA GPUs: what a MiniSGLang object runs by default
#   engine-cpu    every role without a GPU
#   services      gateway, tokenizer and detokenizer alone: no torch, no GPU package
#   operator      the operator: no torch
#
# All but engine-cuda build for linux/amd64 and linux/arm64. Every image runs as user 1000 and needs
# no writable root: caches go to $HOME, which pods mount as an emptyDir.
ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim-bookworm
# CUDA 13 is what torch 2.11 and sglang-kernel 0.4.3 are built for. FlashInfer and the project's own
# kernels compile at run time, so the compiler (devel) is part of the image.
ARG CUDA_IMAGE=docker.io/nvidia/cuda:13.0.1-devel-ubuntu24.04

# --- the wheel ------------------------------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY operator operator
COPY services services
COPY kernels kernels
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

# --- what each role needs: a layer of its own, so that a new version of the project is a small one -
FROM ${PYTHON_IMAGE} AS builder
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/minisgl && /opt/minisgl/bin/pip install --upgrade "pip>=25"
WORKDIR /src
COPY pyproject.toml ./
COPY constraints constraints
COPY scripts/requirements.py scripts/requirements.py

FROM builder AS operator-needs
RUN python scripts/requirements.py operator > /tmp/wanted.txt \
    && /opt/minisgl/bin/pip install -c constraints/cpu.txt -r /tmp/wanted.txt

FROM builder AS services-needs
RUN python scripts/requirements.py gateway tokenizer redis > /tmp/wanted.txt \
    && /opt/minisgl/bin/pip install -c constraints/cpu.txt -r /tmp/wanted.txt

FROM builder AS engine-cpu-needs
# Where torch without CUDA comes from. A find-links folder of pip's configuration is looked at first.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN python scripts/requirements.py gateway tokenizer engine redis > /tmp/wanted.txt \
    && torch="$(grep '^torch==' constraints/cpu.txt)" \
    && (/opt/minisgl/bin/pip install --no-index "$torch+cpu" --no-deps 2>/dev/null \
        || /opt/minisgl/bin/pip install --index-url "$TORCH_INDEX" --timeout 15 --retries 1 --no-deps "$torch" \
        || echo "$TORCH_INDEX cannot be reached: torch comes from PyPI, with 3 GB of CUDA libraries") \
    && /opt/minisgl/bin/pip install -c constraints/cpu.txt -r /tmp/wanted.txt

# --- the images -----------------------------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS runtime
RUN useradd --uid 1000 --user-group --home-dir /var/lib/minisgl --create-home minisgl
ENV PATH=/opt/minisgl/bin:$PATH HOME=/var/lib/minisgl \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /var/lib/minisgl
USER 1000:1000

FROM runtime AS operator
COPY --from=operator-needs /opt/minisgl /opt/minisgl
USER 0:0
COPY --from=wheel /wheels /wheels
RUN /opt/minisgl/bin/pip install --no-cache-dir --no-deps /wheels/*.whl
USER 1000:1000
ENTRYPOINT ["minisgl-operator"]
CMD ["run"]

FROM runtime AS services
COPY --from=services-needs /opt/minisgl /opt/minisgl
USER 0:0
COPY --from=wheel /wheels /wheels
RUN /opt/minisgl/bin/pip install --no-cache-dir --no-deps /wheels/*.whl
USER 1000:1000
ENTRYPOINT ["minisgl"]

FROM runtime AS engine-cpu
# The C++ kernels are compiled for the processor at hand when they are first used.
USER 0:0
# The base image's release pins Debian's packages as far as one can: of each, mirrors keep the newest
# version alone.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
COPY --from=engine-cpu-needs /opt/minisgl /opt/minisgl
COPY --from=wheel /wheels /wheels
RUN /opt/minisgl/bin/pip install --no-cache-dir --no-deps /wheels/*.whl
USER 1000:1000
ENTRYPOINT ["minisgl"]

FROM ${CUDA_IMAGE} AS engine-cuda
ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ ninja-build python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/minisgl && /opt/minisgl/bin/pip install --upgrade "pip>=25"
WORKDIR /src
COPY pyproject.toml ./
COPY constraints constraints
COPY scripts/requirements.py scripts/requirements.py
RUN python3 scripts/requirements.py gateway tokenizer engine redis cuda > /tmp/wanted.txt \
    && /opt/minisgl/bin/pip install -c constraints/cuda.txt -r /tmp/wanted.txt
COPY --from=wheel /wheels /wheels
# Ubuntu's image has a user 1000 of its own.
RUN /opt/minisgl/bin/pip install --no-deps /wheels/*.whl \
    && (userdel --remove ubuntu || true) \
    && useradd --uid 1000 --user-group --home-dir /var/lib/minisgl --create-home minisgl
ENV PATH=/opt/minisgl/bin:$PATH HOME=/var/lib/minisgl \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# What common models try for their products on Hopper: a pod whose caches are empty compiles only the
# rest. `--build-arg KERNELS=` leaves it out (30 MB, 100 s of one core).
ARG KERNELS=common
ENV MINISGL_BUILT_KERNELS=/opt/minisgl/kernels
RUN mkdir -p "$MINISGL_BUILT_KERNELS" \
    && if [ -n "$KERNELS" ]; then minisgl compile --folder "$MINISGL_BUILT_KERNELS"; fi \
    && chmod -R a+rX "$MINISGL_BUILT_KERNELS"
WORKDIR /var/lib/minisgl
USER 1000:1000
ENTRYPOINT ["minisgl"]
