# Kolovod with PyTorch on CPUs. In a clone of the repository:
#
#     docker build -f examples/containers/cpu.Dockerfile -t digits .
#     docker run --rm digits
#
# The wheel is compiled in a stage of its own, so the image has no compiler.
FROM python:3.12-slim-bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++
WORKDIR /src
COPY CMakeLists.txt LICENSE README.md pyproject.toml ./
COPY csrc csrc
COPY src src
RUN pip wheel --no-deps --wheel-dir /wheels .

FROM python:3.12-slim-bookworm
# For kolovod run -H from this image; leave it out where Slurm or Kubernetes start the ranks.
RUN apt-get update && apt-get install -y --no-install-recommends openssh-client && rm -rf /var/lib/apt/lists/*
# With --build-arg TORCH="torch --index-url ADDRESS" of PyTorch's builds for CPUs the image is some GB smaller.
ARG TORCH=torch
RUN pip install --no-cache-dir $TORCH
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir /wheels/*.whl scikit-learn
# Says what would keep a job from starting in this image.
RUN kolovod doctor
COPY examples/torch_digits.py /app/train.py
WORKDIR /app
CMD ["kolovod", "run", "-np", "2", "--", "python", "train.py"]
