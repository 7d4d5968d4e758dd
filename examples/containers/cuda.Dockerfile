# Kolovod with PyTorch on NVIDIA's GPUs. In a clone of the repository:
#
#     docker build -f examples/containers/cuda.Dockerfile -t digits-cuda .
#     docker run --rm --gpus all --shm-size 1g digits-cuda
#
# PyTorch's wheel brings CUDA's libraries and NCCL, the host the driver. NCCL, not Kolovod, needs --shm-size.
ARG BASE=nvidia/cuda:12.6.3-base-ubuntu24.04
FROM $BASE AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3-dev python3-venv
RUN python3 -m venv /opt/venv
WORKDIR /src
COPY CMakeLists.txt LICENSE README.md pyproject.toml ./
COPY csrc csrc
COPY src src
RUN /opt/venv/bin/pip wheel --no-deps --wheel-dir /wheels .

FROM $BASE
RUN apt-get update && apt-get install -y --no-install-recommends openssh-client python3-venv && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
ARG TORCH=torch
RUN pip install --no-cache-dir $TORCH
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir /wheels/*.whl scikit-learn
RUN kolovod doctor
COPY examples/torch_digits.py /app/train.py
WORKDIR /app
CMD ["kolovod", "run", "-np", "2", "--", "python", "train.py"]
