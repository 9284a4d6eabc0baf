# On NVIDIA's PyTorch image, whose own torch and apex stay as they are:
#   docker build -t megapipe .
#   docker run --rm --gpus all --ipc=host -v "$PWD/runs:/megapipe/runs" megapipe \
#     torchrun --nproc-per-node 8 train.py configs/llama_1b.yaml
# On a plain Python image, with the CPU build of torch, for tests:
#   docker build -t megapipe-cpu --build-arg BASE=python:3.11-slim --build-arg EXTRAS=log,dev .
#   docker run --rm megapipe-cpu python -m pytest
ARG BASE=nvcr.io/nvidia/pytorch:26.03-py3
FROM ${BASE}

# log: Weights & Biases and tensorboard; dev: what tests need; s3, gcs: drivers of object storage
ARG EXTRAS=log
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
WORKDIR /megapipe
# HOME: caches of any user, docker run --user "$(id -u):$(id -g)" included.
ENV HOME=/tmp OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1

COPY pyproject.toml constraints.txt README.md LICENSE Dockerfile train.py ./
COPY docs/package.md docs/
COPY megapipe megapipe
# An image that has torch keeps it, and the numpy and triton that it was built with; NVIDIA's
# PIP_CONSTRAINT, if there is one, becomes an argument so that it does not bind the setuptools that
# builds megapipe. An image without torch gets all versions from constraints.txt.
RUN python -m pip list --format freeze | grep -E '^(numpy|torch.*|.*triton)==' >/tmp/pins.txt || true; \
    if ! grep -q '^torch==' /tmp/pins.txt; then \
      cp constraints.txt /tmp/pins.txt; \
      python -m pip install -c /tmp/pins.txt torch \
        --index-url https://download.pytorch.org/whl/cpu; \
    fi; \
    cat "${PIP_CONSTRAINT:-/dev/null}" >>/tmp/pins.txt; \
    env -u PIP_CONSTRAINT python -m pip install -c /tmp/pins.txt -e ".[$EXTRAS]"; \
    rm /tmp/pins.txt; \
    mkdir runs cache; \
    chmod 1777 . runs cache
COPY .ci .ci
COPY configs configs
COPY scripts scripts
COPY benchmarks benchmarks
COPY examples examples
COPY docs docs
COPY tests tests
