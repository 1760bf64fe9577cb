"""What the tests of whole runs share: a small model, shards, starting ./train_moe and reading what it left.

A test is a shell script around Python: `from trial import *`, checks by check(), the end by finish()."""

import array, atexit, copy, json, math, os, re, shutil, signal, struct, subprocess, sys, tempfile, time

FOLDER = tempfile.mkdtemp(prefix="train_moe_")
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
BINARY = os.path.abspath("train_moe")
DONE, FAILED, USER, STOPPED = 0, 1, 2, 3
TIMEOUT_S = 120
if not os.path.exists(BINARY):
    sys.exit("no ./train_moe: run make first")
failed = []


def check(name, ok, detail=""):
    if not ok:
        failed.append(name)
    print("%s  %s%s" % ("ok  " if ok else "FAIL", name, "" if ok else ": %s" % (detail,)), flush=True)
    return ok


def finish():
    print("%d checks failed%s" % (len(failed), "".join("\n  " + name for name in failed)))
    sys.exit(len(failed) > 0)


def path(*names):
    return os.path.join(FOLDER, *names)


# ---- configurations and data ----------------------------------------------------------------------------------------

with open("configs/bytes_debug.json") as f:
    BASE = json.load(f)
BASE["run"]["threads"] = 1


def config(name, **sections):
    """Writes configs/bytes_debug.json with these members of its sections changed, and run.dir FOLDER/name. None as a
    value drops the member. Returns the file."""
    c = copy.deepcopy(BASE)
    c["run"].update(name=name, dir=path(name))
    for section, members in sections.items():
        c.setdefault(section, {}).update(members)
        c[section] = {key: value for key, value in c[section].items() if value is not None}
    with open(path(name + ".json"), "w") as f:
        json.dump(c, f)
    return f.name


def write_shard(name, ids):
    """A shard of 16-bit ids without a data.json beside it."""
    os.makedirs(os.path.dirname(path(name)), exist_ok=True)
    with open(path(name), "wb") as f:
        f.write(struct.pack("<3i", 20240520, 1, len(ids)) + bytes(1012) + array.array("H", ids).tobytes())
    return path(name)


def prepare(out, *inputs):
    """Byte shards of text files. Returns the members of "data"."""
    subprocess.run([sys.executable, "scripts/prepare_data.py", "--tokenizer", "bytes", "--no-ngram", "--out", path(out),
                    *inputs], check=True, capture_output=True)
    return {"train": path(out, "train_*.bin"), "val": [{"name": "held_out", "path": path(out, "val_*.bin")}]}


# ---- running --------------------------------------------------------------------------------------------------------


def environment(more=None):
    """Ours, without what a launcher around this test may have left in it."""
    e = {key: value for key, value in os.environ.items() if not re.match("OMPI_|PMI|SLURM_", key)}
    return {**e, **(more or {})}


def run(*arguments, env=None, **more):
    """./train_moe to its end. Output as text; timed_out tells a hang."""
    return subprocess.run([BINARY, *arguments], capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S,
                          env=environment(env), **more)


def train(file, *arguments, **more):
    return run("--config", file, *arguments, **more)


def start(*arguments, env=None, **more):
    return subprocess.Popen([BINARY, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env=environment(env), **more)


def act_at_step(file, step, act, *arguments, env=None):
    """Trains, and calls act(process) when the line of that step (a number, or a pattern) appears. Returns exit code,
    stdout and stderr."""
    p = start("--config", file, *arguments, env=env)
    lines = []
    for line in p.stdout:
        lines.append(line)
        if re.search(r"step +%s/" % step, line):
            act(p)
            break
    out, err = p.communicate(timeout=TIMEOUT_S)
    return p.returncode, "".join(lines) + out, err


# ---- what a run leaves ----------------------------------------------------------------------------------------------

VARYING = ("time", "ms", "data_wait_ms", "tokens_per_s", "tflops", "mfu", "gpu", "seconds", "waited_s", "wall_s", "on_disk_s",
           "ranks_ms", "slowest", "slowest_host")


def records(folder, kind):
    """The records of a kind in log.jsonl, without what a clock says."""
    with open(path(folder, "log.jsonl")) as f:
        lines = [json.loads(line) for line in f]
    return [{k: v for k, v in line.items() if k not in VARYING} for line in lines if line["kind"] == kind]


def losses(folder):
    return [r["loss"] for r in records(folder, "step")]


def last_hash(folder):
    """Of the parameters, as the newest checkpoint has it."""
    with open(path(folder, checkpoints(folder)[-1], "manifest.json")) as f:
        return json.load(f)["param_hash"]


def hash_bytes(data):
    """As kernels/base/file.c has it."""
    mask, h = (1 << 64) - 1, 0xCBF29CE484222325
    for i in range(0, len(data), 8):
        word = data[i:i + 8]
        h ^= int.from_bytes(word, "little") ^ (len(word) << 56 if len(word) < 8 else 0)
        h = h * 0x9E3779B97F4A7C15 & mask
        h ^= h >> 29
    for _ in range(2):
        h ^= h >> 32
        h = h * 0xD6E8FEB86659FD93 & mask
    return h ^ h >> 32


def edit_manifest(checkpoint, old, new):
    """Replaces a text in a manifest, as another train_moe could have written it: its hash is right."""
    with open(os.path.join(checkpoint, "manifest.json"), "rb") as f:
        body, key, _ = f.read().rpartition(b'"manifest_hash": "')
    assert old.encode() in body, old
    body = body.replace(old.encode(), new.encode(), 1)
    with open(f.name, "wb") as f:
        f.write(body + key + b'%016x"\n}\n' % hash_bytes(body))


def checkpoints(folder):
    return sorted(name for name in os.listdir(path(folder)) if re.fullmatch(r"step_\d+", name))


def snapshot(folder):
    """Every file of a folder, but those that a refused start may touch."""
    return {os.path.join(root, name): open(os.path.join(root, name), "rb").read()
            for root, _, names in os.walk(path(folder)) for name in names if name != "lock"}


def is_refusal(r, *parts, code=USER):
    """Exit code 2, nothing on stdout, and on stderr one error line, one hint at most, and these parts in them."""
    lines = r.stderr.splitlines()
    return (r.returncode == code and not r.stdout and 1 <= len(lines) <= 2 and lines[0].startswith("error: ")
            and all(line.startswith("hint: ") for line in lines[1:]) and all(part in r.stderr for part in parts))


def said(r):
    return r.returncode, r.stdout[-600:], r.stderr[-600:]
