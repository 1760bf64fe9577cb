"""What the tests of runs over several ranks share beside trial.py: mpirun, and a small run that has everything. Without
Open MPI, here or in the binary, the test ends where this is imported."""

import random
from trial import *

launcher = shutil.which("mpirun") and subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout
if not launcher or "Open MPI" not in launcher or "Open MPI" not in run("--version").stdout:
    print("skipped: no Open MPI (Debian: libopenmpi-dev openmpi-bin)")
    sys.exit(0)

MPIRUN = ["mpirun", "-q", "--bind-to", "none", "--oversubscribe", "--mca", "mpi_yield_when_idle", "1"]
if os.geteuid() == 0:
    MPIRUN.append("--allow-run-as-root")
if not shutil.which("ssh") and not shutil.which("rsh"):
    MPIRUN += ["--mca", "plm", "isolated"]  # else Open MPI looks for them, though nobody is to be reached
ENV = {"OMP_NUM_THREADS": "1"}


def ranks(n, *arguments, binary=BINARY, options=(), **more):
    """options: of mpirun."""
    return subprocess.run([*MPIRUN, *options, "-np", str(n), binary, *arguments], capture_output=True, text=True,
                          errors="replace", timeout=TIMEOUT_S, env=environment(ENV), **more)


def train_on(n, file, *arguments, **more):
    return ranks(n, "--config", file, *arguments, **more)


def start_on(n, file, *arguments, options=()):
    return subprocess.Popen([*MPIRUN, *options, "-np", str(n), BINARY, "--config", file, *arguments], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, env=environment(ENV))


def pid_of(launcher, rank):
    """The process of a rank: mpirun's child that was told this number."""
    with open("/proc/%d/task/%d/children" % (launcher.pid, launcher.pid)) as f:
        children = f.read().split()
    for child in children:
        with open("/proc/%s/environ" % child) as f:
            if "OMPI_COMM_WORLD_RANK=%d\0" % rank in f.read():
                return int(child)


def until_step(p, step):
    lines = []
    for line in p.stdout:
        lines.append(line)
        if re.search(r"step +%d/" % step, line):
            break
    return lines


# ---- a run with everything -------------------------------------------------------------------------------------------

# The text never changes and initial weights are large: then no expert is chosen by a last bit, in 10 steps of 128 tokens.
rng = random.Random(5)
words = ["".join(rng.choice("aeiounrstlkm") for _ in range(rng.randrange(2, 8))) for _ in range(60)]
with open(path("text"), "w") as text:
    text.write(" ".join(rng.choice(words) for _ in range(1200)))
DATA = prepare("shards", path("text"))
NUMBERS = {"fp32": {"compute": "fp32", "moments": "fp32"}, "bf16": {"compute": "bf16", "moments": "bf16"}}
STEPS = 10
EVERYTHING = dict(
    run={"device": "cpu"},
    data={**DATA, "document_mask": True},
    train={"steps": STEPS, "seq_len": 32, "micro_batch_size": 1, "global_batch_size": 4, "lr": 3e-3,
           "init_std": 0.1, "lr_warmup_steps": 2, "bias_update_speed": 0.01},
    eval={"every_steps": 5, "tokens": 300},
    sample={"every_steps": 5, "prompts": ["static "], "tokens": 5},
    checkpoint={"every_steps": 5},
    log={"hash_every_steps": 1},
)


# Tiles need widths of 128.
FP8_WIDTHS = dict(hidden_size=128, kv_lora_rank=128, q_lora_rank=128, v_head_dim=64, qk_nope_head_dim=16,
                  qk_rope_head_dim=16, intermediate_size=256, moe_intermediate_size=128, max_position_embeddings=128,
                  num_nextn_predict_layers=0)
FP8 = {**EVERYTHING, "model": FP8_WIDTHS, "precision": {"compute": "fp8", "moments": "bf16"}, "eval": {}, "sample": {},
       "train": {**EVERYTHING["train"], "steps": 4, "seq_len": 128, "global_batch_size": 2}}
# For stages; a token's experts are on one rank.
FP8_DEEP = {**FP8, "model": {**FP8_WIDTHS, "num_hidden_layers": 9, "first_k_dense_replace": 3, "topk_group": 1},
            "sample": {"every_steps": 0}, "train": {**FP8["train"], "global_batch_size": 8}}


def part(name, precision="fp32", mtp=1, **more):
    return config(name, precision=NUMBERS[precision], model={"num_nextn_predict_layers": mtp},
                  **{**EVERYTHING, **more})


def staged(name, mtp=0, batch=8, **more):
    """For stages of nine layers, the first three dense: some have no experts, others no text."""
    return config(name, precision=NUMBERS["fp32"], model={"num_hidden_layers": 9, "first_k_dense_replace": 3,
                                                          "num_nextn_predict_layers": mtp},
                  **{**EVERYTHING, "train": {**EVERYTHING["train"], "global_batch_size": batch}, **more})


def pipeline(n, file, pp, schedule, *arguments):
    return train_on(n, file, "parallel.pp=%d" % pp, "parallel.schedule=" + schedule, *arguments)


def hashes(folder):
    return [r["hash"] for r in records(folder, "step")]


def saved_slices(folder, checkpoint):
    """(tensor, offset, file, position in the file, bytes) of every slice, as manifest and headers say."""
    with open(path(folder, checkpoint, "manifest.json")) as f:
        manifest = json.load(f)
    headers = {}
    for name in manifest["files"]:
        with open(path(folder, checkpoint, name), "rb") as f:
            size = int.from_bytes(f.read(8), "little")
            headers[name] = 8 + size, json.loads(f.read(size))
    for tensor, about in manifest["tensors"].items():
        for s in about["slices"]:
            start, header = headers[s["file"]]
            begin, end = header[tensor]["data_offsets"]
            yield tensor, s["offset"], path(folder, checkpoint, s["file"]), start + begin, end - begin


def saved_state(folder, checkpoint):
    """The bytes of every tensor, whoever has written them."""
    state = {}
    for tensor, offset, file, position, size in sorted(saved_slices(folder, checkpoint)):
        with open(file, "rb") as f:
            f.seek(position)
            state[tensor] = state.get(tensor, b"") + f.read(size)
    return state


def scores(r):
    """What eval says: losses and scores, without time of day and milliseconds."""
    return [column.strip() for column in r.stdout.split("|")[2:-1]] if r.returncode == DONE else said(r)


def far(one, other, first, all, steps=STEPS):
    """The steps whose losses differ by more than `first` in step 1, or `all` later, relative."""
    a, b = (losses(f) if os.path.exists(path(f, "log.jsonl")) else [] for f in (one, other))
    if len(a) != steps or len(b) != steps:
        return "steps: %d, %d" % (len(a), len(b))
    return [(i + 1, x, y) for i, (x, y) in enumerate(zip(a, b)) if abs(x - y) > (first if i == 0 else all) * abs(x)]
