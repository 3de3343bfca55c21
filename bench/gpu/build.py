"""The library and its programs: carried in dist/gpu-kit, or compiled here for this GPU's architecture alone."""
import glob
import lzma
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
KIT = os.path.join(ROOT, "dist", "gpu-kit")
OUT = os.environ.get("LAYERSCALE_GPU_BUILD", "/tmp/layerscale-gpu")
CXX = ["g++", "-std=c++20", "-O2", "-fPIC", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra"]


def pack():
    """Compresses the program and its CPU library; they do not fit the tree otherwise."""
    os.makedirs(KIT, exist_ok=True)
    packed = {}
    for name in ["layerscale", "liblayerscale_cpu.so", "liblayerscale_cuda.so"]:
        source = os.path.join(ROOT, "dist", name)
        if not os.path.exists(source):
            continue
        with open(source, "rb") as plain, lzma.open(os.path.join(KIT, name + ".xz"), "wb", preset=6) as out:
            shutil.copyfileobj(plain, out, 1 << 20)
        packed[name] = os.path.getsize(os.path.join(KIT, name + ".xz"))
    if "layerscale" not in packed or "liblayerscale_cpu.so" not in packed:
        raise SystemExit("dist/layerscale or dist/liblayerscale_cpu.so is missing: build first")
    return {"kit": KIT, "bytes": packed, "total": sum(packed.values())}


def run(command, timeout, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=max(timeout, 1), **options)
    if done.returncode != 0:
        raise RuntimeError(f"{os.path.basename(command[0])} ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def toolkit():
    """Folder with bin/nvcc."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    found = shutil.which("nvcc")
    homes += [os.path.dirname(os.path.dirname(os.path.realpath(found)))] if found else []
    homes += sorted(glob.glob("/usr/local/cuda*"), reverse=True)
    for home in homes:
        if home and os.path.exists(os.path.join(home, "bin", "nvcc")):
            return home
    raise RuntimeError("no nvcc: neither CUDA_HOME nor PATH nor /usr/local/cuda has one")


def unpack():
    os.makedirs(OUT, exist_ok=True)
    for packed in glob.glob(os.path.join(KIT, "*.xz")):
        target = os.path.join(OUT, os.path.basename(packed)[:-3])
        with lzma.open(packed) as source, open(target, "wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
        os.chmod(target, 0o755)


def host_sources():
    """Of the library: the core, and the device's host files but those of the simulator."""
    core = glob.glob(f"{ROOT}/native/*.cpp") + glob.glob(f"{ROOT}/native/kv_transfer/*.cpp")
    return core + glob.glob(f"{ROOT}/cuda/*.cpp") + glob.glob(f"{ROOT}/cuda/kernels/*.cpp")


def build(context):
    unpack()
    home = toolkit()
    capability = run(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"], 60).splitlines()[0].strip().replace(".", "")
    arch = {"90": "90a", "100": "100f"}.get(capability, capability)
    includes = ["-I", f"{ROOT}/native", "-isystem", f"{home}/include"]
    jobs = []
    objects = {"library": [], "kernels": []}

    def compile_host(kind, source, extra=()):
        target = os.path.join(OUT, f"{kind}-{os.path.relpath(source, ROOT).replace('/', '-')}.o")
        objects.setdefault(kind, []).append(target)
        jobs.append([*CXX, *includes, *extra, "-c", source, "-o", target])

    for source in host_sources():
        compile_host("library", source)
    for source in glob.glob(f"{ROOT}/cuda/kernels/*.cu"):
        target = os.path.join(OUT, os.path.basename(source) + ".o")
        objects["kernels"].append(target)
        jobs.append([f"{home}/bin/nvcc", "-std=c++20", "-O3", "-lineinfo", "-gencode", f"arch=compute_{arch},code=sm_{arch}", "-Xcompiler", "-fPIC,-fvisibility=hidden", "-I", f"{ROOT}/native", "-c", source, "-o", target])
    # Tests of single kernels are the simulator's, with memory that both sides may touch.
    tests = sorted(glob.glob(f"{ROOT}/cuda/test/*_test.cpp"))
    through_abi = {"model_test", "transfer_test"}
    support = ["-DLS_TEST_GPU", "-I", f"{ROOT}/native/test", "-I", f"{ROOT}/cuda/test", "-I", f"{ROOT}/cuda", "-I", f"{ROOT}/cpu"]
    for source in [*tests, f"{ROOT}/native/test/main.cpp", f"{ROOT}/cuda/test/abi_engine.cpp", f"{ROOT}/cuda/bench/step_bench.cpp"]:
        compile_host("program", source, support)
    for name in ["sampler", "ops", "isa", "thread_pool"]:
        compile_host("cpu", f"{ROOT}/cpu/{name}.cpp")
    for source in glob.glob(f"{ROOT}/cpu/kernels/*_avx2.cpp"):
        compile_host("cpu", source, ["-mavx2", "-mfma", "-mf16c", "-DLS_SIMD_AVX2"])
    for source in glob.glob(f"{ROOT}/cpu/kernels/*_avx512.cpp"):
        compile_host("cpu", source, ["-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512", "-DLS_SIMD_AVX512"])
    with ThreadPoolExecutor(os.cpu_count() or 4) as pool:
        list(pool.map(lambda job: run(job, context["left"]()), jobs))

    cudart = next((p for p in [f"{home}/lib64/libcudart_static.a", f"{home}/lib/libcudart_static.a"] if os.path.exists(p)), None)
    if cudart is None:
        raise RuntimeError(f"no libcudart_static.a under {home}")
    system = [cudart, "-lpthread", "-ldl", "-lrt"]
    library = os.path.join(OUT, "liblayerscale_cuda.so")
    run(["g++", "-shared", "-o", library, *objects["library"], *objects["kernels"], *system, f"-Wl,--version-script={ROOT}/native/exports.map", "-Wl,-z,defs"], context["left"]())
    program = {os.path.basename(o)[len("program-"):-2]: o for o in objects["program"]}
    programs = {}
    failed = {}
    for source in [*tests, f"{ROOT}/cuda/bench/step_bench.cpp"]:
        name = os.path.basename(source)[:-4]
        key = os.path.relpath(source, ROOT).replace("/", "-")
        parts = [program[key]]
        if name != "step_bench":
            parts.append(program["native-test-main.cpp"])
        if name in through_abi:
            parts.append(program["cuda-test-abi_engine.cpp"])
        target = os.path.join(OUT, name)
        link = ["g++", "-o", target, *parts, *objects["library"], *objects["kernels"], *([] if name in through_abi or name == "step_bench" else objects["cpu"]), *system]
        try:
            run(link, context["left"]())
            programs[name] = target
        except RuntimeError as error:
            failed[name] = str(error)[-500:]
    context["programs"] = programs
    context["through_abi"] = through_abi
    return {"toolkit": home, "arch": f"sm_{arch}", "library_bytes": os.path.getsize(library), "programs": sorted(programs)} | ({"ok": False, "error": f"not linked: {failed}"} if failed else {})
