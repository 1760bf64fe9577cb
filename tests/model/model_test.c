#include "model_test.h"

#include <math.h>
#include <string.h>

#include "kernels/base/file.h"
#include "kernels/base/rng.h"
#include "kernels/comm/check_streams.h"

#ifdef _OPENMP
#include <omp.h>
#endif

const ModelCase model_cases[] = {
    {"direct q, groups, MTP 1", {0}, 0},
    {"q latent, YaRN, no groups, two shared experts, MTP 2, document mask",
     {"model.q_lora_rank=10",
      "model.rope_scaling={\"type\":\"yarn\",\"factor\":4.0,\"beta_fast\":32.0,\"beta_slow\":1.0,\"mscale\":1.0,"
      "\"mscale_all_dim\":1.0,\"original_max_position_embeddings\":16}",
      "model.n_group=1", "model.topk_group=1", "model.n_shared_experts=2", "model.num_nextn_predict_layers=2",
      "data.document_mask=true"},
     5},
    {"V2's softmax gate, not normalised, no MTP",
     {"model.scoring_func=softmax", "model.topk_method=greedy", "model.norm_topk_prob=false", "model.n_group=1",
      "model.topk_group=1", "model.num_nextn_predict_layers=0", "model.routed_scaling_factor=4.0"},
     0},
    {"all dense", {"model.first_k_dense_replace=3"}, 0},
    {"everything recomputed",
     {"memory.recompute=[\"norms\",\"up_projections\",\"swiglu\"]", "model.q_lora_rank=10"},
     0},
};
const int n_model_cases = sizeof model_cases / sizeof *model_cases;

static const char *const base =
    "{\"version\":1,\"run\":{\"seed\":7},"
    "\"model\":{\"vocab_size\":37,\"hidden_size\":24,\"num_hidden_layers\":3,\"num_attention_heads\":2,"
    "\"num_key_value_heads\":2,\"q_lora_rank\":null,\"kv_lora_rank\":12,\"qk_nope_head_dim\":8,\"qk_rope_head_dim\":4,"
    "\"v_head_dim\":6,\"first_k_dense_replace\":1,\"intermediate_size\":20,\"n_routed_experts\":8,"
    "\"num_experts_per_tok\":2,\"n_shared_experts\":1,\"moe_intermediate_size\":10,\"n_group\":4,\"topk_group\":2,"
    "\"norm_topk_prob\":true,\"routed_scaling_factor\":1.5,\"num_nextn_predict_layers\":1,\"max_position_embeddings\":"
    "64,"
    "\"rms_norm_eps\":1e-6,\"rope_theta\":100.0,\"bos_token_id\":0,\"eos_token_id\":0},"
    "\"data\":{\"train\":\"synthetic\"},"
    "\"train\":{\"seq_len\":16,\"global_batch_size\":2,\"micro_batch_size\":2,\"steps\":10,\"lr\":1e-2,"
    "\"init_std\":0.2,\"balance_alpha\":0.05},\"precision\":{\"compute\":\"fp32\",\"moments\":\"fp32\"}}";

/* NULL data: a dense block. */
static Tensor router_bias(const Fixture *f, int block) {
    return f->model.params.blocks[block].weight[WEIGHT_ROUTER_BIAS].w;
}

static void copy_bias(Fixture *f, Tensor bias, Tensor host) {
    op_copy_in(&f->device, bias.data, host.data, tensor_bytes(host), STREAM_COMPUTE);
    op_synchronize(&f->device, STREAM_COMPUTE);
}

static void set_router_biases(Fixture *f) {
    for (int b = 0; b < f->model.shape.n_blocks; b++) {
        const Tensor bias = router_bias(f, b);
        if (bias.data) copy_bias(f, bias, t_normal(T1(DTYPE_F32, bias.shape[0]), 0.1, 100 + (uint64_t)b));
    }
}

void fixture_place_experts(Fixture *f) {
    enum { E = 8, LAYERS_MAX = 16 };
    int32_t expert_of_slot[LAYERS_MAX * E];
    const int n_moe = shape_n_moe(&f->model.shape);
    REQUIRE(f->model.shape.router.n_experts == E && n_moe <= LAYERS_MAX, "%d layers", n_moe);
    for (int i = 0; i < n_moe * E; i++) expert_of_slot[i] = ((i % E ^ 1) + 2 * (i / E + 1)) % E;
    params_place(&f->model.params, expert_of_slot);
    params_write_tables(&f->model.params, &f->device);
    model_init_weights(&f->model);
    set_router_biases(f);
}

void fixture_fix_routing(Fixture *f) {
    for (int b = 0; b < f->model.shape.n_blocks; b++) {
        const Tensor bias = router_bias(f, b);
        if (!bias.data) continue;
        Tensor host = t_normal(T1(DTYPE_F32, bias.shape[0]), 0, 0);
        for (int64_t e = 0; e < bias.shape[0]; e++) t_set(host, e, 2.0 * (double)(e * 5 % 8));
        copy_bias(f, bias, host);
    }
}

const Weight *fixture_weight(const Fixture *f, const NamedTensor *t) {
    return params_weight(&f->model.params, t);
}

double fixture_cosine(Tensor a, Tensor b) {
    double ab = 0, aa = 0, bb = 0;
    for (int64_t i = 0; i < tensor_numel(a); i++) {
        ab += t_get(a, i) * t_get(b, i);
        aa += t_get(a, i) * t_get(a, i);
        bb += t_get(b, i) * t_get(b, i);
    }
    return ab / sqrt(aa * bb);
}

static void parse(Fixture *f, const char *const *sets) {
    char err[ERR_LEN], hint[ERR_LEN];
    memset(f, 0, sizeof *f);
#ifdef _OPENMP
    omp_set_num_threads(1); /* too small to share */
#endif
    int n_sets = 0;
    while (sets && sets[n_sets]) n_sets++;
    REQUIRE(config_parse(&f->config, base, strlen(base), "test", sets, n_sets, err, hint) == 0, "%s (%s)", err, hint);
}

/* make NULL: alone. */
static void open_model(Fixture *f, const Ops *ops, Mesh mesh, MakeComm *make) {
    char err[ERR_LEN];
    f->device.ops = ops;
    f->comm = make ? make(&f->device, mesh) : comm_self(&f->device);
    if (f->part.n_chunks) f->model.part = &f->part;
    if (f->checks_streams) f->comm = check_streams(&f->device, f->comm);
    REQUIRE(model_init(&f->model, &f->config, &f->device, f->comm, err) == 0, "%s", err);
    model_init_weights(&f->model);
    set_router_biases(f);
    const ModelShape *s = &f->model.shape;
    REQUIRE(micro_batch_alloc(&f->batch, s->B, s->S, s->n_mtp, err) == 0, "%s", err);
    fixture_batch(f, 0, 1);
    f->params.step = 1;
    f->params.loss_scale[0] = 1;
    for (int k = 1; k <= s->n_mtp; k++) f->params.loss_scale[k] = 0.3 / s->n_mtp;
    f->params.balance_scale = f->config.train.balance_alpha * (double)s->S;
    f->params.inv_tokens = 1.0 / (double)s->T;
    f->params.lr = 1e-2;
    f->params.beta1 = 0.9;
    f->params.beta2 = 0.95;
    f->params.eps = 1e-8;
    f->params.weight_decay = 0.1;
    f->params.grad_clip = 1;
    f->params.bias_speed = 1e-3;
    f->params.skip_loss_above = f->params.skip_norm_above = INFINITY;
}

void fixture_open(Fixture *f, const char *const *sets) {
    fixture_open_on(f, sets, ops_cpu());
}

void fixture_open_on(Fixture *f, const char *const *sets, const Ops *ops) {
    parse(f, sets);
    open_model(f, ops, mesh_make(0, 1, 1, 1), NULL);
}

void fixture_open_ranks(Fixture *f, const char *const *sets, int n_ep) {
    const Mesh mesh = mesh_make(job_rank(), job_world(), 1, n_ep);
    parse(f, sets);
    open_model(f, ops_cpu(), mesh, comm_mpi);
}

static void open_stage(Fixture *f, const Ops *ops, Mesh mesh, MakeComm *make, ScheduleKind kind, int M) {
    char err[ERR_LEN];
    ScheduleShape schedule;
    if (schedule_copies(kind) > 1) mesh = mesh_mirrored(mesh);
    const ModelShape shape = shape_make(&f->config, &mesh, 0);
    REQUIRE(schedule_shape(&schedule, kind, mesh.n_pp, M, err, NULL) == 0 &&
                pipeline_part(&f->part, &schedule, mesh.pp, &shape, err) == 0,
            "%s", err);
    open_model(f, ops, mesh, make);
}

void fixture_open_pipeline(Fixture *f, const char *const *sets, int n_pp, int n_ep, ScheduleKind kind, int M) {
    parse(f, sets);
    f->checks_streams = true;
    open_stage(f, ops_cpu(), mesh_make(job_rank(), job_world(), n_pp, n_ep), job_world() > 1 ? comm_mpi : NULL, kind,
               M);
}

void fixture_open_stage(Fixture *f, const char *const *sets, const Ops *ops, Mesh mesh, MakeComm *make,
                        ScheduleKind kind, int M) {
    parse(f, sets);
    open_stage(f, ops, mesh, make, kind, M);
}

void fixture_close(Fixture *f) {
    micro_batch_free(&f->batch);
    model_free(&f->model);
    f->comm->free(f->comm);
}

void fixture_batch(Fixture *f, int64_t document_length, uint64_t seed) {
    const ModelShape *s = &f->model.shape;
    int32_t window[256];
    const int64_t n = s->S + 1 + s->n_mtp;
    REQUIRE(n <= 256, "window of %lld", (long long)n);
    for (int64_t b = 0; b < s->B; b++) {
        for (int64_t i = 0; i < n; i++) {
            uint64_t bits = rng_bits(seed, RNG_TEST, (uint64_t)b, (uint64_t)i);
            window[i] = 1 + (int32_t)(bits % (uint64_t)(s->V - 1));
            if (document_length > 0 && (i + b) % document_length == 0) window[i] = 0;
        }
        micro_batch_set(&f->batch, b, window, document_length > 0 ? 0 : NO_DOCUMENT_MASK, s->S);
    }
    micro_batch_count(&f->batch);
}

double fixture_loss(Fixture *f) {
    Model *m = &f->model;
    op_copy_in(m->device, m->step_params, &f->params, sizeof f->params, STREAM_COPY);
    memset(m->stats, 0, sizeof *m->stats);
    model_set_batch(m, &m->shape, &f->batch);
    model_forward(m, &m->train, FORWARD_TRAIN);
    double loss = f->params.balance_scale * m->stats->balance_sum;
    for (int k = 0; k <= m->shape.n_mtp; k++) loss += f->params.loss_scale[k] * m->stats->loss_sum[k];
    return loss;
}

uint64_t fixture_routing(Fixture *f) {
    uint64_t hash = 0;
    for (int b = 0; b < f->model.shape.n_blocks; b++) {
        const Tensor *t = f->model.train.blocks[b].t;
        if (!t[ACT_IDS].data) continue;
        hash = hash_bytes(t[ACT_IDS].data, tensor_bytes(t[ACT_IDS]), hash);
        hash = hash_bytes(t[ACT_SEQ_COUNT].data, tensor_bytes(t[ACT_SEQ_COUNT]), hash);
    }
    return hash;
}

void fixture_gradients(Fixture *f) {
    model_set_params(&f->model, &f->params);
    model_zero(&f->model);
    model_set_batch(&f->model, &f->model.shape, &f->batch);
    model_forward(&f->model, &f->model.train, FORWARD_TRAIN);
    model_backward(&f->model, &f->model.train);
}
