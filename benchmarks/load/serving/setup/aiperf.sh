#!/bin/sh
# Usage: sh benchmarks/load/serving/setup/aiperf.sh [WORK]
# NVIDIA's AIPerf in WORK/aiperf (default build/peers), in an environment of its own: a minute or two, 1.2 GB.
# llama.cpp's server comes from benchmarks/peers/setup/llama.cpp.sh.
set -eu
home=${1:-build/peers}/aiperf
mkdir -p "$home"
python3 -m venv "$home/venv"
"$home/venv/bin/python" -m pip install -q aiperf==0.13.0
