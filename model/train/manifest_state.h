/* What the writer and the reader of manifest.json share and nobody else needs. Floor 5. */
#ifndef TRAIN_MOE_MANIFEST_STATE_H
#define TRAIN_MOE_MANIFEST_STATE_H

#include <stdbool.h>
#include <stddef.h>

typedef enum { STATE_INT, STATE_DOUBLE, STATE_WINDOW } StateKind;

/* One row for each member of RunState but step, which stands at the top: "state" in the file. */
typedef struct {
    const char *name;
    StateKind kind;
    size_t offset; /* in RunState */
    bool is_late;  /* added after format 1 was in use: zero where a manifest does not have it */
} StateField;

extern const StateField state_fields[];
extern const int n_state_fields;

#define MANIFEST_NAME "manifest.json"

/* The last bytes of the file, in this spelling, always MANIFEST_TAIL_LEN long. */
#define MANIFEST_TAIL_KEY "\"manifest_hash\": \""
#define MANIFEST_TAIL_FORMAT MANIFEST_TAIL_KEY "%016llx\"\n}\n"
enum { MANIFEST_TAIL_LEN = sizeof MANIFEST_TAIL_KEY - 1 + 16 + 4 };

#endif
