#!/bin/sh
# Usage: CC='sh benchmarks/peers/setup/avx2.sh' draftwood ...
# The C compiler for a processor with AVX2 alone: what stands last overrules -march=native.
exec cc "$@" -march=haswell
