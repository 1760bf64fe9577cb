/* Inside of the configuration: the table and what walks it. Only data/config*.c include this. Floor 1.
 *
 * A row is a field: where it stands in the JSON, how its value is read and printed (its type), what a resume does with
 * it (its kind), where it lives in the Config, its default in JSON, its range. Rows of one section are neighbours.
 * Sections with a dot or "[]" are objects inside a field ("model.rope_scaling", "data.train[]"); their offsets count
 * from the struct that holds one such object. */
#ifndef TRAIN_MOE_CONFIG_TABLE_H
#define TRAIN_MOE_CONFIG_TABLE_H

#include "data/config.h"
#include "data/json.h"
#include "kernels/base/check.h"

typedef enum {
    KIND_PLAIN,        /* may change on resume; the change is printed */
    KIND_ARCHITECTURE, /* a resume refuses a difference */
    KIND_DATA,         /* a resume refuses a difference */
    KIND_MUST_EQUAL,   /* not stored; the value has to be one of the list in `def` */
    KIND_IGNORED       /* not stored; named and passed over */
} FieldKind;

typedef struct Field Field;
typedef struct Reader Reader;

/* How values of a type are read, printed and described. `to` and `from` point at the field's own storage. */
typedef struct {
    const char *name;   /* in help: "integer" */
    const char *phrase; /* in messages: "an integer" */
    const char *tail;   /* after the range: " or null" */
    bool has_range, has_choices;
    int (*read)(Reader *r, const Field *f, const cJSON *item, void *to); /* 0, or -1 with the reader's err set */
    void (*print)(FILE *out, const Field *f, const void *from);          /* as JSON */
} FieldType;

struct Field {
    const char *section, *name;
    const FieldType *type;
    FieldKind kind;
    size_t offset, size;
    const char *def; /* default as JSON, NULL = has to be given; must_equal: the list of allowed values */
    double min, max;
    const char *unit; /* of a choice: "auto|cpu|cuda", in the order of its enum */
    const char *help;
};

extern const Field config_fields[];
extern const int config_n_fields;

/* What a reading run knows. */
struct Reader {
    Config *config;
    char *err, *hint;          /* ERR_LEN each */
    const char *name;          /* of the config file, in messages */
    char model_name[PATH_LEN]; /* of the model's own file, or "" */
    const char *const *sets;
};

/* Types, config_value.c: */
extern const FieldType type_integer, type_integer_or_null, type_seed, type_number, type_number_or_null,
    type_rate_or_null, type_boolean, type_choice, type_word, type_text, type_token_id, type_token_ids;
/* and config_list.c: */
extern const FieldType type_schedule, type_integer_schedule, type_train_sources, type_val_sources, type_choice_sources,
    type_skip_ranges, type_recompute, type_auto_integer, type_capacity, type_prompts, type_rope_scaling,
    type_rope_parameters, type_section, type_any;

/* Row of section and name, or NULL. */
const Field *field_find(const char *section, const char *name);
bool section_exists(const char *section);
/* A section of the file itself: no object inside a field. */
bool section_is_top(const char *section);

/* "an integer in [1, 4096]", into buf, returned. */
const char *field_expects(const Field *f, char *buf, size_t buf_len);
/* "[1, 4096]", or "" without a range. */
const char *field_range(const Field *f, char *buf, size_t buf_len);
/* The stored value as JSON text. malloc'd; the caller frees it. `base` is the struct that offsets count from. */
char *field_text(const Field *f, const void *base);

/* Errors: "where: section.field " and what the caller says; always -1. */
int read_refuse(Reader *r, const Field *f, const cJSON *item, const char *fmt, ...) PRINTF_LIKE(4, 5);
/* "... must be an integer in [1, 8], found the string "8"", with the hint that fits. */
int read_refuse_value(Reader *r, const Field *f, const cJSON *item);
void hint_set(char *hint, const char *fmt, ...) PRINTF_LIKE(2, 3);
enum { WHERE_LEN = PATH_LEN + 16 };
/* "file:line", "file" for line 0, or the --set that made the item. */
const char *read_where(const Reader *r, const char *section, int line, char *buf, size_t buf_len);

/* Reads the members of `object` by the rows of `section`, then fills defaults. Storage is base + offset. */
int section_read(Reader *r, const char *section, const cJSON *object, void *base);

/* The nearest known name for a key that is in no row: fills the hint. */
void suggest_key(const char *section, const char *key, char *hint);
/* Edits (insert, delete, replace, swap) from a to b. */
int edit_distance(const char *a, const char *b);

/* Derived defaults, then the rules between fields. 0, or -1 with err and hint. */
int config_finish(Reader *r);
int config_check_rules(Reader *r);

#endif
