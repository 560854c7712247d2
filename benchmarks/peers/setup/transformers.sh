#!/bin/sh
# Usage: sh benchmarks/peers/setup/transformers.sh [WORK]
# A virtual environment for transformers in WORK/transformers (default build/peers), about a minute. It also makes the
# folders in bf16 that vLLM reads, from GGUF files.
set -eu
home=${1:-build/peers}/transformers
mkdir -p "$home"
python3 -m venv "$home/venv"
"$home/venv/bin/python" -m pip install -q torch==2.13.0 transformers==5.23.0 gguf==0.17.1 accelerate sentencepiece
