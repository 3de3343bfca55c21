"""Without a kit: the library, the checks and the benchmark compiled here, for this GPU's architecture alone, with the nvcc and the g++ that are there."""
import glob
import os
from concurrent.futures import ThreadPoolExecutor

import machine
from kit import ROOT
from runner import Failed

CXX = ["g++", "-std=c++20", "-O2", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]


def toolkit():
    """(nvcc, folders with headers, static runtime)."""
    for home in machine.toolkits():
        nvcc = os.path.join(home, "bin", "nvcc")
        if not os.access(nvcc, os.X_OK):
            continue
        # Packages of one tool each lie side by side.
        beside = [home, os.path.join(home, "targets", "x86_64-linux"), *glob.glob(os.path.join(os.path.dirname(home), "*"))]
        headers = [os.path.join(folder, "include") for folder in beside if os.path.exists(os.path.join(folder, "include", "cuda_runtime_api.h"))]
        runtime = [path for folder in beside for lib in ("lib64", "lib") if os.path.exists(path := os.path.join(folder, lib, "libcudart_static.a"))]
        if headers and runtime:
            return nvcc, headers[:1], runtime[0]
    raise Failed("no nvcc with cuda_runtime_api.h and libcudart_static.a: neither CUDA_HOME nor PATH nor /usr/local/cuda* nor a Python package has them")


def architecture(capability):
    """nvcc's name for a compute capability such as 9.0."""
    number = capability.replace(".", "")
    return {"90": "90a", "100": "100f"}.get(number, number)


def compile_all(runner, folder, capability, outcome):
    """Fills `folder` with what a kit has, but the program itself."""
    nvcc, headers, runtime = toolkit()
    arch = architecture(capability)
    outcome["built_here"] = {"nvcc": nvcc, "arch": f"sm_{arch}"}
    includes = ["-I", f"{ROOT}/native", *[word for header in headers for word in ("-isystem", header)]]
    jobs, objects = [], {}

    def compile_host(kind, sources, extra=()):
        for source in sources:
            target = os.path.join(folder, f"{kind}-{os.path.relpath(source, ROOT).replace('/', '-')}.o")
            objects.setdefault(kind, []).append(target)
            jobs.append([*CXX, *includes, *extra, "-c", source, "-o", target])

    for source in sorted(glob.glob(f"{ROOT}/cuda/kernels/*.cu"), key=os.path.getsize, reverse=True):
        target = os.path.join(folder, os.path.basename(source) + ".o")
        objects.setdefault("kernels", []).append(target)
        jobs.append([nvcc, "-std=c++20", "-O3", "-lineinfo", "--expt-relaxed-constexpr", "-gencode", f"arch=compute_{arch},code=sm_{arch}", "-Xcompiler", "-fPIC,-fvisibility=hidden", "-I", f"{ROOT}/native", "-c", source, "-o", target])
    tests = [source for source in glob.glob(f"{ROOT}/cuda/test/*.cpp") if not source.endswith("simulator_test.cpp")]
    support = ["-DLS_TEST_GPU", "-I", f"{ROOT}/native/test", "-I", f"{ROOT}/cuda/test", "-I", f"{ROOT}/cuda"]
    compile_host("checks", [*tests, f"{ROOT}/cuda/test/gpu/main.cpp"], support)
    compile_host("step_bench", [f"{ROOT}/cuda/bench/step_bench.cpp"], support)
    compile_host("library", [*glob.glob(f"{ROOT}/native/*.cpp"), *glob.glob(f"{ROOT}/native/kv_transfer/*.cpp"), *glob.glob(f"{ROOT}/cuda/*.cpp"), *glob.glob(f"{ROOT}/cuda/kernels/*.cpp")])
    # What kernels are compared with.
    compile_host("cpu", [f"{ROOT}/cpu/{name}.cpp" for name in ["sampler", "ops", "isa", "thread_pool"]])
    compile_host("cpu", glob.glob(f"{ROOT}/cpu/kernels/*_avx2.cpp"), [*AVX2, "-DLS_SIMD_AVX2"])
    compile_host("cpu", glob.glob(f"{ROOT}/cpu/kernels/*_avx512.cpp"), [*AVX512, "-DLS_SIMD_AVX512"])
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(lambda job: runner.must(job, 150), jobs))

    parts = [*objects["library"], *objects["kernels"]]
    system = [runtime, "-lpthread", "-ldl", "-lrt"]
    library = os.path.join(folder, "liblayerscale_cuda.so")
    runner.must(["g++", "-shared", "-o", library, *parts, *system, f"-Wl,--version-script={ROOT}/native/exports.map", "-Wl,-z,defs"], 60)
    for name, extra in [("checks", objects["cpu"]), ("step_bench", [])]:
        runner.must(["g++", "-o", os.path.join(folder, name), *objects[name], *parts, *extra, *system], 60)
    outcome["built_here"]["library_bytes"] = os.path.getsize(library)
