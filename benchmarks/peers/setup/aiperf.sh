#!/bin/sh
# Usage: sh benchmarks/peers/setup/aiperf.sh [WORK]
# NVIDIA's AIPerf in WORK/aiperf (default build/peers), in an environment of its own: a minute or two, 1.2 GB.
set -eu
home=${1:-build/peers}/aiperf
mkdir -p "$home"
python3 -m venv "$home/venv"
"$home/venv/bin/python" -m pip install -q aiperf==0.13.0
