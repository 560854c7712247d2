#!/bin/sh
# Usage: sh benchmarks/peers/setup/huggingface.sh [WORK]
# A virtual environment for transformers in WORK/huggingface (default build/peers), about a minute.
set -eu
home=${1:-build/peers}/huggingface
mkdir -p "$home"
python3 -m venv "$home/venv"
"$home/venv/bin/python" -m pip install -q torch==2.13.0 transformers==5.23.0
