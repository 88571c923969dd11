# An image with holdfast, for controllers and nodes alike. Put your script on top:
#     FROM holdfast
#     COPY . /src
# torch comes from the index that you name (TORCH_INDEX), as its builds differ by where they come from; all else comes
# from locked-image.txt, every file by its hash.
ARG PYTHON=3.12

FROM docker.io/library/python:${PYTHON}-slim AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cu128
WORKDIR /build
RUN python -m venv /opt/holdfast
ENV PATH=/opt/holdfast/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY pyproject.toml constraints.txt locked-image.txt README.md LICENSE ./
RUN grep -m 1 '^torch==' constraints.txt | xargs pip install --index-url "$TORCH_INDEX" -c constraints.txt
RUN pip install --no-deps --require-hashes -r locked-image.txt
COPY holdfast holdfast
RUN pip install --no-deps --no-build-isolation .

FROM docker.io/library/python:${PYTHON}-slim
# Ranks may compile: torch.compile wants a C compiler at run time.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --no-create-home --home-dir /var/lib/holdfast holdfast \
    && install -d -o 10001 -g 10001 /var/lib/holdfast /src
COPY --from=build /opt/holdfast /opt/holdfast
ENV PATH=/opt/holdfast/bin:$PATH PYTHONUNBUFFERED=1 HOLDFAST_HOME=/var/lib/holdfast
USER 10001
WORKDIR /src
ENTRYPOINT []
CMD ["holdfast", "--help"]
