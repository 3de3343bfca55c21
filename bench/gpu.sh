#!/bin/sh
# Everything that only a GPU can tell, in a few minutes on one GPU: prints one JSON object, {"result": "no GPU"} where there is none.
#   bench/gpu.sh pack    on the machine that builds: puts the program, compressed, into dist/gpu-kit, so that it travels with the tree
#   bench/gpu.sh         on the machine with the GPU: needs nvcc, g++, python3 and nothing from a network
exec python3 "$(dirname "$0")/gpu/main.py" "$@"
