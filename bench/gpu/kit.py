"""What travels beside the sources: the program, its libraries, the checks and the benchmark, in one compressed archive."""
import hashlib
import io
import json
import lzma
import os
import subprocess
import sys
import tarfile

from runner import Failed

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
KIT = os.path.join(ROOT, "dist", "gpu-kit", "kit.tar")
LIMIT_BYTES = 64 << 20  # of the tree with everything carried
SOURCES = ["native", "cuda", "cpu", "src"]


def sources():
    """Hash of what the binaries are made of."""
    digest = hashlib.sha256()
    for top in SOURCES:
        for folder, folders, files in os.walk(os.path.join(ROOT, top)):
            folders.sort()
            for name in sorted(files):
                path = os.path.join(folder, name)
                digest.update(os.path.relpath(path, ROOT).encode() + b"\0")
                with open(path, "rb") as source:
                    digest.update(hashlib.sha256(source.read()).digest())
    return digest.hexdigest()[:16]


def tree_bytes():
    """Of the files that version control knows or would take."""
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    return sum(os.path.getsize(path) for path in (os.path.join(ROOT, name) for name in listed if name) if os.path.isfile(path))


def pack(simulate, stored, target):
    """`stored`: without compression, for use on this machine. Compressing takes minutes: equal parts of the files are found over 64 MiB."""
    programs = "gpu-sim" if simulate else "gpu"
    files = {
        "layerscale": "dist/layerscale", "liblayerscale_cpu.so": "dist/liblayerscale_cpu.so",
        # The simulator takes the place of the device's library, so that everything finds it as it finds the real one.
        "liblayerscale_cuda.so": "dist/liblayerscale_cuda_sim.so" if simulate else "dist/liblayerscale_cuda.so",
        "checks": f"dist/{programs}/checks", "step_bench": f"dist/{programs}/step_bench",
    }
    missing = [path for path in files.values() if not os.path.exists(os.path.join(ROOT, path))]
    if missing:
        raise Failed(f"not built: {', '.join(missing)}; run `bun build.ts all cuda-tests`")
    os.makedirs(os.path.dirname(target), exist_ok=True)
    manifest = json.dumps({"simulated": simulate, "sources": sources(), "files": {name: os.path.getsize(os.path.join(ROOT, path)) for name, path in files.items()}})
    part = f"{target}.part"
    filters = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 3, "dict_size": 64 << 20}]
    with (open(part, "wb") if stored else lzma.open(part, "wb", filters=filters)) as out, tarfile.open(fileobj=out, mode="w|") as archive:
        info = tarfile.TarInfo("manifest.json")
        info.size = len(manifest)
        archive.addfile(info, io.BytesIO(manifest.encode()))
        for name, path in files.items():
            archive.add(os.path.join(ROOT, path), name)
    os.replace(part, target)
    report = {"kit": target, "bytes": os.path.getsize(target), "tree_bytes": tree_bytes()}
    if not stored and report["bytes"] + report["tree_bytes"] > LIMIT_BYTES:
        raise Failed(f"kit and tree have {report['bytes']} + {report['tree_bytes']} bytes, expected at most {LIMIT_BYTES} together")
    return report


def unpack(path, folder):
    """The manifest."""
    options = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    with tarfile.open(path, "r:*") as archive:
        archive.extractall(folder, **options)
    with open(os.path.join(folder, "manifest.json"), encoding="utf-8") as text:
        manifest = json.load(text)
    for name in manifest["files"]:
        os.chmod(os.path.join(folder, name), 0o755)
    return manifest


DEVICE = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
text = ctypes.create_string_buffer(1 << 16)
code = library.ls_device_info(text, len(text))
print(text.value.decode())
sys.exit(code < 0)
"""


def device(runner, library, env):
    """What the library says of the machine; in a process of its own, which may crash or hang."""
    text = runner.must([sys.executable, "-c", DEVICE, library], 30, env=env)
    return json.loads(text.strip().splitlines()[-1])

