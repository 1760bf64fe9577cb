#!/usr/bin/env bash
# export-hf and import-hf from the command line: a run goes out and comes back with the same logits, and what cannot be
# done is one line with exit code 2.
set -eu
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
readonly PROGRAM=$PWD/train_moe
cd "$folder"

cat >run.json <<'JSON'
{"version": 1, "run": {"seed": 7, "dir": "run", "device": "cpu"},
 "model": {"vocab_size": 131, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "q_lora_rank": 20,
  "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "first_k_dense_replace": 1,
  "intermediate_size": 40, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1,
  "moe_intermediate_size": 24, "n_group": 4, "topk_group": 2, "norm_topk_prob": true, "routed_scaling_factor": 1.5,
  "num_nextn_predict_layers": 1, "max_position_embeddings": 32, "rms_norm_eps": 1e-6, "rope_theta": 100.0,
  "bos_token_id": 0, "eos_token_id": 0},
 "data": {"train": "synthetic"},
 "train": {"seq_len": 16, "global_batch_size": 2, "micro_batch_size": 2, "steps": 3, "lr": 1e-2, "init_std": 0.2,
  "bias_update_speed": 0.01},
 "precision": {"compute": "fp32", "moments": "fp32"}}
JSON
readonly SAME=(run.seed=7 train.seq_len=16 train.micro_batch_size=2 train.global_batch_size=2 train.lr_warmup_steps=0
    train.steps=2 precision.compute=fp32 precision.moments=fp32)

# expect_line CODE TEXT COMMAND...: ends with the code and says the text in the first line of stderr.
expect_line() {
    local code=$1 text=$2 got=0
    shift 2
    "$@" >out.txt 2>err.txt || got=$?
    if [ $got != "$code" ] || ! grep -qF -- "$text" err.txt; then
        echo "exit code $got, expected $code and '$text':"
        cat err.txt
        exit 1
    fi
}

"$PROGRAM" --config run.json -q
"$PROGRAM" export-hf --config run.json --out out32 --dtype fp32
"$PROGRAM" export-hf --config run.json --out out16
"$PROGRAM" export-hf --config run.json --out out8 --dtype fp8
"$PROGRAM" import-hf out32 --out back

# the same logits, bit for bit
"$PROGRAM" eval --config run.json --dump-logits before.safetensors
"$PROGRAM" eval --config back/config.json "${SAME[@]}" --dump-logits after.safetensors
cmp before.safetensors after.safetensors
[ "$(stat -c %s before.safetensors)" -gt $((2 * 16 * 131 * 4)) ]

# the imported folder starts a run, which then goes on by itself; so does --init-from of both kinds
"$PROGRAM" --config back/config.json "${SAME[@]}" |
    grep '^resume *weights of back/step_00000000, fresh start' >/dev/null
"$PROGRAM" --config back/config.json "${SAME[@]}" train.steps=3 | grep '^resume *auto: back/step_00000002' >/dev/null
first_loss() { sed -n 's/.*step *1\/.*loss \([0-9.]*\).*/\1/p'; }
from_folder=$("$PROGRAM" --config run.json run.dir=r1 --init-from out32 train.steps=1 | first_loss)
from_checkpoint=$("$PROGRAM" --config run.json run.dir=r2 --init-from run/step_00000003 train.steps=1 | first_loss)
from_fp8=$("$PROGRAM" --config run.json run.dir=r3 --init-from out8 train.steps=1 | first_loss)
[ -n "$from_folder" ] && [ "$from_folder" = "$from_checkpoint" ]
awk -v a="$from_folder" -v b="$from_fp8" 'BEGIN { exit !(a != b && a - b < 0.1 && b - a < 0.1) }'
"$PROGRAM" --config run.json run.dir=r4 --init-from out16 train.steps=1 model.rope_theta=200 2>&1 |
    grep 'out16/config.json is not this model: model.rope_theta' >/dev/null

# without its MTP layer
"$PROGRAM" import-hf out16 --out plain --set model.num_nextn_predict_layers=0 2>&1 |
    grep 'left out: .* tensors of layers 2' >/dev/null

expect_line 2 'out16: is not empty' "$PROGRAM" export-hf --config run.json --out out16
expect_line 2 '--dtype int4 is not known' "$PROGRAM" export-hf --config run.json --out x --dtype int4
expect_line 2 'no --out' "$PROGRAM" export-hf --config run.json
expect_line 2 'no checkpoint in nowhere' "$PROGRAM" export-hf --config run.json run.dir=nowhere --out x
expect_line 2 'is another model: model.rope_theta' "$PROGRAM" export-hf --config run.json model.rope_theta=5 --out x
expect_line 2 'import-hf what?' "$PROGRAM" import-hf --out x
expect_line 2 'no --out' "$PROGRAM" import-hf out16
expect_line 2 'back: is not empty' "$PROGRAM" import-hf out16 --out back
expect_line 2 'no config.json in it' "$PROGRAM" import-hf run --out x
expect_line 2 '--config does not go with the command import-hf' "$PROGRAM" import-hf out16 --out x --config run.json
expect_line 2 'configuration makes it' "$PROGRAM" --config run.json --init-from out16 run.dir=r5 model.v_head_dim=8
expect_line 2 "'extra' is not understood here" "$PROGRAM" import-hf out16 extra --out x
[ ! -e x ] && [ ! -e x.unfinished ]
