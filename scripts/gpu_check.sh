#!/usr/bin/env bash
# All that needs a GPU: builds Kolovod beside the machine's own PyTorch, runs the tests that are
# skipped elsewhere, and writes bench/results/gpu.md. A few minutes on one GPU.
#
#   bash scripts/gpu_check.sh            PYTHON=python3.12 bash scripts/gpu_check.sh
#
# PYTHON's PyTorch is used if it has CUDA; else TORCH (by default "torch") is installed.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
VENV=${VENV:-build/gpu-venv}
has_cuda='import sys, torch; sys.exit(torch.version.cuda is None or not torch.cuda.is_available())'

rm -rf "$VENV"
# Where there is no ensurepip, the machine's own pip is used, which --system-site-packages shows.
"$PYTHON" -m venv --system-site-packages "$VENV" || "$PYTHON" -m venv --without-pip --system-site-packages "$VENV"
pip=("$VENV/bin/python" -m pip --disable-pip-version-check install --quiet)
"$VENV/bin/python" -c "$has_cuda" 2> /dev/null || "${pip[@]}" "${TORCH:-torch}"
"$VENV/bin/python" -c "$has_cuda" || {
  echo "scripts/gpu_check.sh: PyTorch finds no GPU here" >&2
  exit 1
}
"${pip[@]}" ".[test]"
status=0
"$VENV/bin/python" -m pytest -q tests/frontends/torch/test_gpu.py tests/backends/test_nccl.py tests/backends/test_no_cuda_context.py || status=$?
"$VENV/bin/python" bench/gpu.py || status=$?
exit "$status"
