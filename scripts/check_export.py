#!/usr/bin/env python3
"""Holds an export against transformers: are the names right, is the mathematics the same, do the weights survive?

    ./train_moe export-hf --config run.json --out exported --dtype fp32
    ./train_moe eval --config run.json --set precision.compute=fp32 --dump-logits logits.safetensors
    scripts/check_export.py exported --logits logits.safetensors

    scripts/check_export.py exported --resave saved --train-moe ./train_moe

Runs where torch and transformers are (held against 4.57.6 and 5.24.0). Checked, each with a line, exit code 1 if one
fails:

  names    The class that config.json names loads with no missing and no mismatched key. Unexpected are exactly the MTP
           tensors, layers num_hidden_layers and above, for which transformers has no module.
  logits   |ours - theirs| at every position, fp32, eager attention and eager experts, within --tolerance. The weights
           must be those that made the logits: an fp32 export, or a bf16 export of weights that are bf16.
  text     AutoTokenizer gives text with spaces and line ends back.
  resave   save_pretrained writes the same names and the same values (MTP aside); with --train-moe, import-hf makes the
           same weights of both folders."""
import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors import safe_open

failures = 0


def report(name, ok, text):
    global failures
    failures += not ok
    print(f"{'ok  ' if ok else 'FAIL'} {name:8} {text}")


def tensors_of(folder):
    """name -> open file that holds it."""
    files = [safe_open(path, "pt") for path in sorted(Path(folder).glob("*.safetensors"))]
    return {name: file for file in files for name in file.keys()}


def is_mtp(name, n_layers):
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return bool(layer) and int(layer.group(1)) >= n_layers


def load(folder, architecture, dtype, device):
    is_five = int(transformers.__version__.split(".")[0]) >= 5
    options = {"dtype": dtype, "experts_implementation": "eager"} if is_five else {"torch_dtype": dtype}
    model, info = getattr(transformers, architecture).from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True, **options)
    return model.to(device).eval(), info


def stacked(name):
    """How transformers 5 names the tensor that an expert's matrix becomes a part of."""
    name = re.sub(r"\.experts\.\d+\.(gate|up)_proj\.weight$", ".experts.gate_up_proj", name)
    return re.sub(r"\.experts\.\d+\.down_proj\.weight$", ".experts.down_proj", name)


def check_names(info, names, n_layers):
    unexpected = set(info["unexpected_keys"])
    mtp = {name for name in names if is_mtp(name, n_layers)}
    told = {name for name in mtp if name in unexpected or stacked(name) in unexpected}
    # Layer 61 is known to transformers by its number, and not reported.
    silent = {name for name in mtp if name.startswith("model.layers.61.")}
    wrong = set(info["missing_keys"]) | {str(key) for key in info["mismatched_keys"]} | (mtp - told - silent)
    wrong |= {name for name in unexpected if not is_mtp(name, n_layers)}
    report("names", not wrong, f"{len(names)} tensors, {len(mtp)} of MTP" +
           (f"; {len(wrong)} wrong: {sorted(wrong)[:8]}" if wrong else ", nothing missing, nothing else unexpected"))


def check_logits(model, path, tolerance):
    with safe_open(path, "pt") as file:
        tokens, ours = file.get_tensor("tokens").long(), file.get_tensor("logits")
    with torch.no_grad():
        theirs = model(tokens.to(model.device)).logits.float().cpu()
    by_position = (ours - theirs).abs().amax(dim=2).flatten()
    worst, above = int(by_position.argmax()), int((by_position > tolerance).sum())
    difference = by_position[worst].item()
    report("logits", difference <= tolerance and ours.abs().max() > 0,
           f"{tokens.numel()} positions, max |difference| {difference:.3g} at position {worst} "
           f"(median {by_position.median():.3g}, position 0: {by_position[0]:.3g}, last: {by_position[-1]:.3g}; "
           f"{above} above the tolerance; largest logit {ours.abs().max():.3g})")


def check_text(folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "It is  a truth,\n\n  universally acknowledged: 3.14159 \u00e9\u4e2d!"
    ids = tokenizer.encode(text, add_special_tokens=False)
    back = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    report("text", back == text,
           f"{type(tokenizer).__name__}, {len(ids)} ids" + ("" if back == text else f": {back!r}"))


def check_saved(folder, saved, n_layers):
    before, after = tensors_of(folder), tensors_of(saved)
    before = {name: file for name, file in before.items() if not is_mtp(name, n_layers)}
    wrong, wider = sorted(before.keys() ^ after.keys()), []
    for name in sorted(before.keys() & after.keys()):
        x, y = before[name].get_tensor(name), after[name].get_tensor(name)
        # Versions differ in what they keep in F32: the correction bias always, the router's matrix from 5 on.
        if x.dtype != y.dtype and y.dtype == torch.float32:
            wider.append(name)
            x = x.float()
        if x.dtype != y.dtype or not torch.equal(x, y):
            wrong.append(f"{name} ({x.dtype}, {y.dtype})")
    report("resave", not wrong, f"{len(after)} tensors, the same names and values" +
           (f", {len(wider)} of them saved as F32: {wider[0]} ..." if wider else "") if not wrong else
           f"{len(wrong)} differ: {wrong[:8]}")


def check_import(program, folders):
    hashes = []
    for folder in folders:
        with tempfile.TemporaryDirectory() as temporary:
            run = Path(temporary) / "run"
            subprocess.run([program, "import-hf", folder, "--out", run, "--set", "model.num_nextn_predict_layers=0"],
                           check=True, stdout=subprocess.DEVNULL)
            hashes.append(json.loads((run / "step_00000000" / "manifest.json").read_text())["param_hash"])
    report("import", len(set(hashes)) == 1, f"import-hf of both: parameter hashes {' and '.join(hashes)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="what export-hf wrote")
    parser.add_argument("--logits", metavar="FILE", help="of train_moe eval --dump-logits")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="of the logits (1e-4)")
    parser.add_argument("--compute", choices=["float32", "bfloat16"], default="float32",
                        help="for the logits (float32)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--resave", metavar="DIR", help="an empty folder for what save_pretrained writes")
    parser.add_argument("--train-moe", metavar="FILE", help="with --resave: the binary that imports both")
    args = parser.parse_args()

    config = json.loads((Path(args.folder) / "config.json").read_text())
    if "quantization_config" in config:
        sys.exit("error: an FP8 folder needs a GPU and kernels of its own\n"
                 "hint:  check a bf16 or fp32 export; import-hf reads FP8")
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, {args.folder}")
    n_layers, names = config["num_hidden_layers"], tensors_of(args.folder).keys()
    architecture = config["architectures"][0]

    model, info = load(args.folder, architecture, getattr(torch, args.compute), args.device)
    check_names(info, names, n_layers)
    if args.logits:
        check_logits(model, args.logits, args.tolerance)
    if (Path(args.folder) / "tokenizer.json").exists():
        check_text(args.folder)
    del model
    if args.resave:
        # Version 4 would round the correction bias to the model's dtype.
        is_four = transformers.__version__.startswith("4.")
        dtype = torch.float32 if is_four else getattr(torch, config["torch_dtype"])
        model, _ = load(args.folder, architecture, dtype, "cpu")
        model.save_pretrained(args.resave)
        check_saved(args.folder, args.resave, n_layers)
        if args.train_moe:
            check_import(args.train_moe, [args.folder, args.resave])
        else:
            print(f"next: ./train_moe import-hf {args.resave} --out RUN --set model.num_nextn_predict_layers=0")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
