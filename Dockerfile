# docker build -t cookbook . && docker run --rm -it --gpus all --shm-size 16g cookbook
# For H100, H200 and B200: docker build --build-arg FILES="requirements.txt requirements-hopper.txt" -t cookbook .
# CUDA 13: the host needs driver 580 or newer. The devel image has the compilers that DeepSpeed and Triton call.
FROM nvidia/cuda:13.0.0-devel-ubuntu24.04
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3-dev python3-venv git \
    && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/venv/bin:$PATH
ARG FILES=requirements.txt
COPY requirements*.txt /tmp/requirements/
WORKDIR /tmp/requirements
RUN python3 -m venv /opt/venv && for file in $FILES; do pip install --no-cache-dir -r "$file" || exit 1; done
WORKDIR /cookbook
COPY . .
CMD ["bash"]
