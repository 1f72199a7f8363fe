"""Where things are on this machine, what it is, and what its GPU does meanwhile."""
import datetime
import os
import platform
import subprocess

REPOSITORY = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", ".."))
ASKED = "name,clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_throttle_reasons.active"


def ask(*argv):
    """The first line that a program prints; None: it cannot."""
    try:
        p = subprocess.run(argv, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return p.stdout.strip().split("\n")[0] if p.returncode == 0 and p.stdout.strip() else None


def gpu():
    """Name, clocks, power, temperature, reasons to be slow; None: no GPU."""
    return ask("nvidia-smi", f"--query-gpu={ASKED}", "--format=csv,noheader")


def cpu():
    try:
        with open("/proc/cpuinfo") as f:
            return next((x.split(":", 1)[1].strip() for x in f if x.startswith("model name")), platform.machine())
    except OSError:
        return platform.machine()


def now():
    return datetime.datetime.now().astimezone().isoformat(" ", "seconds")


class Place:
    """One daemon with what lies beside it: in build/, in a folder of `make dist` or of `make cuda-pack`."""

    def __init__(self, spind, kernels, out):
        self.spind, self.out = os.path.abspath(spind), os.path.abspath(out)
        self.folder = os.path.dirname(self.spind)
        self.kernels = os.path.abspath(kernels or os.path.join(self.folder, "tests", "cuda"))
        self.env = dict(os.environ)
        library = os.path.join(self.folder, "libspind_cuda.so")
        if os.path.exists(library):
            self.env.setdefault("SPIND_CUDA_LIBRARY", library)
        self.env["LD_LIBRARY_PATH"] = ":".join(x for x in (self.folder, os.environ.get("LD_LIBRARY_PATH")) if x)

    def model(self, name):
        """The description of a model, beside the daemon or in the repository."""
        paths = [os.path.join(x, "configs", "models", name + ".json") for x in (self.folder, REPOSITORY)]
        return next((p for p in paths if os.path.exists(p)), paths[0])

    def file(self, name):
        return os.path.join(self.out, name)

    def commit(self):
        """`make dist` leaves a file; else the repository's, if the daemon was built there."""
        try:
            with open(os.path.join(self.folder, "commit")) as f:
                return f.read().strip()
        except OSError:
            inside = os.path.commonpath([REPOSITORY, self.spind]) == REPOSITORY
            return inside and ask("git", "-C", REPOSITORY, "describe", "--always", "--dirty", "--abbrev=12") or "unknown"

    def describe(self):
        return {"date": now(), "host": platform.node(), "cpu": f"{cpu()}, {len(os.sched_getaffinity(0))} cores",
                "gpu": gpu() or "none", "commit": self.commit(), "spind": ask(self.spind, "version") or "does not start"}


class Clocks:
    """What the GPU says of itself twice a second, in a file; of a stretch of it: the sample of the highest power,
    which tells the clocks under load."""

    def __init__(self, place):
        self.path, self.process = place.file("clocks.csv"), None
        if gpu() is None:
            return
        with open(self.path, "w") as f:
            self.process = subprocess.Popen(
                ["nvidia-smi", "--query-gpu=clocks.sm,power.draw,temperature.gpu", "--format=csv,noheader,nounits", "-lms", "500"],
                stdout=f, stderr=subprocess.DEVNULL)

    def here(self):
        return os.path.getsize(self.path) if self.process else 0

    def since(self, at):
        """What was seen since here(); "": nothing."""
        if self.process is None:
            return ""
        samples = []
        with open(self.path) as f:
            f.seek(at)
            for line in f:
                try:
                    samples.append(tuple(float(x) for x in line.split(",")))
                except ValueError:
                    pass
        samples = [x for x in samples if len(x) == 3]
        if not samples:
            return ""
        sm, power, heat = max(samples, key=lambda x: x[1])
        return f"{sm:,.0f} MHz at {power:.0f} W, {heat:.0f} °C"

    def stop(self):
        if self.process:
            self.process.terminate()
            self.process.wait()
