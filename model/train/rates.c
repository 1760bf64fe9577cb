/* See rates.h. */
#include "rates.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "data/json.h"
#include "kernels/base/check.h"
#include "kernels/base/file.h"

enum { RATES_FILE_MAX = 1 << 16 };

/* One NVIDIA H200, eight to a node. Our kernels' rows of tests/bench/results.jsonl at commit a4b2c8a (attention at
 * 4,096 tokens; grouped products as the slope over rows, since their f32 accumulation is charged as memory traffic;
 * copy), cuBLASLt's dense products there (means over V3's and Moonlight's shapes), op_us from the quick start's step of
 * 2.4 ms in 404 ops. FP8: cuBLASLt and DeepGEMM with 128-blocks on the same card. test_plan.c holds whole steps by
 * these against measured ones. NVLink: NCCL's all-to-all of 256 MB between two of them; stores of 16 thread blocks
 * reach as much, so that many of 132 multiprocessors are taken from products. InfiniBand is not measured: what DeepSeek
 * attains of 400 Gb/s ("Insights into DeepSeek-V3", ISCA 2025). */
static const GpuRates h200 = {
    .source = "measured: ours in tests/bench/results.jsonl (a4b2c8a), cuBLASLt's for dense products and FP8",
    .measured = true,
    .gemm_bf16 = 720,
    .gemm_fp8 = 1180,
    .grouped_bf16 = 415,
    .grouped_fp8 = 1150,
    .attention_forward = 333,
    .attention_backward = 230,
    .hbm = 4104,
    .op_us = 5,
    .nvlink = 296,
    .ib = 40,
    .gpus_per_node = 8,
    .exchange_share = 16.0 / 132,
};

/* The GPU that DeepSeek-V3 was trained on. What a kind of kernel does, as op_work.c counts it, over the time that the
 * profile of its training shows for the kind (github.com/deepseek-ai/profile-data, "train": one overlapped forward and
 * backward of four MoE layers, 4,096 tokens; 112 of 132 multiprocessors, the other 20 exchange tokens). Linears: 16.9
 * TFLOP in 18.8 ms; experts 23.1 in 22.9 ms; attention 2.75 in 4.9 ms, backward 7.15 in 15.1 ms; casts, transposes,
 * permutation, norms, RoPE and SwiGLU 46.3 GB in 29.2 ms; weight gradients at the rate of o_proj's. BF16 products: the
 * H200's share of an equal peak, on 112 multiprocessors. Memory: the H200's share of 3,350 GB/s. NVLink 160 GB/s: the
 * V3 report (3.2.2); InfiniBand 40: ISCA 2025. Nothing here comes from the time of a whole step. */
static const GpuRates h800 = {
    .name = "NVIDIA H800",
    .source =
        "published: kernels of DeepSeek's training profile, links of its report and of ISCA 2025; else the H200's "
        "shares of peaks",
    .memory_gib = 79.1,
    .peak_bf16 = 989.5,
    .peak_fp8 = 1979,
    .gemm_bf16 = 611,
    .gemm_fp8 = 900,
    .grouped_bf16 = 352,
    .grouped_fp8 = 1008,
    .attention_forward = 561,
    .attention_backward = 473,
    .hbm = 2864,
    .stream = 1585,
    .op_us = 5,
    .gradient_fp8 = 656,
    .nvlink = 160,
    .ib = 40,
    .gpus_per_node = 8,
};

/* Published: dense peaks with f32 sums in TFLOP/s (0: none), bandwidth in GB/s, links in GB/s and direction (0: none;
 * the RTX 4090's is PCIe); memory as CUDA reports the total. All but the first are not measured: they get the H200's
 * shares of their own peaks. */
static const struct {
    const char *key, *name;
    double memory_gib, peak_bf16, peak_fp8, bandwidth, nvlink, ib;
} table[] = {
    {"h200", "NVIDIA H200", 139.8, 989.5, 1979, 4800, 450, 50},
    {"h100-80", "NVIDIA H100 80GB HBM3", 79.1, 989.5, 1979, 3350, 450, 50},
    {"a100-80", "NVIDIA A100-SXM4-80GB", 79.1, 312, 0, 2039, 300, 25},
    {"rtx4090", "NVIDIA GeForce RTX 4090", 23.6, 165.2, 330.3, 1008, 32, 0},
};
enum { N_TABLE = sizeof table / sizeof *table };

static GpuRates rates_of_row(int row) {
    GpuRates r = h200;
    snprintf(r.name, sizeof r.name, "%s", table[row].name);
    r.memory_gib = table[row].memory_gib;
    r.peak_bf16 = table[row].peak_bf16;
    r.peak_fp8 = table[row].peak_fp8;
    if (row == 0) return r;
    const double bf16 = r.peak_bf16 / table[0].peak_bf16, fp8 = r.peak_fp8 / table[0].peak_fp8;
    r.measured = false;
    snprintf(r.source, sizeof r.source, "not measured: the H200's shares of published peaks (%.0f TF, %.0f GB/s)",
             r.peak_bf16, table[row].bandwidth);
    r.gemm_bf16 *= bf16;
    r.gemm_fp8 *= fp8;
    r.grouped_bf16 *= bf16;
    r.grouped_fp8 *= fp8;
    r.attention_forward *= bf16;
    r.attention_backward *= bf16;
    r.hbm *= table[row].bandwidth / table[0].bandwidth;
    r.nvlink *= table[row].nvlink / table[0].nvlink;
    r.ib *= table[row].ib / table[0].ib;
    return r;
}

const char *rates_known(int index) {
    return index < N_TABLE ? table[index].key : index == N_TABLE ? "h800" : NULL;
}

/* ---- files ------------------------------------------------------------------------------------------------------- */

#define AT(member) offsetof(GpuRates, member)
static const struct {
    const char *key;
    size_t offset;
    double max;
    bool optional;
    size_t peak; /* its bound, 0 = none */
} numbers[] = {
    {"memory_gib", AT(memory_gib), 1e6, false, 0},
    {"peak_bf16", AT(peak_bf16), 1e6, false, 0},
    {"peak_fp8", AT(peak_fp8), 1e6, true, 0},
    {"gemm_bf16", AT(gemm_bf16), 1e6, false, AT(peak_bf16)},
    {"gemm_fp8", AT(gemm_fp8), 1e6, true, AT(peak_fp8)},
    {"grouped_bf16", AT(grouped_bf16), 1e6, false, AT(peak_bf16)},
    {"grouped_fp8", AT(grouped_fp8), 1e6, true, AT(peak_fp8)},
    {"attention_forward", AT(attention_forward), 1e6, false, AT(peak_bf16)},
    {"attention_backward", AT(attention_backward), 1e6, false, AT(peak_bf16)},
    {"hbm", AT(hbm), 1e6, false, 0},
    {"op_us", AT(op_us), 1e6, false, 0},
    {"stream", AT(stream), 1e6, true, AT(hbm)},
    {"gradient_fp8", AT(gradient_fp8), 1e6, true, AT(peak_fp8)},
    {"nvlink", AT(nvlink), 1e6, true, 0},
    {"ib", AT(ib), 1e6, true, 0},
    {"gpus_per_node", AT(gpus_per_node), 1024, true, 0},
    {"exchange_share", AT(exchange_share), 0.9, true, 0},
};
enum { N_NUMBERS = sizeof numbers / sizeof *numbers };

static double value_at(const GpuRates *r, size_t offset) {
    return *(const double *)(const void *)((const char *)r + offset);
}

static int read_text(char *to, size_t room, const cJSON *item, const char *path, char *err) {
    if (!cJSON_IsString(item) || !item->valuestring[0] || strlen(item->valuestring) >= room)
        return err_set(err, "%s:%d: %s must be a text of 1 to %zu bytes", path, json_line(item), item->string,
                       room - 1);
    snprintf(to, room, "%s", item->valuestring);
    return 0;
}

static int read_member(GpuRates *r, const cJSON *item, const char *path, char *err) {
    const char *key = item->string;
    int64_t version;
    if (strcmp(key, "//") == 0) return 0;
    if (strcmp(key, "name") == 0) return read_text(r->name, sizeof r->name, item, path, err);
    if (strcmp(key, "source") == 0) return read_text(r->source, sizeof r->source, item, path, err);
    if (strcmp(key, "version") == 0) {
        if (json_int64(item, &version) == 0 && version == 1) return 0;
        return err_set(err, "%s:%d: version must be 1", path, json_line(item));
    }
    if (strcmp(key, "measured") == 0) {
        r->measured = cJSON_IsTrue(item);
        if (cJSON_IsBool(item)) return 0;
        return err_set(err, "%s:%d: measured must be true or false", path, json_line(item));
    }
    for (int i = 0; i < N_NUMBERS; i++) {
        if (strcmp(key, numbers[i].key) != 0) continue;
        double x = 0;
        if (numbers[i].optional && cJSON_IsNull(item)) return 0;
        if (json_double(item, &x) != 0 || !(x > 0 && x <= numbers[i].max))
            return err_set(err, "%s:%d: %s must be a number above 0 and at most %g", path, json_line(item), key,
                           numbers[i].max);
        memcpy((char *)r + numbers[i].offset, &x, sizeof x);
        return 0;
    }
    return err_set(err, "%s:%d: %s is no member of a rates file", path, json_line(item), key);
}

/* What single members cannot say. */
static int check_whole(const GpuRates *r, const char *path, char *err) {
    if (!r->name[0] || !r->source[0]) return err_set(err, "%s: %s is missing", path, r->name[0] ? "source" : "name");
    for (int i = 0; i < N_NUMBERS; i++) {
        const double x = value_at(r, numbers[i].offset);
        if (x == 0 && !numbers[i].optional) return err_set(err, "%s: %s is missing", path, numbers[i].key);
        if (numbers[i].peak && x > value_at(r, numbers[i].peak))
            return err_set(err, "%s: %s = %g is above the peak %g: no kernel is faster than the hardware", path,
                           numbers[i].key, x, value_at(r, numbers[i].peak));
    }
    if ((r->peak_fp8 == 0) != (r->gemm_fp8 == 0) || (r->peak_fp8 == 0) != (r->grouped_fp8 == 0))
        return err_set(err, "%s: peak_fp8, gemm_fp8 and grouped_fp8 go together: all or none", path);
    return 0;
}

static int read_file(GpuRates *r, const char *path, char *err, char *hint) {
    cJSON *json = json_load(path, RATES_FILE_MAX, err, hint);
    if (!json) return -1;
    int result = cJSON_IsObject(json) ? 0 : err_set(err, "%s: a rates file is a JSON object", path);
    for (const cJSON *item = json->child; item && result == 0; item = item->next)
        result = read_member(r, item, path, err);
    if (result == 0 && !cJSON_GetObjectItemCaseSensitive(json, "version"))
        result = err_set(err, "%s: version is missing", path);
    if (result == 0) result = check_whole(r, path, err);
    cJSON_Delete(json);
    return result;
}

/* ---- both -------------------------------------------------------------------------------------------------------- */

int rates_find(GpuRates *r, const char *name_or_file, char *err, char *hint) {
    for (int i = 0; i < N_TABLE; i++)
        if (strcasecmp(table[i].key, name_or_file) == 0) {
            *r = rates_of_row(i);
            return 0;
        }
    if (strcasecmp("h800", name_or_file) == 0) {
        *r = h800;
        return 0;
    }
    memset(r, 0, sizeof *r);
    hint[0] = 0;
    int n = snprintf(hint, ERR_LEN, "known are");
    for (int i = 0; rates_known(i); i++)
        n += snprintf(hint + n, (size_t)(ERR_LEN - n), "%s %s", i ? "," : "", rates_known(i));
    snprintf(hint + n, (size_t)(ERR_LEN - n), "; or a JSON file of rates, as train_moe help gpu shows");
    if (!path_exists(name_or_file))
        return err_set(err, "--gpu %s: no such GPU in the table, no such file", name_or_file);
    char file_hint[ERR_LEN] = "";
    if (read_file(r, name_or_file, err, file_hint) == 0) return 0;
    if (file_hint[0]) snprintf(hint, ERR_LEN, "%s", file_hint);
    return -1;
}
