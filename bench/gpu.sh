#!/bin/sh
# Everything that only a GPU can tell, in under six minutes of one GPU: prints one JSON object, {"result": "no GPU"} where there is none.
#   bench/gpu.sh pack [--simulate] [--stored]   where the sources are built: puts what travels beside them into dist/gpu-kit/kit.tar
#   bench/gpu.sh [--report FILE]                on the machine with the GPU: python3 alone is needed; nvcc and g++ only without a kit, nothing from a network.
#                                               The report is written after every step, so that a run that is cut off leaves what it has found.
#   bench/gpu.sh --simulate                     all of it over the simulator, in small, on any machine: a rehearsal that measures nothing
exec python3 "$(dirname "$0")/gpu/main.py" "$@"
