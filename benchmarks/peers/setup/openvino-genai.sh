#!/bin/sh
# Usage: sh benchmarks/peers/setup/openvino-genai.sh [WORK]
# A virtual environment for OpenVINO GenAI in WORK/openvino-genai (default build/peers), about two minutes.
# torch is pinned: optimum-intel alone takes a newer one with several GB of CUDA. torchvision, which a dependency brings,
# is built for another torch and breaks the export, which does not need it.
set -eu
home=${1:-build/peers}/openvino-genai
mkdir -p "$home"
python3 -m venv "$home/venv"
"$home/venv/bin/python" -m pip install -q \
    torch==2.13.0 openvino==2026.4.1 openvino-genai==2026.4.1.0 openvino-tokenizers==2026.4.1.0 \
    optimum-intel==2.2.0 transformers==5.5.4 nncf==3.4.0
"$home/venv/bin/python" -m pip uninstall -q -y torchvision
