/* See cli.h. */
#include "cli.h"

#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/config.h"
#include "data/config_table.h"
#include "device.h"
#include "kernels/base/check.h"
#include "kernels/comm/comm.h"
#include "plan_help.h"

#ifndef TRAIN_MOE_COMMIT
#define TRAIN_MOE_COMMIT "unknown"
#endif
#define TRAIN_MOE_VERSION "0.1.0"

/* ---- the tables -------------------------------------------------------------------------------------------------- */

static const struct {
    const char *name, *help;
} commands[COMMAND_COUNT] = {
    [COMMAND_TRAIN] = {"train", "trains, or goes on with a run (the default)"},
    [COMMAND_PLAN] = {"plan",
                      "what a run would take: parameters, FLOPs, memory, --gpu: speed; needs no GPU (also --dry-run)"},
    [COMMAND_EVAL] = {"eval", "validation loss, perplexity and multiple choice of a checkpoint; ranks share them"},
    [COMMAND_GENERATE] = {"generate", "text from a checkpoint; ranks as in training, for a model too large for one"},
    [COMMAND_EXPORT_HF] = {"export-hf", "a checkpoint as a Hugging Face folder: --out DIR"},
    [COMMAND_IMPORT_HF] = {"import-hf", "import-hf DIR --out RUN: a run's folder out of a Hugging Face folder"},
    [COMMAND_CHECK_DATA] = {"check-data",
                            "check-data FILES: reads every token of shards, says what they hold; exit 2 on "
                            "damage"},
    [COMMAND_HELP] = {"help", "this, or: help WORD | section | section.field"},
};

typedef enum { VALUE_NONE, VALUE_TEXT, VALUE_INT, VALUE_DOUBLE } ValueKind;

typedef struct {
    const char *name, *value;
    ValueKind kind;
    size_t offset; /* in Args */
    double min, max;
    unsigned commands; /* bits of the commands it is for */
    const char *help;
} Option;

enum {
    ANY = (1 << COMMAND_COUNT) - 1,
    QUIET = ANY & ~(1 << COMMAND_HELP),
    RUNS = QUIET & ~(1 << COMMAND_IMPORT_HF | 1 << COMMAND_CHECK_DATA),
    EXPORTS = 1 << COMMAND_EXPORT_HF,
    FROM_CHECKPOINT = 1 << COMMAND_EVAL | 1 << COMMAND_GENERATE | EXPORTS,
    GENERATES = 1 << COMMAND_GENERATE,
    PLANS = 1 << COMMAND_PLAN
};
#define AT(member) offsetof(Args, member)

static const Option options[] = {
    {"--config", "FILE", VALUE_TEXT, AT(config), 0, 0, RUNS, "the run, as JSON; see configs/"},
    {"--resume", "auto|never|DIR", VALUE_TEXT, AT(resume), 0, 0, 1 << COMMAND_TRAIN,
     "auto: goes on from the newest checkpoint of run.dir, else starts; never: starts anew"},
    {"--init-from", "DIR", VALUE_TEXT, AT(init_from), 0, 0, 1 << COMMAND_TRAIN,
     "weights of a checkpoint or a Hugging Face folder; optimizer, schedule and data start fresh"},
    {"--profile", "FIRST:COUNT", VALUE_TEXT, AT(profile), 0, 0, 1 << COMMAND_TRAIN,
     "for nsys profile --capture-range=cudaProfilerApi: COUNT steps; phases have names where no graph replays them"},
    {"--checkpoint", "latest|STEP|DIR", VALUE_TEXT, AT(checkpoint), 0, 0, FROM_CHECKPOINT, "which weights"},
    {"--dump-logits", "FILE", VALUE_TEXT, AT(dump_logits), 0, 0, 1 << COMMAND_EVAL,
     "logits and tokens of the first micro-batch, as safetensors"},
    {"--draw", "FILE.svg|FILE.txt", VALUE_TEXT, AT(draw), 0, 0, 1 << COMMAND_PLAN,
     "the pipeline's schedule as a drawing"},
    {"--schedule", "NAME", VALUE_TEXT, AT(schedule), 0, 0, 1 << COMMAND_PLAN,
     "paired, gpipe, 1f1b, interleaved, zb1p, dualpipe or dualpipev (parallel.schedule)"},
    {"--pp", "P", VALUE_INT, AT(pp), 1, 1024, 1 << COMMAND_PLAN, "ranks of the pipeline (parallel.pp)"},
    {"--micro-batches", "M", VALUE_INT, AT(micro_batches), 1, 1e6, 1 << COMMAND_PLAN,
     "of a step of one pipeline (from the batch)"},
    {"--out", "DIR", VALUE_TEXT, AT(out), 0, 0, EXPORTS | 1 << COMMAND_IMPORT_HF, "the folder to write"},
    {"--dtype", "bf16|fp8|fp32", VALUE_TEXT, AT(dtype), 0, 0, EXPORTS, "of the weights (bf16)"},
    {"--tokenizer", "FILE", VALUE_TEXT, AT(tokenizer), 0, 0, 1 << COMMAND_CHECK_DATA,
     "the tokenizer.json of the shards, instead of the one that their data.json names"},
    {"--prompt", "TEXT|-", VALUE_TEXT, AT(prompt), 0, 0, GENERATES, "what to continue; - reads standard input"},
    {"--tokens", "N", VALUE_INT, AT(tokens), 1, 1e9, GENERATES, "new tokens at most (100)"},
    {"--temperature", "X", VALUE_DOUBLE, AT(temperature), 0, 100, GENERATES, "0 = the most likely token (0.7)"},
    {"--top-k", "N", VALUE_INT, AT(top_k), 0, 1e9, GENERATES, "only the N most likely tokens; 0 = off"},
    {"--top-p", "X", VALUE_DOUBLE, AT(top_p), 0, 1, GENERATES, "only the most likely tokens of this mass; 1 = off"},
    {"--seed", "N", VALUE_INT, AT(seed), 0, 9e15, GENERATES, "of the sampling (0)"},
    {"--gpu", "NAME|FILE", VALUE_TEXT, AT(gpu), 0, 0, PLANS,
     "what fits one, how fast, how long, what it costs: h200, h100-80, a100-80, rtx4090, or a file; train_moe help "
     "gpu"},
    {"--world", "N", VALUE_INT, AT(world), 1, 1e6, PLANS, "the plan for N GPUs"},
    {"--json", NULL, VALUE_NONE, AT(json), 0, 0, PLANS, "the plan as JSON; train_moe help json lists its members"},
    {"--stop", "TOKEN|none", VALUE_TEXT, AT(stop), 0, 0, GENERATES,
     "ends the text, as the document token and eos_token_id do; none: nothing does"},
    {"--show-experts", NULL, VALUE_NONE, AT(show_experts), 0, 0, GENERATES,
     "colours each token by its first expert in a layer (not if NO_COLOR is set), and tells who took what"},
    {"--layer", "N", VALUE_INT, AT(layer), 0, 1e6, GENERATES, "of --show-experts, counted from 0 (a middle one)"},
    {"--overfit", "N", VALUE_INT, AT(overfit), 1, 1e9, 1 << COMMAND_TRAIN,
     "a check before a run: the first micro-batch alone for N steps; writes nothing; exit 0 if it is learnt by heart"},
    {"--check-streams", NULL, VALUE_NONE, AT(check_streams), 0, 0, 1 << COMMAND_TRAIN,
     "for who changes the code: ends where two streams touch the same memory and no event orders them"},
    {"--print-config", NULL, VALUE_NONE, AT(print_config), 0, 0, RUNS, "the effective configuration, then exit"},
    {"--quiet", NULL, VALUE_NONE, AT(quiet), 0, 0, QUIET, "warnings and the last line only (also -q)"},
    {"--version", NULL, VALUE_NONE, AT(version), 0, 0, ANY, "what this binary is and can do (also -V)"},
};
enum { N_OPTIONS = sizeof options / sizeof *options };

/* ---- nearest names ----------------------------------------------------------------------------------------------- */

/* The name in the table that `word` begins, or that it is a slip of the fingers away from; NULL if none is near. */
static const char *nearest_of(const char *word, const char *name, const char *nearest, int *best) {
    const int distance = edit_distance(word, name), length = (int)strlen(word);
    const bool begins = strncmp(name, word, strlen(word)) == 0 || strncmp(name, word, strlen(name)) == 0;
    const int score = length >= 3 && begins ? 0 : distance;
    if (score >= *best || score * 2 > length) return nearest;
    *best = score;
    return name;
}

static const char *nearest_option(const char *word) {
    const char *nearest = NULL;
    const int letters = (int)strlen(word) - 2; /* behind the dashes: more than half of them are right */
    int best = letters < 7 ? (letters + 1) / 2 : 4;
    for (int i = 0; i < N_OPTIONS; i++) nearest = nearest_of(word, options[i].name, nearest, &best);
    return nearest;
}

static const char *nearest_command(const char *word) {
    const char *nearest = NULL;
    int best = 4;
    for (int i = 0; i < COMMAND_COUNT; i++) nearest = nearest_of(word, commands[i].name, nearest, &best);
    return nearest;
}

/* "section.field", or a field alone: what it may be in the configuration. True if hint (ERR_LEN) names one. */
static bool suggest_setting(const char *word, char *hint) {
    char section[64] = "";
    const char *dot = strrchr(word, '.');
    if (dot && (size_t)(dot - word) < sizeof section)
        snprintf(section, sizeof section, "%.*s", (int)(dot - word), word);
    suggest_key(section, dot ? dot + 1 : word, hint);
    return strncmp(hint, "did you mean", 12) == 0;
}

static const char set_example[] = "for example --set train.lr=3e-4";

static void die_unknown_option(const char *word) {
    char name[64], setting[ERR_LEN], hint[ERR_LEN + 64] = "train_moe help lists all";
    snprintf(name, sizeof name, "%.*s", (int)strcspn(word, "="), word);
    const char *nearest = nearest_option(name);
    if (nearest)
        snprintf(hint, sizeof hint, "did you mean %s? train_moe help lists all", nearest);
    else if (strncmp(name, "--", 2) == 0 && suggest_setting(name + 2, setting))
        snprintf(hint, sizeof hint, "%s Settings have no dashes, %s", setting, set_example);
    DIE(hint, "unknown option '%s'", word);
}

static bool ends_in_json(const char *word) {
    const size_t n = strlen(word);
    return n > 5 && strcmp(word + n - 5, ".json") == 0;
}

static void die_unknown_command(const char *word) {
    char hint[ERR_LEN] = "train_moe help lists all";
    const char *nearest = nearest_command(word);
    if (ends_in_json(word))
        snprintf(hint, sizeof hint, "a configuration is named by --config %.200s", word);
    else if (nearest)
        snprintf(hint, sizeof hint, "did you mean %s? train_moe help lists all", nearest);
    DIE(hint, "unknown command '%s'", word);
}

/* A word behind the command that is neither option nor setting. */
static void die_stray(const Args *args, const char *word) {
    char hint[ERR_LEN] = "settings are section.field=value; train_moe help lists the rest";
    const char *dot = strrchr(word, '.');
    char section[64] = "";
    if (dot) snprintf(section, sizeof section, "%.*s", (int)(dot - word), word);
    if (args->command == COMMAND_HELP)
        snprintf(hint, sizeof hint, "help explains one word, for example train_moe help train.lr");
    else if (ends_in_json(word))
        snprintf(hint, sizeof hint, "a configuration is named by --config %.200s", word);
    else if (dot && field_find(section, dot + 1))
        snprintf(hint, sizeof hint, "write %.200s=VALUE, without spaces", word);
    else if (args->command == COMMAND_GENERATE)
        snprintf(hint, sizeof hint, "the text to continue is given by --prompt \"...\", in quotes");
    DIE(hint, "'%s' is not understood here", word);
}

/* ---- parsing ----------------------------------------------------------------------------------------------------- */

static void read_value(Args *args, const Option *o, const char *text) {
    char *end;
    errno = 0;
    void *place = (char *)args + o->offset;
    if (o->kind == VALUE_TEXT) {
        *(const char **)place = text;
        return;
    }
    double x = 0;
    bool ok;
    if (o->kind == VALUE_INT) {
        long long n = strtoll(text, &end, 10);
        ok = *text && !*end && errno == 0;
        x = (double)n;
        *(int64_t *)place = n;
    } else {
        x = strtod(text, &end);
        ok = *text && !*end;
        *(double *)place = x;
    }
    if (!ok || !(x >= o->min && x <= o->max))
        DIE(o->help, "%s %s: not %s between %g and %g", o->name, text,
            o->kind == VALUE_INT ? "a whole number" : "a number", o->min, o->max);
}

static void add_set(Args *args, const char *text) {
    if (args->n_sets == SETS_MAX) DIE(NULL, "more than %d --set", SETS_MAX);
    args->sets[args->n_sets++] = text;
}

/* "section.field=value"; whether there is such a field is for the configuration to say. */
static bool is_assignment(const char *word) {
    return strchr(word, '=') && isalpha((unsigned char)word[0]);
}

/* One option at argv[*i]; its value may follow or stand behind '='. Bit k of *given: options[k] was there. */
static void parse_option(Args *args, unsigned *given, int argc, char **argv, int *i) {
    const char *word = argv[*i], *equals = strchr(word, '=');
    const size_t length = equals ? (size_t)(equals - word) : strlen(word);
    const bool is_set = length == 5 && strncmp(word, "--set", 5) == 0;
    const Option *o = NULL;
    for (int k = 0; k < N_OPTIONS && !o; k++)
        if (strlen(options[k].name) == length && strncmp(options[k].name, word, length) == 0) o = &options[k];
    if (!o && !is_set) die_unknown_option(word);
    if (o) *given |= 1u << (o - options);
    if (o && o->kind == VALUE_NONE) {
        if (equals) DIE(NULL, "%s takes no value", o->name);
        *(bool *)((char *)args + o->offset) = true;
        return;
    }
    const char *value = equals ? equals + 1 : (*i + 1 < argc ? argv[++*i] : NULL);
    if (!value)
        DIE(is_set ? set_example : o->help, "%s needs a value: %s", word, is_set ? "section.field=value" : o->value);
    if (!is_set)
        read_value(args, o, value);
    else if (!strchr(value, '='))
        DIE(set_example, "--set %s: not section.field=value", value);
    else
        add_set(args, value);
}

static void check_options_fit(const Args *args, unsigned given) {
    for (int k = 0; k < N_OPTIONS; k++)
        if ((given >> k & 1) && !(options[k].commands & 1u << args->command))
            DIE("train_moe help lists what goes with what", "%s does not go with the command %s", options[k].name,
                commands[args->command].name);
}

static void read_profile(Args *args) {
    long long first, count;
    int used = 0;
    if (!args->profile) return;
    if (sscanf(args->profile, "%lld:%lld%n", &first, &count, &used) != 2 || args->profile[used] || first < 1 ||
        count < 1 || count > INT64_MAX - first)
        DIE("for example --profile 20:3, the steps 20, 21 and 22", "--profile %s: not FIRST:COUNT", args->profile);
    args->profile_first = first;
    args->profile_end = first + count;
}

/* The command is the first word that is no option. */
static int parse_command(Args *args, int argc, char **argv) {
    if (argc < 2 || argv[1][0] == '-' || is_assignment(argv[1])) return 1;
    for (int c = 0; c < COMMAND_COUNT; c++)
        if (strcmp(argv[1], commands[c].name) == 0) {
            args->command = (Command)c;
            return 2;
        }
    die_unknown_command(argv[1]);
    return 0;
}

Args cli_parse(int argc, char **argv) {
    Args args;
    memset(&args, 0, sizeof args);
    args.command = argc < 2 ? COMMAND_HELP : COMMAND_TRAIN;
    args.resume = "auto";
    args.checkpoint = "latest";
    args.dtype = "bf16";
    args.tokens = 100;
    args.temperature = 0.7;
    args.top_p = 1;
    args.layer = -1;
    unsigned given = 0;
    args.files = (const char **)calloc((size_t)argc + 1, sizeof *args.files);
    CHECK(args.files, "no memory for the command line");
    for (int i = parse_command(&args, argc, argv); i < argc; i++) {
        const char *word = argv[i];
        if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0)
            args.command = COMMAND_HELP;
        else if (strcmp(word, "--dry-run") == 0)
            args.command = COMMAND_PLAN;
        else if (strcmp(word, "-V") == 0)
            args.version = true;
        else if (strcmp(word, "-q") == 0)
            args.quiet = true;
        else if (word[0] == '-')
            parse_option(&args, &given, argc, argv, &i);
        else if (args.command == COMMAND_CHECK_DATA)
            args.files[args.n_files++] = word;
        else if (is_assignment(word))
            add_set(&args, word);
        else if (args.command == COMMAND_HELP && !args.help_word)
            args.help_word = word;
        else if (args.command == COMMAND_IMPORT_HF && !args.folder)
            args.folder = word;
        else
            die_stray(&args, word);
    }
    if (args.version || args.command == COMMAND_HELP) return args;
    check_options_fit(&args, given);
    read_profile(&args);
    if (!args.config && RUNS & 1 << args.command) DIE("for example --config configs/tiny.json", "no --config");
    return args;
}

/* ---- texts ------------------------------------------------------------------------------------------------------- */

int cli_help(const Args *args) {
    if (args->help_word) {
        int rows = config_help(stdout, args->help_word) + plan_help(stdout, args->help_word);
        for (int i = 0; i < N_OPTIONS; i++) {
            if (!strstr(options[i].name, args->help_word) && !strstr(options[i].help, args->help_word)) continue;
            printf("%s %s  %s\n", options[i].name, options[i].value ? options[i].value : "", options[i].help);
            rows++;
        }
        char hint[ERR_LEN];
        if (rows == 0)
            DIE(suggest_setting(args->help_word, hint) ? hint : "train_moe help lists all", "nothing is known of '%s'",
                args->help_word);
        return EXIT_DONE;
    }
    printf("train_moe [COMMAND] --config FILE [--set section.field=value]... [OPTION]...\n\ncommands\n");
    for (int c = 0; c < COMMAND_COUNT; c++) printf("  %-10s %s\n", commands[c].name, commands[c].help);
    printf("\noptions\n");
    for (int i = 0; i < N_OPTIONS; i++) {
        char left[64];
        snprintf(left, sizeof left, "%s %s", options[i].name, options[i].value ? options[i].value : "");
        printf("  %-30s %s\n", left, options[i].help);
    }
    printf("  %-30s %s\n", "--set section.field=value", "overrides the file; also without --set; train_moe help train");
    printf("\nexit codes: 0 finished, 1 failed, 2 your input, 3 stopped early and saved\n\nconfiguration\n");
    config_help(stdout, NULL);
    return EXIT_DONE;
}

const char *version_commit(void) {
    return TRAIN_MOE_COMMIT;
}

const char *version_text(char *buf, int64_t buf_len) {
#if defined(__clang__)
    const char *compiler = "clang " __clang_version__;
#else
    const char *compiler = "gcc " __VERSION__;
#endif
    char device[DEVICE_TEXT_LEN];
    snprintf(buf, (size_t)buf_len, "train_moe " TRAIN_MOE_VERSION " (commit %s, %.*s, %s, %s)", TRAIN_MOE_COMMIT,
             (int)strcspn(compiler + 6, " ") + 6, compiler, device_built_for(device), launch_mpi_version());
    return buf;
}
