#!/usr/bin/env bash
# make quickstart: from a fresh clone to a trained model on a CPU, and what it has learnt.
#
#     [TEXT=FILE] [TOKENIZER=train:N] [CONFIG=FILE] [YES=1] scripts/quickstart.sh
#
# Packages, build, text, shards, training, a sample; a second run goes on where the first one stopped. TEXT is a text file
# of yours; otherwise Jane Austen's novels out of a Debian package, else the sources of this repository.
set -eu
cd "$(dirname "$0")/.."
mkdir -p .cache

TEXT=${TEXT:-}
CONFIG=${CONFIG:-configs/tiny.json}
readonly PACKAGE=r-cran-janeaustenr
TOKENIZER=${TOKENIZER:-train:1024}

say() { printf '\n== %s\n' "$*"; }
fail() { # MESSAGE HINT
    printf 'error: %s\nhint:  %s\n' "$1" "$2" >&2
    exit 2
}

[ -f "$CONFIG" ] || fail "there is no config $CONFIG" "CONFIG=configs/tiny.json"
[ -z "$TEXT" ] || [ -f "$TEXT" ] || fail "there is no text file $TEXT" "TEXT=path/to/file.txt"

say "1. packages"
scripts/packages.sh python3
echo "all there"

say "2. build"
make --no-print-directory -j "$(nproc)"

# ---- text ----

# Sets `name` and `inputs`: which text, in which files.
choose_text() {
    if [ -n "$TEXT" ]; then
        name=text_$(basename "${TEXT%.*}" | tr -c 'A-Za-z0-9_\n' _)
        inputs=("$TEXT")
    elif get_austen; then
        name=austen
        inputs=(".cache/$PACKAGE/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb")
        echo "Jane Austen's six novels, public domain, out of the Debian package $PACKAGE"
    else
        name=sources
        mapfile -t inputs < <(find kernels data model scripts tests README.md train_moe.cu \
            -name '*.[ch]' -o -name '*.py' -o -name '*.sh' -o -name '*.cu' -o -name '*.md' | LC_ALL=C sort)
        echo "The package $PACKAGE cannot be had here, so the text is this repository's own sources."
        echo "For real text: make quickstart TEXT=FILE"
    fi
}

# Downloads and unpacks the package without root and without installing it; fails if it cannot be had.
get_austen() {
    [ -f ".cache/$PACKAGE/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb" ] && return
    command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || return 1
    mkdir -p ".cache/$PACKAGE"
    (
        cd .cache
        apt-get -q -o APT::Sandbox::User= download "$PACKAGE" && dpkg-deb -x "$PACKAGE"_*.deb "$PACKAGE"
    ) || {
        echo "apt-get download $PACKAGE has failed; apt-get update (as root) may be what is missing"
        return 1
    }
}

say "3. text"
choose_text
if [ -f "shards/$name/tokenizer.json" ] && [ -f "shards/$name/train_000.bin" ] && [ -z "$TEXT" ]; then
    echo "shards/$name is there already"
else
    python3 scripts/prepare_data.py --tokenizer "$TOKENIZER" --out "shards/$name" "${inputs[@]}"
fi

# ---- training ----

# The config is written for the novels; for another text a copy of it names the other shards and another run folder.
if [ "$name" != austen ]; then
    python3 - "$CONFIG" ".cache/$name.json" "$name" <<'PYTHON'
import json, sys
source, target, name = sys.argv[1:]
config = json.load(open(source))
config["run"] = dict(config.get("run", {}), name=name, dir=f"runs/{name}")
config["data"] = dict(config["data"], train=f"shards/{name}/train_*.bin",
                      val=[{"name": name, "path": f"shards/{name}/val_*.bin"}])
json.dump(config, open(target, "w"), indent=2)
PYTHON
    CONFIG=.cache/$name.json
fi

say "4. training: ./train_moe --config $CONFIG"
run_dir=$(python3 -c 'import json, os, sys
run = json.load(open(sys.argv[1])).get("run", {})
print(run.get("dir", "runs/" + run.get("name", os.path.basename(sys.argv[1])[:-5])))' "$CONFIG")
status=0
./train_moe --config "$CONFIG" || status=$?
if [ $status = 2 ] && compgen -G "$run_dir/step_*" >/dev/null; then
    echo "not trained further, as it says; the sample is from the checkpoint in $run_dir"
elif [ $status != 0 ]; then
    exit $status
fi

# ---- what it has learnt ----

# Reads the sample; prints its words without the prompt's that the training text has, as a share.
known_words() {
    python3 -B - "$prompt" .cache/sample.txt "${inputs[@]}" <<'PYTHON'
import re, sys
sys.path.insert(0, "scripts")
import prepare_data
prompt, sample, inputs = sys.argv[1], sys.argv[2], sys.argv[3:]
prepare_data.say = lambda *_: None
documents, _ = prepare_data.read_documents(inputs, "shards")
train, _ = prepare_data.split_documents(documents, 0.1)
words = lambda text: re.findall("[a-z]+", text.lower())
known = {word for document in train for word in words(document.decode("utf-8", "replace"))}
text = open(sample, encoding="utf-8", errors="replace").read()
said = words(text.replace(prompt, "", 1))
hits = sum(word in known for word in said)
print(f"{hits} of {len(said)} words of the sample ({100 * hits / max(1, len(said)):.0f} %) occur in the training text")
PYTHON
}

prompt="It is a truth"
[ "$name" = austen ] || prompt=$(head -c 2000 "${inputs[0]}" | tr -s '[:space:]' ' ' | cut -d ' ' -f 1-4)
say "5. a sample: ./train_moe generate --config $CONFIG --prompt \"$prompt\" --tokens 200 --temperature 0.7"
./train_moe generate --config "$CONFIG" --prompt "$prompt" --tokens 200 --temperature 0.7 >.cache/sample.txt
cat .cache/sample.txt
echo
known_words
