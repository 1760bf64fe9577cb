/* See config.h: the table as help. */
#include "config_table.h"

#include <ctype.h>
#include <string.h>

static bool contains(const char *text, const char *word) {
    size_t n = strlen(word);
    for (; *text; text++)
        if (strncasecmp(text, word, n) == 0) return true;
    return n == 0;
}

static void full_name(const Field *f, char *buf, size_t buf_len) {
    snprintf(buf, buf_len, "%s%s%s", f->section, f->section[0] ? "." : "", f->name);
}

/* "section.field  type  default  [min, max] unit  help" */
static void print_row(FILE *out, const Field *f) {
    char name[96], range[96], limits[256];
    bool fixed = f->kind == KIND_MUST_EQUAL;
    full_name(f, name, sizeof name);
    field_range(f, range, sizeof range);
    snprintf(limits, sizeof limits, "%s%s%s", range, range[0] && f->unit[0] ? " " : "", fixed ? f->def : f->unit);
    fprintf(out, "%-36s  %-16s  %-10s  %-34s  %s\n", name, fixed ? "one of" : f->type->name,
            fixed    ? ""
            : f->def ? f->def
                     : "required",
            limits, f->help);
}

static void print_detail(FILE *out, const Field *f) {
    static const char *const on_resume[] = {"may change", "must be the same (architecture)", "must be the same (data)",
                                            "fixed", "not compared"};
    char name[96], expects[256];
    full_name(f, name, sizeof name);
    fprintf(out, "%s\n  %s\n", name, f->help);
    if (f->kind == KIND_IGNORED) {
        fprintf(out, "  may stay in a pasted config.json; its value is not read\n");
        return;
    }
    if (f->kind == KIND_MUST_EQUAL) {
        fprintf(out, "  allowed    %s\n", f->def);
        return;
    }
    fprintf(out, "  takes      %s\n", field_expects(f, expects, sizeof expects));
    fprintf(out, "  default    %s\n", f->def ? f->def : "none: it has to be given");
    if (f->unit[0] && !f->type->has_choices) fprintf(out, "  unit       %s\n", f->unit);
    fprintf(out, "  on resume  %s\n", on_resume[f->kind]);
    if (section_is_top(f->section)) fprintf(out, "  set it     --set %s=...\n", name);
}

static bool matches(const Field *f, const char *word) {
    char name[96];
    full_name(f, name, sizeof name);
    size_t n = strlen(word);
    if (section_exists(word)) return strncmp(f->section, word, n) == 0 && (!f->section[n] || f->section[n] == '.');
    return contains(name, word) || contains(f->help, word);
}

int config_help(FILE *out, const char *word) {
    int n = 0;
    bool all = !word || !word[0];
    for (int i = 0; i < config_n_fields && !all; i++) {
        char name[96];
        full_name(&config_fields[i], name, sizeof name);
        if (strcmp(name, word) != 0) continue;
        print_detail(out, &config_fields[i]);
        return 1;
    }
    const char *section = NULL;
    size_t column = 0; /* of the list of ignored keys */
    for (int i = 0; i < config_n_fields; i++) {
        const Field *f = &config_fields[i];
        if (!all && !matches(f, word)) continue;
        if (f->kind == KIND_IGNORED) {
            if (column == 0 || column + strlen(f->name) > 100)
                column = (size_t)fprintf(out, "%s", column ? "\n   " : "ignored:");
            column += (size_t)fprintf(out, " %s", f->name);
            n++;
            continue;
        }
        if (column) fputc('\n', out);
        column = 0;
        if (section && strcmp(section, f->section) != 0) fputc('\n', out);
        section = f->section;
        print_row(out, f);
        n++;
    }
    if (column) fputc('\n', out);
    return n;
}
