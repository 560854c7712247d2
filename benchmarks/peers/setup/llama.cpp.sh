#!/bin/sh
# Usage: sh benchmarks/peers/setup/llama.cpp.sh [WORK [avx2]]
# llama.cpp of 2026-10-01 in WORK/llama.cpp (default build/peers): its source as llama-cpp-python's source package
# carries it, compiled for this processor (needs cmake, ninja and a C++ compiler; about 15 minutes on two cores), and an
# environment for its converter.
# With "avx2" it compiles kernels for AVX2, which the same server can take in the place of its own, and nothing else.
set -eu
home=${1:-build/peers}/llama.cpp
mkdir -p "$home"
python3 -m venv "$home/venv"
"$home/venv/bin/python" -m pip install -q torch==2.13.0 transformers==5.23.0 sentencepiece
if [ ! -d "$home/source" ]; then
    "$home/venv/bin/python" -m pip download -q --no-deps --no-binary :all: -d "$home" llama-cpp-python==0.3.36
    tar -xzf "$home"/llama_cpp_python-0.3.36.tar.gz -C "$home"
    mv "$home/llama_cpp_python-0.3.36/vendor/llama.cpp" "$home/source"
    rm -r "$home/llama_cpp_python-0.3.36"
fi
# Without this line gcc 12 leaves the rows and columns of AMX tiles unset, and the program ends with an illegal instruction.
sed -i 's/^    _tile_loadconfig(&tc);/    asm volatile("" : : "r"(\&tc) : "memory"); _tile_loadconfig(\&tc);/' \
    "$home/source/ggml/src/ggml-cpu/amx/mmq.cpp"
processor=-DGGML_NATIVE=ON build=$home/build targets="llama-server llama-quantize llama-perplexity llama-bench"
if [ "${2:-}" = avx2 ]; then
    processor="-DGGML_NATIVE=OFF -DGGML_SSE42=ON -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON"
    processor="$processor -DGGML_AVX512=OFF" build=$home/build-avx2 targets=ggml-cpu
fi
cmake -S "$home/source" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release $processor \
    -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_UI=OFF
cmake --build "$build" --target $targets
