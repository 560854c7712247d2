#!/bin/sh
# Usage: sh benchmarks/peers/setup/ik_llama.cpp.sh [WORK [avx2]]
# ik_llama.cpp of 2026-09-16 in WORK/ik_llama.cpp (default build/peers): its source as ik-llama-cpp-python's source
# package carries it, compiled for this processor (needs cmake, ninja and a C++ compiler; half an hour on two cores).
# The package itself is compiled for AVX2 and has no server. Attention kernels for quantised caches, which nothing here
# uses, are left out.
# With "avx2" it compiles kernels for AVX2, which the same server can take in the place of its own, and nothing else.
set -eu
work=${1:-build/peers}
home=$work/ik_llama.cpp
mkdir -p "$home"
python3 -m venv "$home/venv"
if [ ! -d "$home/source" ]; then
    "$home/venv/bin/python" -m pip download -q --no-deps --no-binary :all: -d "$home" ik-llama-cpp-python==0.1.5
    tar -xzf "$home"/ik_llama_cpp_python-0.1.5.tar.gz -C "$home"
    mv "$home/ik_llama_cpp_python-0.1.5/vendor/ik_llama.cpp" "$home/source"
    rm -r "$home/ik_llama_cpp_python-0.1.5"
fi
# The source package lacks this file, which would write the number of the build.
mkdir -p "$home/source/common/cmake"
echo 'set(BUILD_NUMBER 0)
configure_file(common/build-info.cpp.in common/build-info.cpp)' > "$home/source/common/cmake/build-info-gen-cpp.cmake"
processor=-DGGML_NATIVE=ON build=$home/build targets="llama-server llama-quantize"
if [ "${2:-}" = avx2 ]; then
    processor="-DGGML_NATIVE=OFF -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_AVX512=OFF"
    build=$home/build-avx2 targets=ggml
fi
cmake -S "$home/source" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release $processor \
    -DGGML_IQK_FA_ALL_QUANTS=OFF -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF
cmake --build "$build" --target $targets
