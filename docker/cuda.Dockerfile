# MTRL with CUDA and vLLM. Linted with hadolint 2.15.1, not built. The host needs NVIDIA's driver and container toolkit.
#   docker build --file docker/cuda.Dockerfile --tag mtrl:cuda .
#   docker run --rm --gpus all --ipc host --volume "$PWD:/work" --user "$(id -u):$(id -g)" mtrl:cuda train run.yaml
FROM python:3.12-slim

# The wheels of torch bring CUDA's libraries; Triton compiles the launchers of its kernels with gcc.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

# First, since it chooses the versions of torch and transformers that it was built with, and they have to stay.
RUN pip install --no-cache-dir vllm==0.32.0 && pip freeze > /opt/vllm.txt

WORKDIR /opt/mtrl
COPY pyproject.toml README.md LICENSE ./
COPY embedded embedded
COPY mtrl mtrl
RUN pip install --no-cache-dir --constraint /opt/vllm.txt '.[vllm,cluster,math,hub,lora,view,compare,video]' ./embedded

# Runs and caches are written under /work, which is yours.
ENV HOME=/work
WORKDIR /work
RUN useradd --uid 1000 --no-create-home mtrl && chown mtrl /work
USER 1000
ENTRYPOINT ["mtrl"]
CMD ["--help"]
