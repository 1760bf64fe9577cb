#!/usr/bin/env bash
# A binary with CUDA where no GPU can be had: no driver, one that is too old, one that is not ready. "auto" trains on
# the CPU and says why; "cuda" is refused in a line and a hint, exit 2; nothing needs cuBLASLt. The drivers are made
# here: a libcuda.so.1 that knows two functions. Prints each check; exit 1 if one fails.
set -u
cd "$(dirname "$0")/.."
PYTHONPATH=tests PYTHONDONTWRITEBYTECODE=1 python3 - <<'PYTHON'
from trial import *

if "CPU only" in run("--version").stdout:
    print("this binary has no CUDA: nothing to check")
    sys.exit(0)
DRIVER = r"""
#include <stdlib.h>
#include <string.h>
static int number(const char *name) { return atoi(getenv(name)); }
int cuDriverGetVersion(int *version) { *version = number("TEST_DRIVER"); return 0; }
int cuInit(unsigned flags) { (void)flags; return number("TEST_ERROR"); }
static int other(void) { return 999; }
int cuGetProcAddress(const char *name, void **f, int version, unsigned long long flags, int *status) {
    (void)version, (void)flags;
    *f = !strcmp(name, "cuDriverGetVersion") ? (void *)cuDriverGetVersion : !strcmp(name, "cuInit") ? (void *)cuInit
         : !strcmp(name, "cuGetProcAddress") ? (void *)cuGetProcAddress : (void *)other;
    if (status && version >= 12000) *status = 0;
    return 0;
}
int cuGetProcAddress_v2(const char *name, void **f, int version, unsigned long long flags, int *status) {
    return cuGetProcAddress(name, f, version, flags, status);
}
"""
with open(path("driver.c"), "w") as f:
    f.write(DRIVER)
subprocess.run([os.environ.get("CC", "cc").split()[-1], "-shared", "-fPIC", "-o", path("libcuda.so.1"),
                path("driver.c")], check=True)
built = re.search(r"CUDA (\d+)\.(\d+)", run("--version").stdout)
newest = int(built[1]) * 1000 + int(built[2]) * 10


def driver(version, error):
    return {"LD_LIBRARY_PATH": FOLDER, "TEST_DRIVER": str(version), "TEST_ERROR": str(error)}


HIDDEN = {"CUDA_VISIBLE_DEVICES": "-1"}  # with a driver or without
CASES = (
    ("no GPU", HIDDEN, ["no "], "run.device|CUDA_VISIBLE_DEVICES"),
    ("a driver of an older CUDA", driver(newest // 1000 * 1000 - 980, 0), ["the driver supports CUDA %d.2" % (newest //
     1000 - 1), "built with CUDA %s.%s" % built.groups()], "CUDA_HOME"),
    ("no device", driver(newest, 100), ["no GPU"], "CUDA_VISIBLE_DEVICES"),
    ("GPUs that are not ready", driver(newest, 802), ["not ready"], "fabricmanager"),
    ("a driver that was updated under the kernel", driver(newest, 803), ["kernel module"], "reboot"),
    ("a compatibility package", driver(newest, 804), ["compatibility"], "LD_LIBRARY_PATH"))
for number, (name, env, parts, hint) in enumerate(CASES):
    file = config("run%d" % number, run={"device": "cuda"})
    r = train(file, env=env)
    check(name + ", run.device cuda: exit 2, one line and a hint", is_refusal(r, *parts) and
          re.search(hint, r.stderr), said(r))
    check(name + ": nothing was made", not os.path.exists(path("run%d" % number)))
    r = train(file, "run.device=auto", env=env)
    device = re.search("^device .*", r.stdout, re.M)
    check(name + ", run.device auto: trains on the CPU and says why", r.returncode == DONE and not r.stderr and
          device and "cpu, " in device[0] and all(part in device[0] for part in ["no GPU: "] + parts), said(r))
r = train(config("fp8", run={"device": "cuda"}), "precision.compute=fp8", env=HIDDEN)
check("fp8 without a GPU: exit 2", is_refusal(r), said(r))

# ---- plans ----
r = run("plan", "--config", "configs/moe_1b.json", "run.device=cuda", env=HIDDEN)
check("plan for a GPU that is not here", r.returncode == DONE and all(re.search(row, r.stdout) for row in
      ("driver and context", "op scratch", "GEMM workspace", "cuBLASLt", "GEMM kernels", "CUDA graphs", "as expected",
       "recompute +nothing", r"norms +\S+ [MG]iB +\+\S+ \(", r"up_projections +\S+ [MG]iB +\+\S+ \(", "swiglu")),
      said(r))
r = run("plan", "--config", "configs/moe_1b.json", "run.device=cpu", env=HIDDEN)
check("plan for the CPU", r.returncode == DONE and "driver and context" not in r.stdout and " GiB of " in r.stdout,
      said(r))

# ---- the library ----
needed = subprocess.run(["readelf", "-d", BINARY], capture_output=True, text=True).stdout
check("the binary does not need cuBLASLt", "NEEDED" not in needed or "cublas" not in needed, needed)
finish()
PYTHON
