/* See config.h: what is done with a configuration once it is read. Reading is config_read.c; the table config_table.c.
 */
#include "config_table.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static bool is_stored(const Field *f) {
    return f->size > 0 && f->kind != KIND_MUST_EQUAL && f->kind != KIND_IGNORED;
}

static void print_section(FILE *out, const Config *c, int first) {
    const char *section = config_fields[first].section, *separator = "";
    fputs(",\n  ", out);
    json_write_string(out, section);
    fputs(": {\n", out);
    if (strcmp(section, "model") == 0 && c->model.path[0]) {
        fputs("    \"//\": ", out);
        json_write_string(out, c->model.path);
        separator = ",\n";
    }
    for (int i = first; i < config_n_fields; i++) {
        const Field *f = &config_fields[i];
        if (strcmp(f->section, section) != 0 || !is_stored(f)) continue;
        fprintf(out, "%s    \"%s\": ", separator, f->name);
        f->type->print(out, f, (const char *)c + f->offset);
        separator = ",\n";
    }
    fputs("\n  }", out);
}

char *config_to_json(const Config *c) {
    char *text = NULL;
    size_t size;
    FILE *out = open_memstream(&text, &size);
    CHECK(out, "no memory");
    fprintf(out, "{\n  \"version\": %d", c->version);
    for (int i = 0; i < config_n_fields; i++) {
        const char *section = config_fields[i].section;
        if (section_is_top(section) && (i == 0 || strcmp(config_fields[i - 1].section, section) != 0))
            print_section(out, c, i);
    }
    fputs("\n}\n", out);
    CHECK(fclose(out) == 0 && text, "no memory");
    return text;
}

/* "a; b", cut with "..." where the buffer ends. */
static void append_change(char *changed, size_t changed_len, const Field *f, const char *before, const char *after) {
    size_t n = strlen(changed);
    int more =
        snprintf(changed + n, changed_len - n, "%s%s.%s %s -> %s", n ? "; " : "", f->section, f->name, before, after);
    if (more < 0 || n + (size_t)more < changed_len) return;
    size_t end = n + 4 < changed_len ? n : changed_len > 4 ? changed_len - 4 : 0;
    snprintf(changed + end, changed_len - end, "...");
}

/* Which data a source has, tells its identity (source.h), not the folder it lies in. */
static bool same_sources(const DataConfig *a, const DataConfig *b) {
    if (a->synthetic != b->synthetic || a->n_train != b->n_train) return false;
    for (int i = 0; i < a->n_train; i++)
        if (strcmp(a->train[i].name, b->train[i].name) != 0 || a->train[i].weight != b->train[i].weight) return false;
    return true;
}

int config_compare(const Config *saved, const Config *now, char *changed, size_t changed_len, char *err) {
    int result = 0;
    changed[0] = 0;
    for (int i = 0; i < config_n_fields && result == 0; i++) {
        const Field *f = &config_fields[i];
        if (!section_is_top(f->section) || !is_stored(f)) continue;
        char *before = field_text(f, saved), *after = field_text(f, now);
        bool differs = strcmp(before, after) != 0;
        const bool may = f->type == &type_train_sources && same_sources(&saved->data, &now->data);
        if (differs && !may && (f->kind == KIND_ARCHITECTURE || f->kind == KIND_DATA))
            result = err_set(err, "%s.%s is %.200s in the saved run, but %.200s in the configuration", f->section,
                             f->name, before, after);
        else if (differs)
            append_change(changed, changed_len, f, before, after);
        free(before);
        free(after);
    }
    return result;
}

void config_first_difference(const Config *first, const Config *here, char *text, size_t text_len) {
    bool is_found = false;
    for (int i = 0; i < config_n_fields && !is_found; i++) {
        const Field *f = &config_fields[i];
        if (!section_is_top(f->section) || !is_stored(f)) continue;
        char *one = field_text(f, first), *other = field_text(f, here);
        is_found = strcmp(one, other) != 0;
        if (is_found)
            snprintf(text, text_len, "%s.%s is %.180s on rank 0, but %.180s here", f->section, f->name, one, other);
        free(one);
        free(other);
    }
}

double schedule_at(const Schedule *s, Shape shape, int64_t tokens) {
    if (s->n == 1 || tokens < s->tokens[0]) return s->value[0];
    int i = s->n - 1; /* the last point reached; of a jump, its second */
    while (s->tokens[i] > tokens) i--;
    if (i == s->n - 1 || shape == SHAPE_CONSTANT) return s->value[i];
    CHECK(shape == SHAPE_LINEAR || shape == SHAPE_COSINE, "shape %d does not join points", (int)shape);
    double t = (double)(tokens - s->tokens[i]) / (double)(s->tokens[i + 1] - s->tokens[i]);
    if (shape == SHAPE_COSINE) t = (1 - cos(t * M_PI)) / 2;
    return s->value[i] + (s->value[i + 1] - s->value[i]) * t;
}
