/* See config_table.h. Types of more than one value: schedules, sources, lists of names, RoPE. */
#include "config_table.h"

#include <string.h>

/* ------------------------------------------------------------------------------------------------------- schedules */

static int read_value_of_schedule(Reader *r, const Field *f, const cJSON *item, double *value) {
    int64_t whole;
    bool ok = json_double(item, value) == 0 && *value >= f->min && *value <= f->max;
    if (f->type == &type_integer_schedule) ok = ok && json_int64(item, &whole) == 0;
    return ok ? 0 : read_refuse_value(r, f, item);
}

static int read_schedule(Reader *r, const Field *f, const cJSON *item, void *to) {
    Schedule *s = (Schedule *)to;
    memset(s, 0, sizeof *s);
    if (cJSON_IsNumber(item)) {
        s->n = 1;
        return read_value_of_schedule(r, f, item, &s->value[0]);
    }
    if (!cJSON_IsArray(item)) return read_refuse_value(r, f, item);
    if (!item->child) return read_refuse(r, f, item, "is an empty list");
    const cJSON *point;
    cJSON_ArrayForEach(point, item) {
        if (s->n == SCHEDULE_POINTS_MAX) return read_refuse(r, f, point, "has over %d points", SCHEDULE_POINTS_MAX);
        int64_t tokens;
        if (!cJSON_IsArray(point) || cJSON_GetArraySize(point) != 2 || json_int64(point->child, &tokens) != 0 ||
            tokens < 0) {
            hint_set(r->hint, "for example [[0, 1e-3], [10e9, 1e-4]]: tokens so far, value there");
            return read_refuse(r, f, point, "point %d must be [tokens, value], tokens a whole number from 0", s->n + 1);
        }
        if (s->n > 0 && tokens < s->tokens[s->n - 1])
            return read_refuse(r, f, point, "point %d goes back in tokens", s->n + 1);
        if (s->n > 1 && tokens == s->tokens[s->n - 2])
            return read_refuse(r, f, point, "point %d is the third at one place; two make a jump", s->n + 1);
        if (read_value_of_schedule(r, f, point->child->next, &s->value[s->n]) != 0) return -1;
        s->tokens[s->n++] = tokens;
    }
    if (s->n == 1) s->tokens[0] = 0; /* one point is one value */
    return 0;
}

static void print_schedule(FILE *out, const Field *f, const void *from) {
    (void)f;
    const Schedule *s = (const Schedule *)from;
    if (s->n == 1) {
        json_write_double(out, s->value[0]);
        return;
    }
    for (int i = 0; i < s->n; i++) {
        fprintf(out, "%s[%lld, ", i ? ", " : "[", (long long)s->tokens[i]);
        json_write_double(out, s->value[i]);
        fputc(']', out);
    }
    fputc(']', out);
}

/* ------------------------------------------------------------------------------------------- sources of data, skips */

static int read_sources(Reader *r, const Field *f, const cJSON *item, Source *sources, int *n) {
    const bool is_train = strcmp(f->name, "train") == 0;
    char section[NAME_LEN]; /* of one source: "data.val[]" */
    snprintf(section, sizeof section, "%s.%s[]", f->section, f->name);
    *n = 0;
    memset(sources, 0, SOURCES_MAX * sizeof *sources);
    if (cJSON_IsString(item)) {
        const Field *path = field_find(section, "path");
        snprintf(sources[0].name, sizeof sources[0].name, "%s", f->name);
        sources[0].weight = 1;
        *n = 1;
        return path->type->read(r, path, item, sources[0].path);
    }
    if (!cJSON_IsArray(item)) return read_refuse_value(r, f, item);
    const cJSON *child;
    cJSON_ArrayForEach(child, item) {
        if (*n == SOURCES_MAX) return read_refuse(r, f, child, "has over %d sources", SOURCES_MAX);
        if (!cJSON_IsObject(child)) {
            hint_set(r->hint, "a source is {\"name\": \"web\", \"path\": \"shards/web_*.bin\"%s}",
                     is_train ? ", \"weight\": 1" : "");
            return read_refuse(r, f, child, "must hold objects with name and path");
        }
        Source *s = &sources[*n];
        s->weight = 1;
        if (section_read(r, section, child, s) != 0) return -1;
        for (int i = 0; i < *n; i++)
            if (strcmp(sources[i].name, s->name) == 0)
                return read_refuse(r, f, child, "has the name \"%s\" twice", s->name);
        ++*n;
    }
    return 0;
}

static int read_train_sources(Reader *r, const Field *f, const cJSON *item, void *to) {
    DataConfig *d = (DataConfig *)to;
    d->synthetic = cJSON_IsString(item) && strcmp(item->valuestring, "synthetic") == 0;
    d->n_train = 0;
    if (d->synthetic) return 0;
    if (cJSON_IsArray(item) && !item->child) return read_refuse(r, f, item, "is an empty list");
    return read_sources(r, f, item, d->train, &d->n_train);
}

static int read_val_sources(Reader *r, const Field *f, const cJSON *item, void *to) {
    DataConfig *d = (DataConfig *)to;
    return read_sources(r, f, item, d->val, &d->n_val);
}

static int read_choice_sources(Reader *r, const Field *f, const cJSON *item, void *to) {
    EvalConfig *e = (EvalConfig *)to;
    return read_sources(r, f, item, e->choice, &e->n_choice);
}

static void print_sources(FILE *out, const Source *sources, int n, bool has_weight) {
    fputc('[', out);
    for (int i = 0; i < n; i++) {
        fputs(i ? ", {\"name\": " : "{\"name\": ", out);
        json_write_string(out, sources[i].name);
        fputs(", \"path\": ", out);
        json_write_string(out, sources[i].path);
        if (has_weight) {
            fputs(", \"weight\": ", out);
            json_write_double(out, sources[i].weight);
        }
        fputc('}', out);
    }
    fputc(']', out);
}

static void print_train_sources(FILE *out, const Field *f, const void *from) {
    (void)f;
    const DataConfig *d = (const DataConfig *)from;
    if (d->synthetic)
        fputs("\"synthetic\"", out);
    else
        print_sources(out, d->train, d->n_train, true);
}

static void print_val_sources(FILE *out, const Field *f, const void *from) {
    (void)f;
    const DataConfig *d = (const DataConfig *)from;
    print_sources(out, d->val, d->n_val, false);
}

static void print_choice_sources(FILE *out, const Field *f, const void *from) {
    (void)f;
    const EvalConfig *e = (const EvalConfig *)from;
    print_sources(out, e->choice, e->n_choice, false);
}

static int read_skip_ranges(Reader *r, const Field *f, const cJSON *item, void *to) {
    DataConfig *d = (DataConfig *)to;
    d->n_skip = 0;
    if (!cJSON_IsArray(item)) return read_refuse_value(r, f, item);
    const cJSON *range;
    cJSON_ArrayForEach(range, item) {
        if (d->n_skip == SKIP_RANGES_MAX) return read_refuse(r, f, range, "has over %d ranges", SKIP_RANGES_MAX);
        int64_t first, last, from = d->n_skip ? d->skip[d->n_skip - 1][1] : 0;
        if (!cJSON_IsArray(range) || cJSON_GetArraySize(range) != 2 || json_int64(range->child, &first) != 0 ||
            json_int64(range->child->next, &last) != 0 || first < from || last <= first) {
            hint_set(r->hint, "for example [[1000, 1064], [5000, 5008]]");
            return read_refuse(r, f, range, "range %d must be [first, last] with %lld <= first < last, ascending",
                               d->n_skip + 1, (long long)from);
        }
        d->skip[d->n_skip][0] = first;
        d->skip[d->n_skip++][1] = last;
    }
    return 0;
}

static void print_skip_ranges(FILE *out, const Field *f, const void *from) {
    (void)f;
    const DataConfig *d = (const DataConfig *)from;
    fputc('[', out);
    for (int i = 0; i < d->n_skip; i++)
        fprintf(out, "%s[%lld, %lld]", i ? ", " : "", (long long)d->skip[i][0], (long long)d->skip[i][1]);
    fputc(']', out);
}

/* --------------------------------------------------------------------------------------------------- small unions */

static const char *const recompute_names[] = {"norms", "up_projections", "swiglu"};
enum { N_RECOMPUTE = 3 };

static int read_recompute(Reader *r, const Field *f, const cJSON *item, void *to) {
    int bits = 0;
    if (cJSON_IsString(item) && strcmp(item->valuestring, "auto") == 0) {
        bits = RECOMPUTE_AUTO;
    } else if (!cJSON_IsString(item) || strcmp(item->valuestring, "none") != 0) {
        if (!cJSON_IsArray(item)) return read_refuse_value(r, f, item);
        const cJSON *child;
        cJSON_ArrayForEach(child, item) {
            int i = 0;
            while (i < N_RECOMPUTE && !(cJSON_IsString(child) && strcmp(child->valuestring, recompute_names[i]) == 0))
                i++;
            if (i == N_RECOMPUTE) return read_refuse_value(r, f, child);
            bits |= 1 << i;
        }
    }
    *(int *)to = bits;
    return 0;
}

static void print_recompute(FILE *out, const Field *f, const void *from) {
    (void)f;
    int bits = *(const int *)from, n = 0;
    if (bits == 0 || bits == RECOMPUTE_AUTO) {
        fputs(bits ? "\"auto\"" : "\"none\"", out);
        return;
    }
    for (int i = 0; i < N_RECOMPUTE; i++)
        if (bits & 1 << i) fprintf(out, "%s\"%s\"", n++ ? ", " : "[", recompute_names[i]);
    fputc(']', out);
}

static int read_auto_integer(Reader *r, const Field *f, const cJSON *item, void *to) {
    if (cJSON_IsString(item) && strcmp(item->valuestring, "auto") == 0) {
        *(int *)to = 0;
        return 0;
    }
    int64_t value;
    if (json_int64(item, &value) != 0 || (double)value < f->min || (double)value > f->max)
        return read_refuse_value(r, f, item);
    *(int *)to = (int)value;
    return 0;
}

static void print_auto_integer(FILE *out, const Field *f, const void *from) {
    (void)f;
    int value = *(const int *)from;
    if (value)
        fprintf(out, "%d", value);
    else
        fputs("\"auto\"", out);
}

static int read_capacity(Reader *r, const Field *f, const cJSON *item, void *to) {
    double value = 0;
    bool worst = cJSON_IsString(item) && strcmp(item->valuestring, "worst") == 0;
    if (!worst && (json_double(item, &value) != 0 || value < f->min || value > f->max))
        return read_refuse_value(r, f, item);
    *(double *)to = worst ? 0 : value;
    return 0;
}

static void print_capacity(FILE *out, const Field *f, const void *from) {
    (void)f;
    double value = *(const double *)from;
    if (value > 0)
        json_write_double(out, value);
    else
        fputs("\"worst\"", out);
}

static int read_prompts(Reader *r, const Field *f, const cJSON *item, void *to) {
    SampleConfig *s = (SampleConfig *)to;
    s->n_prompts = 0;
    memset(s->prompts, 0, sizeof s->prompts);
    if (!cJSON_IsArray(item)) return read_refuse_value(r, f, item);
    const cJSON *child;
    cJSON_ArrayForEach(child, item) {
        if (s->n_prompts == PROMPTS_MAX) return read_refuse(r, f, child, "has over %d prompts", PROMPTS_MAX);
        if (!cJSON_IsString(child)) return read_refuse_value(r, f, child);
        size_t length = strlen(child->valuestring);
        if (length >= PROMPT_LEN)
            return read_refuse(r, f, child, "has a prompt of %zu bytes, at most %d are kept", length, PROMPT_LEN - 1);
        memcpy(s->prompts[s->n_prompts++], child->valuestring, length);
    }
    return 0;
}

static void print_prompts(FILE *out, const Field *f, const void *from) {
    (void)f;
    const SampleConfig *s = (const SampleConfig *)from;
    fputc('[', out);
    for (int i = 0; i < s->n_prompts; i++) {
        if (i) fputs(", ", out);
        json_write_string(out, s->prompts[i]);
    }
    fputc(']', out);
}

/* ------------------------------------------------------------------------------------------------------------ RoPE */

/* Without YaRN the struct holds factor 1 and the defaults, however it was written. theta has a row of its own. */
static int read_rope_scaling(Reader *r, const Field *f, const cJSON *item, void *to) {
    RopeConfig *rope = (RopeConfig *)to;
    double theta = rope->theta;
    if (cJSON_IsObject(item)) {
        if (section_read(r, "model.rope_scaling", item, rope) != 0) return -1;
    } else if (!cJSON_IsNull(item)) {
        return read_refuse_value(r, f, item);
    }
    if (!rope->yarn) {
        memset(rope, 0, sizeof *rope);
        rope->factor = 1;
        rope->beta_fast = 32;
        rope->beta_slow = 1;
    }
    rope->theta = theta;
    return 0;
}

static void print_rows(FILE *out, const char *section, const void *base) {
    const char *separator = "{";
    for (int i = 0; i < config_n_fields; i++) {
        const Field *part = &config_fields[i];
        if (strcmp(part->section, section) != 0 || part->kind == KIND_MUST_EQUAL) continue;
        fprintf(out, "%s\"%s\": ", separator, part->name);
        part->type->print(out, part, (const char *)base + part->offset);
        separator = ", ";
    }
    fputc('}', out);
}

static void print_rope_scaling(FILE *out, const Field *f, const void *from) {
    (void)f;
    if (((const RopeConfig *)from)->yarn)
        print_rows(out, "model.rope_scaling", from);
    else
        fputs("null", out);
}

/* -------------------------------------------------------------------------------------------- sections of sections */

/* The section whose rows have their storage inside the field's. */
static const char *inner_section(const Field *f, char *buf, size_t buf_len) {
    snprintf(buf, buf_len, "%s.%s", f->section, f->name);
    return buf;
}

static int read_section(Reader *r, const Field *f, const cJSON *item, void *to) {
    char section[64];
    if (!cJSON_IsObject(item)) return read_refuse_value(r, f, item);
    return section_read(r, inner_section(f, section, sizeof section), item, to);
}

static void print_section(FILE *out, const Field *f, const void *from) {
    char section[64];
    print_rows(out, inner_section(f, section, sizeof section), from);
}

const FieldType type_schedule = {"number or points", "a number",    " or a list of [tokens, value]", true, false,
                                 read_schedule,      print_schedule};
const FieldType type_integer_schedule = {
    "integer or points", "an integer", " or a list of [tokens, value]", true, false, read_schedule, print_schedule};
const FieldType type_train_sources = {"sources",
                                      "\"synthetic\", a file or glob, or a list of {name, path, weight}",
                                      "",
                                      false,
                                      false,
                                      read_train_sources,
                                      print_train_sources};
const FieldType type_val_sources = {
    "sources", "a file or glob, or a list of {name, path}", "", false, false, read_val_sources, print_val_sources};
const FieldType type_choice_sources = {
    "sources", "a file, or a list of {name, path}", "", false, false, read_choice_sources, print_choice_sources};
const FieldType type_skip_ranges = {"ranges",         "a list of [first, last]", "", false, false,
                                    read_skip_ranges, print_skip_ranges};
const FieldType type_recompute = {
    "names", "\"none\", \"auto\" or a list out of ", "", false, true, read_recompute, print_recompute};
const FieldType type_auto_integer = {"integer or auto", "an integer",      " or \"auto\"", true, false,
                                     read_auto_integer, print_auto_integer};
const FieldType type_capacity = {"number or worst", "a number",    " or \"worst\"", true, false,
                                 read_capacity,     print_capacity};
const FieldType type_prompts = {"texts", "a list of strings", "", false, false, read_prompts, print_prompts};
const FieldType type_rope_scaling = {"object or null",  "null or an object", "", false, false,
                                     read_rope_scaling, print_rope_scaling};
const FieldType type_rope_parameters = {"object or null", "null or an object", "", false, false, NULL, NULL};
const FieldType type_section = {"object", "an object", "", false, false, read_section, print_section};
const FieldType type_any = {"", "", "", false, false, NULL, NULL};
