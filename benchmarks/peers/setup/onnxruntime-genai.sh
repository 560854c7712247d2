#!/bin/sh
# Usage: sh benchmarks/peers/setup/onnxruntime-genai.sh [WORK]
# A virtual environment for ONNX Runtime GenAI in WORK/onnxruntime-genai (default build/peers), about a minute.
# torch, transformers and onnx are for its model builder.
set -eu
home=${1:-build/peers}/onnxruntime-genai
mkdir -p "$home"
python3 -m venv "$home/venv"
"$home/venv/bin/python" -m pip install -q \
    onnxruntime-genai==0.18.0 onnxruntime==1.31.1 \
    torch==2.13.0 transformers==5.23.0 onnx==1.23.2 onnx-ir==1.1.0 sentencepiece
