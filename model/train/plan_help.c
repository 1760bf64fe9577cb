/* See plan_help.h. The table is the documentation of --json; a test holds it against what is printed. */
#include "plan_help.h"

#include <string.h>

#include "rates.h"

static const struct {
    const char *key, *what;
} members[] = {
    {"version", "of this list: 1; members may be added, none changes its meaning"},
    {"config", "path of the configuration"},
    {"name", "run.name"},
    {"parameters.total", "of the main model, router biases not counted"},
    {"parameters.mtp", "of the MTP modules, beside the embedding and head they share"},
    {"parameters.active_with_head", "of the main model that one token passes, the input embedding not"},
    {"parameters.active_without_head", "the same without the head"},
    {"parameters.by_part.PART", "PART: embedding, head, attention, dense_mlp, routed_experts, shared_experts, router, "
                                "norms, mtp"},
    {"active.by_part.PART", "those that one token passes"},
    {"flops_per_token.total", "forward and backward; causal, active; recomputation not counted"},
    {"flops_per_token.forward", "a third of it"},
    {"flops_per_token.backward", "two thirds"},
    {"flops_per_token.by_part.PART", "forward and backward; also PART attention_core"},
    {"run.steps", "optimizer steps"},
    {"run.tokens", "of all steps"},
    {"run.flops", "of all tokens"},
    {"run.tokens_per_step", "at the start"},
    {"run.tokens_per_step_at_end", "where train.global_batch_size is a schedule"},
    {"run.micro_batches_per_step", "of a rank, at the end"},
    {"data[].name", "train, train NAME, val NAME"},
    {"data[].path", "as configured; null: synthetic"},
    {"data[].there", "do files match the path"},
    {"data[].problem", "why they will not do, or null"},
    {"data[].shards", "files"},
    {"data[].tokens", "in them"},
    {"data[].asked", "tokens that the run takes from here; 0 for validation"},
    {"data[].epochs", "asked / tokens, or null"},
    {"memory.device_bytes", "state, activations and scratch"},
    {"memory.items[].arena", "state, activations, scratch"},
    {"memory.items[].name", "as in the printed plan"},
    {"memory.items[].bytes", "scratch: all of it, shared by all blocks"},
    {"memory.host_bytes", "beside the device's"},
    {"memory.host_items[].name", ""},
    {"memory.host_items[].bytes", ""},
    {"files.checkpoint_bytes", "of one checkpoint"},
    {"files.hf_bf16_bytes", "tensors of an export: --dtype bf16"},
    {"files.hf_fp8_bytes", "--dtype fp8"},
    {"files.hf_fp32_bytes", "--dtype fp32"},
    {"world.gpus", "--world, else 1"},
    {"world.pp", "pipeline stages"},
    {"world.dp", "data-parallel copies"},
    {"world.ep", "expert-parallel ranks"},
    {"experts", "loads of expert ranks by the last checkpoint in run.dir; null where there is none, or one rank"},
    {"experts.checkpoint", "its folder"},
    {"experts.consecutive.mean", "largest rank's load over the ranks' mean, mean of the MoE layers"},
    {"experts.consecutive.worst", "of the worst layer"},
    {"experts.balanced.mean", "the same with parallel.placement \"balanced\""},
    {"experts.balanced.worst", ""},
    {"not_yet[]", "what this version refuses to train"},
    {"gpu", "null without --gpu"},
    {"gpu.name", "from the table or file of rates"},
    {"gpu.source", "of its rates"},
    {"gpu.measured", "false: scaled from another GPU's by published peaks"},
    {"gpu.memory_bytes", "that a run may plan with"},
    {"gpu.fits", "does the configuration as it is"},
    {"gpu.needs_bytes", "of the configuration as it is"},
    {"gpu.choices[].recompute[]", "names of memory.recompute"},
    {"gpu.choices[].micro_batch", "the largest that fits and divides the batch; 0 = none"},
    {"gpu.choices[].bytes", "with it (with 1 if none fits)"},
    {"gpu.choices[].tokens_per_second", "of one GPU, or null"},
    {"gpu.choices[].recompute_seconds", "of a micro-batch, or null"},
    {"gpu.set", "--set options: to what fits, or is faster; \"\" = leave it"},
    {"gpu.step_seconds", "this and what follows: null where there is no forecast"},
    {"gpu.tokens_per_second", "of one GPU"},
    {"gpu.model_tflops", "of one GPU"},
    {"gpu.mfu", "of the dense BF16 peak, 0 to 1"},
    {"gpu.days", "of the run"},
    {"gpu.gpu_hours", ""},
    {"gpu.price", "by run.price_per_gpu_hour; null where that is 0"},
    {"cluster", "of --world GPUs: null with one, and where there is no forecast"},
    {"cluster.name", "of a GPU, from the table or file of rates; without --gpu the H200"},
    {"cluster.source", "of its rates"},
    {"cluster.nodes", "of rates.gpus_per_node GPUs"},
    {"cluster.schedule", "of the pipeline; 1f1b where there is one stage"},
    {"cluster.micro_batches", "of a pipeline in a step"},
    {"cluster.fits", "does the fullest rank"},
    {"cluster.memory_bytes", "that a GPU has"},
    {"cluster.ranks[].bytes", "by rank of the pipeline"},
    {"cluster.fullest_rank", "of the pipeline"},
    {"cluster.items[].arena", "rank"},
    {"cluster.items[].name", "of the fullest rank"},
    {"cluster.items[].bytes", ""},
    {"cluster.stages[].first_layer", ""},
    {"cluster.stages[].layers", "main layers; MTP and head are the last stage's"},
    {"cluster.stages[].forward_seconds", "of a micro-batch, exchange that is not hidden included"},
    {"cluster.stages[].backward_seconds", "input and weights"},
    {"cluster.stages[].backward_input_seconds", ""},
    {"cluster.stages[].backward_weight_seconds", ""},
    {"cluster.stages[].pair_seconds", "its forward beside the backward of the rank's other stage, or null"},
    {"cluster.links.experts.nvlink_bytes", "that a GPU sends in a step: tokens to experts and back"},
    {"cluster.links.experts.ib_bytes", "the same to other nodes"},
    {"cluster.links.stages.nvlink_bytes", "between stages"},
    {"cluster.links.stages.ib_bytes", ""},
    {"cluster.links.optimizer.nvlink_bytes", "gradients to shards, weights back"},
    {"cluster.links.optimizer.ib_bytes", ""},
    {"cluster.step_seconds", "pipeline and update"},
    {"cluster.pipeline_seconds", "first forward to last backward"},
    {"cluster.bubble_seconds", "of it a rank waits, on average"},
    {"cluster.update_seconds", "gradients summed, AdamW, weights gathered"},
    {"cluster.exchange_seconds", "of experts, of a rank"},
    {"cluster.exchange_hidden", "the part beside compute, 0 to 1; null without exchange"},
    {"cluster.tokens_per_step", "at the end of the run"},
    {"cluster.tokens_per_second", "of one GPU"},
    {"cluster.model_tflops", "of one GPU"},
    {"cluster.mfu", "of the dense BF16 peak, 0 to 1; null above it"},
    {"cluster.gpu_hours_per_trillion_tokens", ""},
    {"cluster.price_per_trillion_tokens", "by run.price_per_gpu_hour; null where that is 0"},
};
enum { N_MEMBERS = sizeof members / sizeof *members };

static int help_flops(FILE *out) {
    fprintf(out,
            "FLOPs of a token, forward and backward (a third and two thirds); what is recomputed does not count:\n"
            "  6 for each weight of every matrix it passes: the K chosen of the routed experts, the shared ones, the "
            "router,\n"
            "  the head, and for each MTP depth its block, its projection and the head again; not the embedding, not "
            "norms\n"
            "  3 x heads x (qk width + v width) x (train.seq_len + 1) in every block for attention: causal pairs "
            "alone\n"
            "Documents packed into a sequence count as one, with data.document_mask too: then an upper bound. Tokens "
            "a second\n"
            "count all tokens. MFU is against the dense BF16 peak, in every precision.\n");
    return 1;
}

static int help_gpu(FILE *out) {
    fprintf(out, "--gpu takes");
    for (int i = 0; rates_known(i); i++) fprintf(out, " %s,", rates_known(i));
    fprintf(out, "--gpu takes");
    for (int i = 0; rates_known(i); i++) fprintf(out, " %s,", rates_known(i));
    fprintf(
        out,
        " or a file: memory_gib as nvidia-smi has it, TFLOP/s, hbm in GB/s read plus written by a copy,\n"
        "op_us = least microseconds of an op; *_fp8 may be left out. The last line is for several GPUs: GB/s that one "
        "sends\nwithin a node and to other nodes, and the part of its multiprocessors that the exchange takes. "
        "Two more may be\ngiven: stream, GB/s of memory-bound ops, and gradient_fp8, TFLOP/s of FP8 weight "
        "gradients\n"
        "  {\"version\": 1, \"name\": \"my GPU\", \"source\": \"make bench\", \"measured\": true, "
        "\"memory_gib\": 139.8,\n"
        "   \"peak_bf16\": 989.5, \"peak_fp8\": 1979, \"gemm_bf16\": 720, \"gemm_fp8\": 1180, "
        "\"grouped_bf16\": 415,\n"
        "   \"grouped_fp8\": 1150, \"attention_forward\": 333, \"attention_backward\": 230, \"hbm\": 4104, "
        "\"op_us\": 5,\n"
        "   \"nvlink\": 296, \"ib\": 40, \"gpus_per_node\": 8, \"exchange_share\": 0.12}\n");
    return 1;
}

int plan_help(FILE *out, const char *word) {
    if (strcmp(word, "gpu") == 0) return help_gpu(out);
    if (strcmp(word, "flops") == 0 || strcmp(word, "FLOPs") == 0) return help_flops(out);
    if (strcmp(word, "plan") != 0 && strcmp(word, "json") != 0) return 0;
    fprintf(out, "plan --json: one object with these members\n");
    for (int i = 0; i < N_MEMBERS; i++) fprintf(out, "  %-36s %s\n", members[i].key, members[i].what);
    return N_MEMBERS;
}
