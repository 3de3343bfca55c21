"""What machine this is, and where CUDA's tools lie on it. Nothing here fails: what cannot be told is left out."""
import ctypes
import glob
import os
import platform
import shutil
import subprocess
import sys

SMI_FIELDS = ["name", "driver_version", "compute_cap", "memory.total", "memory.used", "clocks.sm", "clocks.max.sm", "clocks.max.mem", "power.limit", "temperature.gpu", "mig.mode.current"]


def quick(command, limit_s=20):
    """What a command prints, or None."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def smi():
    """Path of nvidia-smi, or None."""
    return shutil.which("nvidia-smi") or next((path for path in ["/usr/local/nvidia/bin/nvidia-smi", "/usr/bin/nvidia-smi", "/opt/nvidia/bin/nvidia-smi"] if os.path.exists(path)), None)


def gpu():
    """The first GPU as nvidia-smi has it and how many there are; {"count": N} of device nodes where it says nothing; None without any."""
    nodes = [path for path in glob.glob("/dev/nvidia*") if path[len("/dev/nvidia"):].isdigit()]
    tool = smi()
    ask = lambda field: quick([tool, f"--query-gpu={field}", "--format=csv,noheader,nounits"])
    names = ask("name") if tool else None
    if not names:
        return {"count": len(nodes), "note": "nvidia-smi says nothing"} if nodes else None
    every = ask(",".join(SMI_FIELDS))
    # A question is refused whole for a field that a driver does not know; each by itself takes a second where nothing keeps the driver awake.
    facts = dict(zip(SMI_FIELDS, every.splitlines()[0].split(", "))) if every else {field: text.splitlines()[0].strip() for field in SMI_FIELDS[:4] if (text := ask(field))}
    return facts | {"count": len(names.splitlines())}


def clocks():
    """Clocks and power now."""
    tool = smi()
    return quick([tool, "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu", "--format=csv,noheader"]) if tool else None


def driver_folder():
    """Where libcuda.so.1 lies if the loader does not find it by itself, else None."""
    try:
        ctypes.CDLL("libcuda.so.1")
        return None
    except OSError:
        folders = ["/usr/local/nvidia/lib64", "/usr/local/nvidia/lib", "/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/local/cuda/compat", "/run/nvidia/driver/usr/lib/x86_64-linux-gnu"]
        return next((folder for folder in folders if os.path.exists(os.path.join(folder, "libcuda.so.1"))), None)


def toolkits():
    """Folders with bin/nvcc or bin/compute-sanitizer, the likeliest first."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), os.environ.get("LAYERSCALE_CUDA_TOOLKIT")]
    for tool in ["nvcc", "compute-sanitizer"]:
        found = shutil.which(tool)
        homes += [os.path.dirname(os.path.dirname(os.path.realpath(found)))] if found else []
    homes += sorted(glob.glob("/usr/local/cuda*"), reverse=True) + sorted(glob.glob("/opt/cuda*"), reverse=True) + sorted(glob.glob("/opt/nvidia/cuda*"), reverse=True)
    for folder in [*sys.path, *glob.glob("/opt/*/.venv/lib/python3*/site-packages"), *glob.glob("/usr/local/lib/python3*/*-packages")]:
        homes += glob.glob(os.path.join(folder, "nvidia", "cu1*")) + glob.glob(os.path.join(folder, "nvidia", "cuda_nvcc"))
    seen = []
    for home in homes:
        if home and home not in seen and os.path.isdir(os.path.join(home, "bin")):
            seen.append(home)
    return seen


def find_tool(name):
    """Path of a tool of CUDA, or None."""
    found = shutil.which(name)
    for home in toolkits():
        found = found or next((path for path in [os.path.join(home, "bin", name), os.path.join(home, name, name), os.path.join(home, "extras", name, name)] if os.access(path, os.X_OK)), None)
    return found


def facts():
    """Of the machine around the GPU."""
    first = lambda text: text.splitlines()[-1].strip() if text else None
    nvcc = find_tool("nvcc")
    memory = next((line.split()[1] for line in open("/proc/meminfo", encoding="ascii") if line.startswith("MemTotal")), "0")
    model = next((line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo", encoding="utf-8") if line.startswith("model name")), platform.machine())
    return {
        "cpu": model, "cores": len(os.sched_getaffinity(0)), "memory_gib": round(int(memory) / (1 << 20), 1), "kernel": platform.release(), "glibc": " ".join(platform.libc_ver()), "python": platform.python_version(),
        "nvcc": f"{nvcc}: {first(quick([nvcc, '--version']))}" if nvcc else None, "g++": first(quick(["g++", "-dumpfullversion"])), "compute_sanitizer": find_tool("compute-sanitizer"), "driver_folder": driver_folder(),
    }
