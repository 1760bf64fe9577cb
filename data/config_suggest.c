/* See config_table.h. What the user may have meant by a key that is in no row. */
#include "config_table.h"

#include <ctype.h>
#include <string.h>

enum { KEY_LEN = 64 };

/* Names of other programs for the same things. */
static const struct {
    const char *other, *section, *name;
} other_names[] = {
    {"learning_rate", "train", "lr"},
    {"max_lr", "train", "lr"},
    {"min_lr", "train", "lr_final"},
    {"warmup_steps", "train", "lr_warmup_steps"},
    {"lr_schedule", "train", "lr_shape"},
    {"scheduler", "train", "lr_shape"},
    {"batch_size", "train", "global_batch_size"},
    {"micro_batch", "train", "micro_batch_size"},
    {"sequence_length", "train", "seq_len"},
    {"context_length", "train", "seq_len"},
    {"max_steps", "train", "steps"},
    {"iterations", "train", "steps"},
    {"total_tokens", "train", "tokens"},
    {"wd", "train", "weight_decay"},
    {"max_grad_norm", "train", "grad_clip"},
    {"clip", "train", "grad_clip"},
    {"adam_beta1", "train", "beta1"},
    {"adam_beta2", "train", "beta2"},
    {"d_model", "model", "hidden_size"},
    {"n_embd", "model", "hidden_size"},
    {"n_layers", "model", "num_hidden_layers"},
    {"n_layer", "model", "num_hidden_layers"},
    {"n_heads", "model", "num_attention_heads"},
    {"n_head", "model", "num_attention_heads"},
    {"n_experts", "model", "n_routed_experts"},
    {"num_experts", "model", "n_routed_experts"},
    {"num_local_experts", "model", "n_routed_experts"},
    {"top_k_experts", "model", "num_experts_per_tok"},
    {"dtype", "precision", "compute"},
    {"use_fp8", "precision", "compute"},
    {"output_dir", "run", "dir"},
    {"save_steps", "checkpoint", "every_steps"},
    {"eval_steps", "eval", "every_steps"},
    {"logging_steps", "log", "every_steps"},
    {"rope_parameters", "model", "rope_scaling"},
};

static int min3(int a, int b, int c) {
    int m = a < b ? a : b;
    return m < c ? m : c;
}

int edit_distance(const char *a, const char *b) {
    int rows[3][KEY_LEN + 1]; /* the last three rows of the table of prefixes */
    int n = (int)strnlen(a, KEY_LEN), m = (int)strnlen(b, KEY_LEN);
    for (int j = 0; j <= m; j++) rows[0][j] = j;
    for (int i = 1; i <= n; i++) {
        int *now = rows[i % 3], *above = rows[(i + 2) % 3], *above2 = rows[(i + 1) % 3];
        now[0] = i;
        for (int j = 1; j <= m; j++) {
            now[j] = min3(above[j] + 1, now[j - 1] + 1, above[j - 1] + (a[i - 1] != b[j - 1]));
            bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
            if (swapped && above2[j - 2] + 1 < now[j]) now[j] = above2[j - 2] + 1;
        }
    }
    return rows[n % 3][m];
}

/* Lower case, hyphens as underscores. */
static void normalise(const char *key, char out[KEY_LEN]) {
    size_t n = 0;
    for (; key[n] && n < KEY_LEN - 1; n++) out[n] = key[n] == '-' ? '_' : (char)tolower((unsigned char)key[n]);
    out[n] = 0;
}

/* Lower is nearer; -1: not near at all. The same name in another section comes before a similar one in this section. */
static int score(const char *key, const char *name, bool same_section) {
    int length = (int)strlen(key) > (int)strlen(name) ? (int)strlen(key) : (int)strlen(name);
    int distance = edit_distance(key, name);
    bool is_part = strlen(key) >= 4 && strlen(name) >= 4 && (strstr(name, key) || strstr(key, name));
    if (distance * 3 > length && !is_part) return -1;
    if (is_part && distance > 2) distance = 2;
    return 2 * distance + (same_section ? 0 : distance ? 3 : 1);
}

static void keep_nearer(const char *key, const char *name, const char *section, const char *wanted_section,
                        const char *row_name, int *best, char *hint) {
    int s = score(key, name, strcmp(section, wanted_section) == 0);
    if (s < 0 || (*best >= 0 && s >= *best)) return;
    *best = s;
    hint_set(hint, "did you mean %s%s%s?", section, section[0] ? "." : "", row_name);
}

void suggest_key(const char *section, const char *key, char *hint) {
    char wanted[KEY_LEN];
    int best = -1;
    normalise(key, wanted);
    for (int i = 0; i < config_n_fields; i++) {
        const Field *f = &config_fields[i];
        if (f->kind != KIND_IGNORED) keep_nearer(wanted, f->name, f->section, section, f->name, &best, hint);
    }
    for (size_t i = 0; i < sizeof other_names / sizeof *other_names; i++)
        keep_nearer(wanted, other_names[i].other, other_names[i].section, section, other_names[i].name, &best, hint);
    if (best >= 0) return;
    if (section_exists(section) && section[0])
        hint_set(hint, "./train_moe help %s lists its keys", section);
    else
        hint_set(hint, "./train_moe help lists all sections and keys");
}
