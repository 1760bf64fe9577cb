#!/usr/bin/env python3
"""Writes tests/golden/: what other implementations compute for small random models. tests/model/test_golden.c reads it.

    python3 scripts/make_golden.py [--out tests/golden]

Needs torch >= 2.6 and transformers >= 5.17; runs on a CPU in about a minute. Two sources of numbers:

  transformers   Hugging Face's DeepseekV3ForCausalLM in fp32 with eager attention and experts: logits, the loss of its
                 own labels=, the gradient of every parameter, ten steps of torch.optim.AdamW.
  reference      the class Reference below in fp64, for what transformers does not train: multi-token prediction, the
                 sequence-wise balance loss, the document mask. It is first compared with transformers on every model
                 above, and its MTP with the MtpModel that transformers uses for drafting.

A case is NAME.json (where it comes from, a whole configuration, losses) and NAME.safetensors:

  <name>         every tensor by its Hugging Face name, experts one by one; BF16, since weights are drawn so that they
                 need no more, the router bias F32
  grad.<name>    gradient of the loss of the first step (a mean, as configured), F32
  logits         (B*S, V) of the main model in the first step, F32
  windows        (steps, B, S + 1 + MTP depths) token ids, I32: the batch of each step

Weights and tokens are random, but drawn again until no choice of an expert or a group is nearly a tie and the same ten
steps in fp32 and in fp64 stay close, so that rounding decides nothing. versions.json holds what made the files, how
well the two sources agree, and facts about the installed transformers that import and export of its folders rely on.
"""
import argparse
import datetime
import json
import math
import os
import platform
import tempfile

import safetensors.torch
import torch
import torch.nn.functional as F
import transformers
from transformers.modeling_layers import MtpModel
from transformers.models.deepseek_v3 import modeling_deepseek_v3

STEPS = 10
TRAIN = {"lr": 3e-3, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
# Distances below which a choice counts as a tie: in the step whose gradients are stored, and in any step.
MARGIN_FIRST, MARGIN = 5e-4, 5e-5
# What rounding to fp32 may change in any loss of the ten steps.
ROUNDING = 1e-6

# ---- cases -----------------------------------------------------------------------------------------------------------

MODEL = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
    "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 3,
    "q_lora_rank": None, "kv_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 10,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "intermediate_size": 40,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 8,
    "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    "norm_topk_prob": True, "routed_scaling_factor": 1.5, "num_nextn_predict_layers": 0,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": None,
    "max_position_embeddings": 4096, "attention_bias": False, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 0,
}


def yarn(mscale, mscale_all_dim):
    """DeepSeek-V3's own numbers; a rope width of 16 puts frequencies on both sides of the ramp and on it."""
    return {"rope_scaling": {"type": "yarn", "factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": mscale,
                             "mscale_all_dim": mscale_all_dim, "original_max_position_embeddings": 4096},
            "qk_rope_head_dim": 16, "max_position_embeddings": 163840}


GROUPS = {"n_group": 4, "topk_group": 2}
# The norm lies around 3: with this bound some steps are clipped and some not. Where all are, AdamW hides by how much.
SOMETIMES_CLIPPED = {"grad_clip": 3.3}
# name: (changes to MODEL, mean of the router bias, settings of data and training)
TRANSFORMERS_CASES = {
    "direct_q": ({}, 0.0, {}),
    # Every biased score is negative: a mask of 0 instead of -inf would choose other experts.
    "q_lora_groups_negative_bias": ({"q_lora_rank": 14, "first_k_dense_replace": 0, "num_experts_per_tok": 3,
                                     "routed_scaling_factor": 2.5, **GROUPS}, -1.5, SOMETIMES_CLIPPED),
    "q_lora_yarn": ({"q_lora_rank": 14, "num_hidden_layers": 3, **GROUPS, **yarn(1.0, 1.0)}, 0.0, {}),
    "direct_q_yarn_mscales": ({"first_k_dense_replace": 0, "n_shared_experts": 2, "norm_topk_prob": False,
                               "rope_theta": 50000.0, **yarn(0.707, 1.0)}, -0.1, {}),
}
REFERENCE_CASES = {
    "mtp": ({"num_nextn_predict_layers": 1, **GROUPS}, 0.0, {}),
    "mtp2_documents": ({"q_lora_rank": 14, "num_nextn_predict_layers": 2, "num_experts_per_tok": 3},
                       0.0, {"document_mask": True}),
    "balance": ({"first_k_dense_replace": 0, "num_experts_per_tok": 3, **GROUPS}, -0.2,
                {"balance_alpha": 0.05, **SOMETIMES_CLIPPED}),
    "mtp_balance_documents": ({"num_nextn_predict_layers": 1, **GROUPS, **yarn(1.0, 1.0)},
                              0.0, {"document_mask": True, "balance_alpha": 0.05}),
}
BATCH, SEQUENCE = 2, 20
DOCUMENT_TOKEN = 0


def configuration(changes, settings):
    """What the trainer's config_parse reads."""
    return {
        "version": 1,
        "run": {"seed": 1},
        "model": {**MODEL, **changes},
        "data": {"train": "synthetic", "document_mask": settings.get("document_mask", False),
                 "document_token": DOCUMENT_TOKEN},
        "train": {"seq_len": SEQUENCE, "global_batch_size": BATCH, "micro_batch_size": BATCH, "steps": STEPS, **TRAIN,
                  "grad_clip": settings.get("grad_clip", 1.0), "bias_update_speed": 0,
                  "balance_alpha": settings.get("balance_alpha", 0), "mtp_loss_weight": 0.3},
        "precision": {"compute": "fp32", "moments": "fp32"},
    }


def n_blocks(model):
    return model["num_hidden_layers"] + model["num_nextn_predict_layers"]


def is_moe(model, block):
    return block >= model["first_k_dense_replace"]


def shapes(model):
    """Names and shapes of all tensors, in the released layout; the MTP block has no copies of embedding and head."""
    m, D = model, model["hidden_size"]
    heads, rope, latent = m["num_attention_heads"], m["qk_rope_head_dim"], m["kv_lora_rank"]
    qk = heads * (m["qk_nope_head_dim"] + rope)
    out = {"model.embed_tokens.weight": (m["vocab_size"], D), "model.norm.weight": (D,),
           "lm_head.weight": (m["vocab_size"], D)}

    def mlp(prefix, width):
        out[prefix + "gate_proj.weight"] = out[prefix + "up_proj.weight"] = (width, D)
        out[prefix + "down_proj.weight"] = (D, width)

    for b in range(n_blocks(m)):
        p = f"model.layers.{b}."
        if b >= m["num_hidden_layers"]:
            out[p + "enorm.weight"] = out[p + "hnorm.weight"] = out[p + "shared_head.norm.weight"] = (D,)
            out[p + "eh_proj.weight"] = (D, 2 * D)
        out[p + "input_layernorm.weight"] = out[p + "post_attention_layernorm.weight"] = (D,)
        if m["q_lora_rank"]:
            out[p + "self_attn.q_a_proj.weight"] = (m["q_lora_rank"], D)
            out[p + "self_attn.q_a_layernorm.weight"] = (m["q_lora_rank"],)
            out[p + "self_attn.q_b_proj.weight"] = (qk, m["q_lora_rank"])
        else:
            out[p + "self_attn.q_proj.weight"] = (qk, D)
        out[p + "self_attn.kv_a_proj_with_mqa.weight"] = (latent + rope, D)
        out[p + "self_attn.kv_a_layernorm.weight"] = (latent,)
        out[p + "self_attn.kv_b_proj.weight"] = (heads * (m["qk_nope_head_dim"] + m["v_head_dim"]), latent)
        out[p + "self_attn.o_proj.weight"] = (D, heads * m["v_head_dim"])
        if not is_moe(m, b):
            mlp(p + "mlp.", m["intermediate_size"])
            continue
        out[p + "mlp.gate.weight"] = (m["n_routed_experts"], D)
        out[p + "mlp.gate.e_score_correction_bias"] = (m["n_routed_experts"],)
        for e in range(m["n_routed_experts"]):
            mlp(f"{p}mlp.experts.{e}.", m["moe_intermediate_size"])
        mlp(p + "mlp.shared_experts.", m["n_shared_experts"] * m["moe_intermediate_size"])
    return out


def is_bias(name):
    return name.endswith("e_score_correction_bias")


def draw(model, bias_mean, has_documents, seed):
    """Weights (f32, exact in BF16 except the bias) and windows of ids."""
    g = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes(model).items():
        x = torch.randn(shape, generator=g)
        if is_bias(name):
            weights[name] = bias_mean + 0.15 * x
        elif len(shape) == 1:
            weights[name] = (1 + 0.2 * x).bfloat16().float()
        else:
            scale = 0.3 if "mlp.gate." in name or "embed" in name else 0.2 if "lm_head" in name else 0.15
            weights[name] = (scale * x).bfloat16().float()
    length = SEQUENCE + 1 + model["num_nextn_predict_layers"]
    # Three batches in turn, so that the losses of the ten steps fall.
    windows = torch.randint(1, model["vocab_size"], (3, BATCH, length), generator=g, dtype=torch.int32)
    if has_documents:  # of 1 to 7 tokens; the second sequence begins inside one
        for i, window in enumerate(windows.view(-1, length)):
            at = 4 * (i % 2)
            while at < length:
                window[at] = DOCUMENT_TOKEN
                at += int(torch.randint(1, 8, (1,), generator=g))
    return weights, windows[torch.arange(STEPS) % 3].contiguous()


# ---- the reference ---------------------------------------------------------------------------------------------------

def rmsnorm(x, w, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w


def mscale(factor, m):
    return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0


def rope_tables(model):
    """inv_freq, the factor of cos and sin, and the factor of the softmax scale. (V2 eq. 19 ff.)"""
    dim, theta, yarn_ = model["qk_rope_head_dim"], model["rope_theta"], model["rope_scaling"]
    inv = torch.tensor([theta ** (-2 * j / dim) for j in range(dim // 2)], dtype=torch.float64)
    if yarn_ is None:
        return inv, 1.0, 1.0

    def turns(n):
        return dim * math.log(yarn_["original_max_position_embeddings"] / (n * 2 * math.pi)) / (2 * math.log(theta))
    low = max(math.floor(turns(yarn_["beta_fast"])), 0)
    high = min(math.ceil(turns(yarn_["beta_slow"])), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 0.001)).clamp(0, 1)
    inv = inv / yarn_["factor"] * ramp + inv * (1 - ramp)
    every = mscale(yarn_["factor"], yarn_["mscale_all_dim"])
    return inv, mscale(yarn_["factor"], yarn_["mscale"]) / every, every ** 2


def rotate(x, cos, sin):
    """Pairs (2j, 2j+1) as complex numbers."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


class Batch:
    """Tokens, targets (-1 = none), positions and document starts of windows (B, S + 1 + depths)."""

    def __init__(self, windows, depths, has_documents, n_scored):
        windows = windows.long()
        B, S = windows.shape[0], windows.shape[1] - 1 - depths
        self.tokens = [windows[:, k:k + S] for k in range(depths + 1)]
        self.targets = [windows[:, k + 1:k + 1 + S].clone() for k in range(depths + 1)]
        self.start = torch.zeros(B, S, dtype=torch.long)
        for k in range(depths + 1):
            self.targets[k][:, n_scored:] = -1
        for b in range(B if has_documents else 0):
            is_start = [int(x) == DOCUMENT_TOKEN for x in windows[b]]
            for t in range(S):
                before = [i for i in range(t + 1) if is_start[i]]
                self.start[b, t] = before[-1] if before else 0
                for k in range(1, depths + 1):
                    if any(is_start[t + 1:t + k + 1]):
                        self.targets[k][b, t] = -1
        at = torch.arange(S)
        self.position = at - self.start
        self.visible = (at[None, None, :] <= at[None, :, None]) & (at[None, None, :] >= self.start[:, :, None])


class Reference:
    """The model straight from the report: MLA un-absorbed, every expert on every token times its weight or zero."""

    def __init__(self, model, weights, dtype=torch.float64):
        self.m = model
        self.w = {name: x.to(dtype, copy=True).requires_grad_(not is_bias(name)) for name, x in weights.items()}
        self.dtype = dtype
        inv, self.cos_scale, self.softmax_factor = rope_tables(model)
        self.inv_freq = inv.float().to(dtype)  # the trainer and transformers keep them in f32
        self.margin = math.inf

    def parameters(self):
        return {name: x for name, x in self.w.items() if x.requires_grad}

    def norm(self, x, name):
        return rmsnorm(x, self.w[name + ".weight"], self.m["rms_norm_eps"])

    def mlp(self, x, prefix):
        w = self.w
        gate, up = x @ w[prefix + "gate_proj.weight"].T, x @ w[prefix + "up_proj.weight"].T
        return (F.silu(gate) * up) @ w[prefix + "down_proj.weight"].T

    def attention(self, x, p, batch):
        m, w, (B, S, _) = self.m, self.w, x.shape
        H, nope, rope, value = m["num_attention_heads"], m["qk_nope_head_dim"], m["qk_rope_head_dim"], m["v_head_dim"]
        if m["q_lora_rank"]:
            q = self.norm(x @ w[p + "q_a_proj.weight"].T, p + "q_a_layernorm") @ w[p + "q_b_proj.weight"].T
        else:
            q = x @ w[p + "q_proj.weight"].T
        q = q.view(B, S, H, nope + rope)
        latent, k_rope = (x @ w[p + "kv_a_proj_with_mqa.weight"].T).split([m["kv_lora_rank"], rope], -1)
        kv = (self.norm(latent, p + "kv_a_layernorm") @ w[p + "kv_b_proj.weight"].T).view(B, S, H, nope + value)
        angle = batch.position.to(self.dtype)[:, :, None] * self.inv_freq
        cos, sin = angle.cos()[:, :, None] * self.cos_scale, angle.sin()[:, :, None] * self.cos_scale
        q = torch.cat((q[..., :nope], rotate(q[..., nope:], cos, sin)), -1)
        k_rope = rotate(k_rope[:, :, None], cos, sin).expand(B, S, H, rope)
        k = torch.cat((kv[..., :nope], k_rope), -1)
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * (self.softmax_factor / math.sqrt(nope + rope))
        scores = scores.masked_fill(~batch.visible[:, None], -math.inf)
        out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), kv[..., nope:])
        return out.reshape(B, S, H * value) @ w[p + "o_proj.weight"].T

    def near(self, sorted_values, k):
        """Notes how far the k-th largest is from the next."""
        if k < sorted_values.shape[-1]:
            gap = sorted_values[..., k - 1] - sorted_values[..., k]
            self.margin = min(self.margin, float(gap.detach().min()))

    def moe(self, u, p):
        """Output, and sum_i f_i P_i of every sequence. (V3 eq. 12-20)"""
        m, (B, S, D) = self.m, u.shape
        E, K, n_group = m["n_routed_experts"], m["num_experts_per_tok"], m["n_group"]
        s = (u @ self.w[p + "gate.weight"].T).sigmoid()
        z = (s + self.w[p + "gate.e_score_correction_bias"]).detach()
        if m["topk_group"] < n_group:
            group = z.view(B, S, n_group, E // n_group).topk(2, -1)[0].sum(-1)
            self.near(group.sort(-1, descending=True)[0], m["topk_group"])
            keep = torch.zeros_like(group).scatter(-1, group.topk(m["topk_group"], -1)[1], 1).bool()
            z = z.masked_fill(~keep.repeat_interleave(E // n_group, -1), -math.inf)
        self.near(z.sort(-1, descending=True)[0], K)
        chosen = torch.zeros_like(z).scatter(-1, z.topk(K, -1)[1], 1)
        weight = s * chosen
        if m["norm_topk_prob"]:
            weight = weight / weight.sum(-1, keepdim=True)
        weight = weight * m["routed_scaling_factor"]
        y = self.mlp(u, p + "shared_experts.")
        for e in range(E):
            y = y + weight[..., e:e + 1] * self.mlp(u, f"{p}experts.{e}.")
        # The balance loss has its own choice: unbiased, without groups, and without a gradient.
        best = s.detach()
        self.near(best.sort(-1, descending=True)[0], K)
        f = torch.zeros_like(best).scatter(-1, best.topk(K, -1)[1], 1).sum(1) * E / (K * S)
        P = (s / s.sum(-1, keepdim=True)).mean(1)
        return y, (f * P).sum(-1)

    def block(self, x, b, batch):
        p = f"model.layers.{b}."
        x = x + self.attention(self.norm(x, p + "input_layernorm"), p + "self_attn.", batch)
        u = self.norm(x, p + "post_attention_layernorm")
        if not is_moe(self.m, b):
            return x + self.mlp(u, p + "mlp."), 0
        y, balance = self.moe(u, p + "mlp.")
        return x + y, balance

    def forward(self, batch):
        """Logits by depth, and sum_i f_i P_i summed over the MoE layers, a mean over the sequences."""
        m, w, L = self.m, self.w, self.m["num_hidden_layers"]
        embed = w["model.embed_tokens.weight"]
        x, balance = embed[batch.tokens[0]], torch.zeros(1, dtype=self.dtype)
        for b in range(L):
            x, part = self.block(x, b, batch)
            balance = balance + part
        h = self.norm(x, "model.norm")
        logits = [h @ w["lm_head.weight"].T]
        for k in range(1, m["num_nextn_predict_layers"] + 1):
            p = f"model.layers.{L + k - 1}."
            both = torch.cat((self.norm(embed[batch.tokens[k]], p + "enorm"), self.norm(h, p + "hnorm")), -1)
            x, part = self.block(both @ w[p + "eh_proj.weight"].T, L + k - 1, batch)
            balance = balance + part
            h = self.norm(x, p + "shared_head.norm")
            logits.append(h @ w["lm_head.weight"].T)
        return logits, balance.mean()

    def losses(self, batch):
        """Mean losses by depth, balance, logits of depth 0."""
        logits, balance = self.forward(batch)
        means = [F.cross_entropy(x.flatten(0, 1), t.flatten(), ignore_index=-1) for x, t in zip(logits, batch.targets)]
        return means, balance, logits[0]


# ---- training --------------------------------------------------------------------------------------------------------

class Run:
    """Ten steps: losses by depth, balance and gradient norm of each; logits and gradients of the first."""

    def __init__(self):
        self.losses, self.balance, self.grad_norm = [], [], []


def train(named, loss_of_step, clip, bound):
    """loss_of_step(i) = (the loss, [losses by depth], balance, logits). named: all parameters by name."""
    run = Run()
    matrices = [x for x in named.values() if x.ndim >= 2]
    vectors = [x for x in named.values() if x.ndim < 2]
    groups = [{"params": matrices, "weight_decay": TRAIN["weight_decay"]}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=TRAIN["lr"], betas=(TRAIN["beta1"], TRAIN["beta2"]), eps=TRAIN["eps"])
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        loss, depths, balance, logits = loss_of_step(step)
        loss.backward()
        if step == 0:
            run.logits = logits.detach().clone()
            run.gradients = {name: torch.zeros_like(x) if x.grad is None else x.grad.clone()
                             for name, x in named.items()}
        run.losses.append([float(x.detach()) for x in depths])
        run.balance.append(float(balance))
        run.grad_norm.append(float(clip(list(named.values()), bound)))
        optimizer.step()
    return run


def clip_torch(parameters, bound):
    return torch.nn.utils.clip_grad_norm_(parameters, bound)


def clip_exact(parameters, bound):
    """Without the 1e-6 that torch adds to the norm."""
    gradients = [x.grad for x in parameters if x.grad is not None]
    norm = math.sqrt(sum(float(g.pow(2).sum()) for g in gradients))
    for g in gradients:
        g.mul_(min(1.0, bound / norm))
    return norm


def train_reference(config, weights, windows, n_scored, clip, dtype=torch.float64):
    """The run, and the margins of the first step and of all."""
    model, settings = config["model"], config["train"]
    depths = model["num_nextn_predict_layers"]
    reference = Reference(model, weights, dtype)
    margins = []

    def loss_of_step(step):
        batch = Batch(windows[step], depths, config["data"]["document_mask"], n_scored)
        means, balance, logits = reference.losses(batch)
        loss = means[0] + settings["balance_alpha"] * balance
        for mean in means[1:]:
            loss = loss + settings["mtp_loss_weight"] / depths * mean
        margins.append(reference.margin)
        return loss, means, balance.detach(), logits
    return train(reference.parameters(), loss_of_step, clip, settings["grad_clip"]), margins[0], margins[-1]


def draw_well_posed(config, bias_mean, n_scored, clip, first_seed):
    for seed in range(first_seed, first_seed + 100):
        weights, windows = draw(config["model"], bias_mean, config["data"]["document_mask"], seed)
        run, first, every = train_reference(config, weights, windows, n_scored, clip)
        if first < MARGIN_FIRST or every < MARGIN:
            continue
        in_f32 = train_reference(config, weights, windows, n_scored, clip, torch.float32)[0]
        if compare(in_f32, run)["losses"] < ROUNDING:
            return weights, windows, run, seed, every
    raise SystemExit("every draw had a near tie, or was too sensitive to rounding")


# ---- transformers ----------------------------------------------------------------------------------------------------

def write_folder(folder, model, weights, dtype=torch.float32):
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(model, file)
    tensors = {name: x if is_bias(name) else x.to(dtype) for name, x in weights.items()}
    safetensors.torch.save_file(tensors, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})


def load_folder(folder, **options):
    options = {"dtype": torch.float32, "attn_implementation": "eager", "experts_implementation": "eager", **options}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)


def by_expert(model, stacked):
    """transformers' parameters (experts stacked, gate over up) by the names of the files."""
    out, width = {}, model["moe_intermediate_size"]
    for name, x in stacked.items():
        if name.endswith("experts.gate_up_proj"):
            for e in range(x.shape[0]):
                prefix = name.replace("gate_up_proj", f"{e}.")
                out[prefix + "gate_proj.weight"], out[prefix + "up_proj.weight"] = x[e, :width], x[e, width:]
        elif name.endswith("experts.down_proj"):
            for e in range(x.shape[0]):
                out[name.replace("down_proj", f"{e}.down_proj.weight")] = x[e]
        else:
            out[name] = x
    return out


def train_transformers(config, weights, windows, folder):
    model = config["model"]
    write_folder(folder, model, weights)
    net, info = load_folder(folder)
    assert not any(info.values()), info
    net.train()

    def loss_of_step(step):
        ids = windows[step][:, :SEQUENCE].long()
        out = net(input_ids=ids, labels=ids, use_cache=False)
        return out.loss, [out.loss], 0.0, out.logits
    run = train(dict(net.named_parameters()), loss_of_step, clip_torch, config["train"]["grad_clip"])
    run.gradients = {name: x.contiguous() for name, x in by_expert(model, run.gradients).items()}
    assert run.gradients.keys() == {name for name in weights if not is_bias(name)}
    return run


def compare(a, b):
    """Largest differences of two runs: logits, gradients relative to the largest of the tensor, losses."""
    gradients = {}
    for name, x in a.gradients.items():
        y, largest = b.gradients[name].double(), float(b.gradients[name].abs().max())
        gradients[name] = float((x.double() - y).abs().max()) / (largest or 1.0)
    worst = max(gradients, key=gradients.get)
    return {"logits": float((a.logits.double() - b.logits.double()).abs().max()), "gradients": gradients[worst],
            "worst_gradient": worst,
            "losses": max(abs(x - y) for p, q in zip(a.losses, b.losses) for x, y in zip(p, q)),
            "grad_norm": max(abs(x - y) / y for x, y in zip(a.grad_norm, b.grad_norm))}


def mtp_logits_of_transformers(model, weights, tokens, folder):
    """Logits of every MTP depth by the MtpModel that transformers drafts with, loaded by the released names."""
    write_folder(folder, model, weights)
    net, info = load_folder(folder)
    L, facts = model["num_hidden_layers"], {}
    facts["unexpected keys of the main model at layer L != 61"] = (
        f"{len(info['unexpected_keys'])}, experts counted once: a warning, no error")
    try:
        MtpModel.from_pretrained(net)
        facts["MtpModel.from_pretrained at layer L != 61"] = "finds it"
    except RuntimeError as error:
        facts["MtpModel.from_pretrained at layer L != 61"] = "refuses: " + str(error).split(" from ", 1)[0]
    net._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{L + k}\..*" for k in range(len(tokens) - 1)]
    mtp = MtpModel.from_pretrained(net)
    with torch.no_grad():
        out = net.model(tokens[0], output_hidden_states=[L - 1], use_cache=False)
        hidden = out.last_hidden_state
        facts["hidden state handed to MTP while drafting"] = (
            "after model.norm" if torch.equal(out.hidden_states[-1], hidden) else "before model.norm")
        S = tokens[0].shape[1]
        position = torch.arange(S)[None]
        mask = torch.full((S, S), -math.inf).triu(1)[None, None]
        logits = []
        for k, layer in enumerate(mtp.layers, 1):
            embedded = mtp.embed_tokens(tokens[k])
            hidden = layer(embedded, hidden, position_embeddings=mtp.rotary_emb(embedded, position_ids=position + k),
                           attention_mask=mask, position_ids=position + k, past_key_values=None)
            logits.append(mtp._project_to_logits(hidden))
    return logits, facts


# ---- facts -----------------------------------------------------------------------------------------------------------

def facts_of_router():
    config = transformers.DeepseekV3Config(**{**MODEL, **GROUPS})
    router = modeling_deepseek_v3.DeepseekV3TopkRouter(config)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        router.weight.copy_(0.3 * torch.randn(router.weight.shape, generator=g))
        router.e_score_correction_bias.fill_(-2.0)
        x = torch.randn((64, config.hidden_size), generator=g)
        out = router(x)
        z = (x @ router.weight.T).sigmoid() - 2
    best = z.view(64, 4, 2).sum(-1).topk(2, -1)[1]
    ids = next(x for x in out if not x.is_floating_point())
    stays = bool(((ids[:, :, None] // 2) == best[:, None, :]).any(-1).all())
    return {"group mask": "-inf" if stays else "0.0",
            "router returns": [f"{x.dtype} {tuple(x.shape)}".replace("torch.", "") for x in out],
            "router attributes": sorted(k for k, v in vars(router).items()
                                        if isinstance(v, (int, float)) and k[0] != "_" and k != "training")}


def facts_of_config(folder):
    """A 4.x config.json with DeepSeek-V3's rope and widths of a head (integers where the release has them)."""
    rope = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096}
    model = {**MODEL, "rope_scaling": rope, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-5,
             "q_lora_rank": 14, "max_position_embeddings": 163840, "torch_dtype": "bfloat16"}
    weights, _ = draw(model, 0.0, False, 1)
    write_folder(folder, model, weights, torch.bfloat16)
    net, _ = load_folder(folder)
    attention = net.model.layers[0].self_attn
    want, _, _ = rope_tables(model)
    error = float(((net.model.rotary_emb.inv_freq.double() - want) / want).abs().max())
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
    bias = plain.state_dict()["model.layers.1.mlp.gate.e_score_correction_bias"].dtype
    saved = os.path.join(folder, "saved")
    plain.save_pretrained(saved)
    with open(os.path.join(saved, "config.json"), encoding="utf-8") as file:
        saved_config = json.load(file)
    with safetensors.safe_open(os.path.join(saved, "model.safetensors"), "pt") as file:
        names = set(file.keys())
        same = names == weights.keys() and all(
            torch.equal(file.get_tensor(n), weights[n].to(file.get_tensor(n).dtype)) for n in names)
        saved_bias = file.get_tensor("model.layers.1.mlp.gate.e_score_correction_bias").dtype
    return {
        "rope_parameters of a 4.x config": net.config.rope_parameters,
        "softmax scale with V3's numbers": attention.scaling,
        "inv_freq with V3's numbers against the formula": f"{error:.1e} relative",
        "eps with rms_norm_eps 1e-5": {"q_a_layernorm": attention.q_a_layernorm.variance_epsilon,
                                       "kv_a_layernorm": attention.kv_a_layernorm.variance_epsilon,
                                       "input_layernorm": net.model.layers[0].input_layernorm.variance_epsilon},
        "state_dict keys of an MoE layer": sorted(k[15:] for k in net.state_dict() if k.startswith("model.layers.1.")),
        "defaults": {"attention": plain.config._attn_implementation, "experts": plain.config._experts_implementation,
                     "dtype of a BF16 folder": str(plain.dtype), "router bias of a BF16 folder": str(bias)},
        "save_pretrained": {"names": "one by one, as loaded" if names == weights.keys() else sorted(names)[:20],
                            "weights": "equal bits" if same else "changed", "router bias": str(saved_bias),
                            "keys that config.json gains": sorted(saved_config.keys() - model.keys()),
                            "keys that config.json loses": sorted(model.keys() - saved_config.keys())},
        "_keys_to_ignore_on_load_unexpected": sorted(net._keys_to_ignore_on_load_unexpected),
    }


def facts_of_tokenizer(folder):
    """A byte-level BPE whose tokenizer_config names PreTrainedTokenizerFast, beside a deepseek_v3 config.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(["hello world, hello\n\n  world"] * 8, trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    os.makedirs(folder)
    tokenizer.save(os.path.join(folder, "tokenizer.json"))
    text, out = "hello world\n\n  hello\tw\u00f6rld ", {}
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(MODEL, file)
    for name in ("PreTrainedTokenizerFast", "LlamaTokenizerFast"):
        with open(os.path.join(folder, "tokenizer_config.json"), "w", encoding="utf-8") as file:
            json.dump({"tokenizer_class": name}, file)
        loaded = transformers.AutoTokenizer.from_pretrained(folder)
        ids = loaded.encode(text, add_special_tokens=False)
        out[name] = {"class": type(loaded).__name__, "round trip": loaded.decode(ids) == text,
                     "ids as tokenizers": ids == tokenizer.encode(text).ids}
    return {"AutoTokenizer of tokenizer_class": out}


# ---- files -----------------------------------------------------------------------------------------------------------

def write_case(out, name, source, precision, config, n_scored, weights, windows, run, about):
    tensors = {n: x.clone() if is_bias(n) else x.bfloat16() for n, x in weights.items()}
    tensors.update({"grad." + n: x.float() for n, x in run.gradients.items()})
    tensors["logits"] = run.logits.reshape(-1, run.logits.shape[-1]).float().contiguous()
    tensors["windows"] = windows
    path = os.path.join(out, name + ".safetensors")
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    os.chmod(path, 0o644)
    text = {"source": source, "precision": precision, **about, "n_scored": n_scored, "losses": run.losses,
            "balance": run.balance, "grad_norm": run.grad_norm, "config": config}
    with open(os.path.join(out, name + ".json"), "w", encoding="utf-8") as file:
        file.write("{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in text.items()) + "\n}\n")


def check(name, agreement, logits, gradients, losses):
    print(f"{name:32s} logits {agreement['logits']:.1e}  gradients {agreement['gradients']:.1e} "
          f"({agreement['worst_gradient']})  losses of ten steps {agreement['losses']:.1e}", flush=True)
    assert agreement["logits"] < logits and agreement["gradients"] < gradients and agreement["losses"] < losses, name


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "../tests/golden"))
    out = parser.parse_args().out
    os.makedirs(out, exist_ok=True)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    agreements, facts = {}, {}
    with tempfile.TemporaryDirectory() as temporary:
        for i, (name, (changes, bias_mean, settings)) in enumerate(TRANSFORMERS_CASES.items()):
            config = configuration(changes, settings)
            # transformers shifts labels inside, so the last position has no target.
            weights, windows, own, seed, margin = draw_well_posed(config, bias_mean, SEQUENCE - 1, clip_torch, 1000 * i)
            run = train_transformers(config, weights, windows, os.path.join(temporary, name))
            run.balance = own.balance
            agreements[name] = compare(run, own)
            check(name, agreements[name], 2e-5, 2e-5, 2e-6)
            write_case(out, name, "transformers", "f32", config, SEQUENCE - 1, weights, windows, run,
                       {"seed": seed, "nearest_tie": margin})
        for i, (name, (changes, bias_mean, settings)) in enumerate(REFERENCE_CASES.items()):
            config = configuration(changes, settings)
            weights, windows, run, seed, margin = draw_well_posed(config, bias_mean, SEQUENCE, clip_exact,
                                                                  1000 * i + 500)
            write_case(out, name, "reference", "f64", config, SEQUENCE, weights, windows, run,
                       {"seed": seed, "nearest_tie": margin})
            print(f"{name:32s} by the reference: losses {run.losses[0]} -> {run.losses[-1]}", flush=True)
            if name == "mtp2_documents":  # without its documents, which MtpModel does not know
                batch = Batch(windows[0], 2, False, SEQUENCE)
                theirs, mtp_facts = mtp_logits_of_transformers(config["model"], weights, batch.tokens,
                                                               os.path.join(temporary, name))
                with torch.no_grad():
                    ours = Reference(config["model"], weights).forward(batch)[0][1:]
                differences = [float((a.double() - b).abs().max()) for a, b in zip(theirs, ours)]
                print(f"{'MtpModel':32s} logits by depth {differences}", flush=True)
                assert len(differences) == 2 and max(differences) < 2e-5
                agreements["MtpModel, logits by depth"] = differences
                facts.update(mtp_facts)
        facts.update(facts_of_router())
        facts.update(facts_of_config(os.path.join(temporary, "config")))
        facts.update(facts_of_tokenizer(os.path.join(temporary, "tokenizer")))
    versions = {"made": datetime.date.today().isoformat(), "python": platform.python_version(),
                "torch": torch.__version__, "transformers": transformers.__version__,
                "safetensors": safetensors.__version__, "facts": facts, "transformers against reference": agreements}
    with open(os.path.join(out, "versions.json"), "w", encoding="utf-8") as file:
        json.dump(versions, file, indent=2)
        file.write("\n")
    print(json.dumps(facts, indent=2))
    names = [*TRANSFORMERS_CASES, *REFERENCE_CASES]
    size = sum(os.path.getsize(os.path.join(out, n + end)) for n in names for end in (".json", ".safetensors"))
    print(f"{len(names)} cases, {size / 1e6:.2f} MB in {out}")
    assert size < 2e6, "tests/golden is to stay below 2 MB"


main()
