# MTRL without a GPU: the demo, small runs, and every command. Linted with hadolint 2.15.1, not built.
#   docker build --file docker/cpu.Dockerfile --tag mtrl:cpu --build-arg TORCH_INDEX=URL .
# URL is PyTorch's index of CPU builds, which pytorch.org shows in its command for pip.
#   docker run --rm --volume "$PWD:/work" --user "$(id -u):$(id -g)" mtrl:cpu demo
FROM python:3.11-slim

# torch's own index has builds without the CUDA libraries. Its version is that of constraints.txt.
ARG TORCH_INDEX
RUN pip install --no-cache-dir --index-url "${TORCH_INDEX:?}" torch==2.13.0

WORKDIR /opt/mtrl
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY embedded embedded
COPY mtrl mtrl
RUN pip install --no-cache-dir --constraint constraints.txt '.[math,hub,lora,view,compare,video]' ./embedded

# Runs and caches are written under /work, which is yours.
ENV HOME=/work
WORKDIR /work
RUN useradd --uid 1000 --no-create-home mtrl && chown mtrl /work
USER 1000
ENTRYPOINT ["mtrl"]
CMD ["--help"]
