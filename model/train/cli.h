/* The command line: one table of options, no other grammar. Floor 5.
 *
 *     train_moe [COMMAND] --config FILE [--option VALUE]... [section.field=value]...
 *
 * Values of --set (and bare section.field=value) go to the configuration; everything else is for one run of one
 * command. Long names only, but -h, -V and -q. */
#ifndef TRAIN_MOE_CLI_H
#define TRAIN_MOE_CLI_H

#include <stdbool.h>
#include <stdint.h>

enum { SETS_MAX = 128 };

typedef enum {
    COMMAND_TRAIN,
    COMMAND_PLAN,
    COMMAND_EVAL,
    COMMAND_GENERATE,
    COMMAND_EXPORT_HF,
    COMMAND_IMPORT_HF,
    COMMAND_CHECK_DATA,
    COMMAND_HELP,
    COMMAND_COUNT
} Command;

typedef struct {
    Command command;
    const char *config;
    const char *sets[SETS_MAX];
    int n_sets;
    const char *resume;      /* "auto" (default), "never", or a folder */
    const char *init_from;   /* NULL, or a folder */
    const char *checkpoint;  /* "latest" (default), a step, or a folder */
    const char *out, *dtype; /* of export-hf and import-hf */
    const char *folder;      /* the Hugging Face folder of import-hf */
    const char **files;      /* of check-data: n_files shards or patterns; in memory of the process */
    int n_files;
    const char *tokenizer;   /* of check-data: NULL, or a file */
    const char *dump_logits; /* NULL, or a file */
    const char *prompt;      /* NULL, text, or "-" for standard input */
    int64_t tokens;
    const char *draw, *schedule; /* of plan: NULL, or a file; NULL, or a name */
    int64_t pp, micro_batches;   /* of plan: 0 = not given */
    double temperature, top_p;
    int64_t top_k;
    int64_t seed;
    const char *gpu; /* of plan: NULL, a known name or a file of rates */
    int64_t world;   /* of plan: GPUs, 0 = not given */
    bool json;
    const char *profile;                /* NULL, or FIRST:COUNT as given */
    int64_t profile_first, profile_end; /* steps [first, end) */
    const char *stop;                   /* NULL, a token's spelling or id, or "none" */
    bool show_experts;
    int64_t layer;   /* of show_experts; -1 = a middle one */
    int64_t overfit; /* steps; 0 = a run */
    bool check_streams, print_config, quiet, version;
    const char *help_word; /* of the command help */
} Args;

/* Reads argv. A mistake is one line with a hint: DIE, exit 2. */
Args cli_parse(int argc, char **argv);

/* The usage text; with a word, what the option table and the configuration know of it. Returns the exit code. */
int cli_help(const Args *args);

/* "train_moe 0.1.0 (commit ..., gcc 12.2, CPU only, Open MPI 4.1.4)" into buf, returned. */
const char *version_text(char *buf, int64_t buf_len);
const char *version_commit(void);

#endif
