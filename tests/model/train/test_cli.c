/* The command line: what each word does, and what a mistake is answered with. */
#include "model/train/cli.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/test.h"

enum { WORDS_MAX = 160 };

/* A command line, split at its spaces. */
typedef struct {
    char text[8192];
    char *argv[WORDS_MAX];
    int argc;
} Words;

static void split(Words *w, const char *line) {
    snprintf(w->text, sizeof w->text, "train_moe %s", line);
    w->argc = 0;
    for (char *word = strtok(w->text, " "); word && w->argc < WORDS_MAX; word = strtok(NULL, " "))
        w->argv[w->argc++] = word;
}

static Words words; /* the parsed strings point into it */

static Args parse(const char *line) {
    split(&words, line);
    return cli_parse(words.argc, words.argv);
}

static bool same(const char *a, const char *b) {
    return a && b ? strcmp(a, b) == 0 : a == b;
}

/* ---- what is understood ------------------------------------------------------------------------------------------ */

TEST(cli_defaults) {
    const Args a = parse("--config c.json");
    EXPECT(a.command == COMMAND_TRAIN && same(a.config, "c.json") && a.n_sets == 0);
    EXPECT(same(a.resume, "auto") && same(a.checkpoint, "latest") && !a.init_from && !a.prompt && !a.help_word);
    EXPECT(a.tokens == 100 && a.temperature == 0.7 && a.top_p == 1 && a.top_k == 0 && a.seed == 0);
    EXPECT(!a.print_config && !a.quiet && !a.version);
    EXPECT(!a.stop && !a.show_experts && a.layer == -1 && a.overfit == 0);
    EXPECT(parse("").command == COMMAND_HELP, "alone it explains itself");
}

TEST(cli_commands) {
    static const struct {
        const char *line;
        Command command;
    } cases[] = {
        {"train --config c", COMMAND_TRAIN},
        {"--config c", COMMAND_TRAIN},
        {"train.lr=1 --config c", COMMAND_TRAIN},
        {"plan --config c", COMMAND_PLAN},
        {"--dry-run --config c", COMMAND_PLAN},
        {"train --config c --dry-run", COMMAND_PLAN},
        {"eval --config c", COMMAND_EVAL},
        {"generate --config c", COMMAND_GENERATE},
        {"help", COMMAND_HELP},
        {"--help", COMMAND_HELP},
        {"-h", COMMAND_HELP},
        {"train --help", COMMAND_HELP},
        {"generate --config c -h", COMMAND_HELP},
        {"check-data x.bin", COMMAND_CHECK_DATA},
        {"check-data --help", COMMAND_HELP},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        EXPECT(parse(cases[i].line).command == cases[i].command, "%s", cases[i].line);
    EXPECT(same(parse("help train.lr").help_word, "train.lr") && !parse("help").help_word);
    EXPECT(same(parse("--help moe").help_word, "moe"));
}

TEST(cli_check_data_takes_files) {
    const Args a = parse("check-data a=b.bin --tokenizer t.json shards/*.bin.zst -q c");
    EXPECT(a.n_files == 3 && same(a.files[0], "a=b.bin") && same(a.files[1], "shards/*.bin.zst") &&
           same(a.files[2], "c") && same(a.tokenizer, "t.json") && a.quiet && a.n_sets == 0);
    EXPECT(parse("check-data").n_files == 0);
}

TEST(cli_values) {
    Args a =
        parse("generate --config=c=d.json --checkpoint 1500 --prompt - --tokens 7 --temperature 0 --top-k 40 --top-p "
              "0.25 --seed 9000000000000000 --quiet");
    EXPECT(same(a.config, "c=d.json") && same(a.checkpoint, "1500") && same(a.prompt, "-"));
    EXPECT(a.tokens == 7 && a.temperature == 0 && a.top_k == 40 && a.top_p == 0.25 && a.seed == 9000000000000000 &&
           a.quiet);
    a = parse("generate --config c --tokens=1000000000 --temperature=1e-9 --top-k=0 --top-p=1e0 -q");
    EXPECT(a.tokens == 1000000000 && a.temperature == 1e-9 && a.top_k == 0 && a.top_p == 1 && a.quiet);
    a = parse("--config c --resume runs/x/step_00000010");
    EXPECT(same(a.resume, "runs/x/step_00000010"));
    a = parse("train --config c --resume never --init-from other --print-config");
    EXPECT(same(a.resume, "never") && same(a.init_from, "other") && a.print_config);
    a = parse("--config first --config second");
    EXPECT(same(a.config, "second"), "the later word wins, as with --set");
    EXPECT(parse("--version").version && parse("-V").version, "no configuration needed");
    a = parse("generate --config c --prompt=--tokens");
    EXPECT(same(a.prompt, "--tokens"));
    a = parse("generate --config c --prompt --tokens");
    EXPECT(same(a.prompt, "--tokens"), "a value may look like an option");
}

TEST(cli_settings_keep_their_order) {
    const Args a = parse("--set train.lr=1e-3 --config c data.val=x=y --set=run.dir=runs/a train.lr=2e-3");
    static const char *const want[] = {"train.lr=1e-3", "data.val=x=y", "run.dir=runs/a", "train.lr=2e-3"};
    EXPECT_EQ(a.n_sets, 4);
    for (int i = 0; i < 4; i++) EXPECT(same(a.sets[i], want[i]), "%d: %s", i, a.sets[i]);
    char line[4096] = "--config c";
    for (int i = 0; i < SETS_MAX; i++) snprintf(line + strlen(line), sizeof line - strlen(line), " train.steps=%d", i);
    EXPECT_EQ(parse(line).n_sets, SETS_MAX);
    /* The configuration knows better what is meant. */
    EXPECT(same(parse("--config c lr=3e-4 model=deepseek.json").sets[1], "model=deepseek.json"));
}

/* ---- what is not ------------------------------------------------------------------------------------------------- */

static void parse_line(void *line) {
    parse((const char *)line);
}

static void expect_refused(const char *line, const char *text) {
    EXPECT(expect_exit(EXIT_USER, text, parse_line, (void *)(uintptr_t)line), "train_moe %s", line);
}

TEST(cli_refuses_unknown_words) {
    static const struct {
        const char *line, *text;
    } cases[] = {
        {"--confg c.json", "unknown option '--confg'"},
        {"--confg c.json", "did you mean --config?"},
        {"--temprature=1 --config c", "did you mean --temperature?"},
        {"--config c --top_k 3", "did you mean --top-k?"},
        {"--config c -x", "unknown option '-x'"},
        {"--config c -t", "unknown option"},
        {"generat --config c", "unknown command 'generat'"},
        {"generat --config c", "did you mean generate?"},
        {"configs/tiny.json", "unknown command 'configs/tiny.json'"},
        {"configs/tiny.json", "hint:  a configuration is named by --config configs/tiny.json\n"},
        {"gen --config c", "did you mean generate?"},
        {"evaluate --config c", "did you mean eval?"},
        {"--config c -v", "hint:  train_moe help lists all\n"},
        {"--config c --lr 3e-4", "did you mean train.lr? Settings have no dashes, for example --set train.lr=3e-4"},
        {"--config c --train.lr=3e-4", "did you mean train.lr?"},
        {"--config c --learning-rate=3e-4", "did you mean train.lr?"},
        {"train c.json", "a configuration is named by --config c.json"},
        {"--config c train.lr 3e-4", "write train.lr=VALUE, without spaces"},
        {"generate --config c Emma", "by --prompt"},
        {"help train.lr train.steps", "help explains one word"},
        {"quite-another-thing", "train_moe help lists all"},
        {"train --config c tiny", "'tiny' is not understood"},
        {"--config c train", "'train' is not understood"},
        {"--config c fast", "section.field=value"},
        {"--config c 1.5=x", "not understood"},
        {"help train.lr train.steps", "'train.steps' is not understood"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) expect_refused(cases[i].line, cases[i].text);
}

/* J6, J7 and the rest of the ranges. */
TEST(cli_refuses_bad_values) {
    static const struct {
        const char *line, *text;
    } cases[] = {
        {"generate --config c --temperature -1", "--temperature -1: not a number between 0 and 100"},
        {"generate --config c --temperature nan", "--temperature nan"},
        {"generate --config c --temperature inf", "--temperature inf"},
        {"generate --config c --temperature 0.7x", "--temperature 0.7x"},
        {"generate --config c --temperature=", "--temperature"},
        {"generate --config c --top-k -1", "--top-k -1: not a whole number between 0 and 1e+09"},
        {"generate --config c --top-k 1.5", "--top-k 1.5"},
        {"generate --config c --top-k 99999999999999999999", "--top-k 99999999999999999999"},
        {"generate --config c --top-p 1.01", "--top-p 1.01: not a number between 0 and 1"},
        {"generate --config c --top-p -0.1", "--top-p -0.1"},
        {"generate --config c --tokens 0", "--tokens 0: not a whole number between 1"},
        {"generate --config c --tokens many", "--tokens many"},
        {"generate --config c --tokens=", "--tokens"},
        {"generate --config c --seed -5", "--seed -5"},
        {"generate --config c --layer -1", "--layer -1"},
        {"generate --config c --show-experts=1", "--show-experts takes no value"},
        {"--config c --overfit 0", "--overfit 0: not a whole number between 1"},
        {"--config c --overfit", "--overfit needs a value: N"},
        {"generate --config c --seed 9007199254740993000", "--seed"},
        {"--config", "--config needs a value: FILE"},
        {"--config c --resume", "--resume needs a value: auto|never|DIR"},
        {"--config c --set", "--set needs a value: section.field=value"},
        {"--config c --set train.lr", "--set train.lr: not section.field=value"},
        {"--config c --set train.lr", "for example --set train.lr=3e-4"},
        {"--config c --quiet=1", "--quiet takes no value"},
        {"generate --config c --tokens 0", "hint:  new tokens at most (100)\n"},
        {"train", "no --config"},
        {"train.lr=1", "for example --config configs/tiny.json"},
        {"eval --checkpoint latest", "no --config"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) expect_refused(cases[i].line, cases[i].text);
}

TEST(cli_refuses_options_of_other_commands) {
    static const struct {
        const char *line, *text;
    } cases[] = {
        {"train --config c --prompt x", "--prompt does not go with the command train"},
        {"--config c --tokens=5", "--tokens does not go with the command train"},
        {"eval --config c --resume never", "--resume does not go with the command eval"},
        {"eval --config c --temperature 1", "--temperature does not go with the command eval"},
        {"plan --config c --checkpoint 5", "--checkpoint does not go with the command plan"},
        {"generate --config c --init-from x", "--init-from does not go with the command generate"},
        {"generate --config c --overfit 5", "--overfit does not go with the command generate"},
        {"--config c --show-experts", "--show-experts does not go with the command train"},
        {"check-data x --config c", "--config does not go with the command check-data"},
        {"--config c --tokenizer x", "--tokenizer does not go with the command train"},
        {"--config c --dry-run --resume never", "--resume does not go with the command plan"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) expect_refused(cases[i].line, cases[i].text);
    EXPECT(same(parse("eval --config c --checkpoint 5").checkpoint, "5"));
    /* A value is not an option. */
    EXPECT(same(parse("generate --config c --prompt --resume").prompt, "--resume"));
    EXPECT(same(parse("--config c --resume --prompt").resume, "--prompt"));
}

static void parse_too_many(void *arg) {
    (void)arg;
    char line[8192] = "--config c";
    for (int i = 0; i <= SETS_MAX; i++) snprintf(line + strlen(line), sizeof line - strlen(line), " train.steps=%d", i);
    parse(line);
}

TEST(cli_refuses_too_many_settings) {
    EXPECT(expect_exit(EXIT_USER, "more than 128 --set", parse_too_many, NULL));
}

/* ---- texts ------------------------------------------------------------------------------------------------------- */

static void print_help(void *word) {
    dup2(STDERR_FILENO, STDOUT_FILENO); /* where expect_exit looks */
    const Args args = {.command = COMMAND_HELP, .help_word = (const char *)word};
    exit(cli_help(&args));
}

TEST(cli_help_knows_options_and_settings) {
    static const char *const commands[] = {"train", "plan", "eval", "generate", "check-data", "help"};
    for (int i = 0; i < 6; i++) EXPECT(expect_exit(EXIT_DONE, commands[i], print_help, NULL));
    static const char *const parts[] = {"--config FILE",  "--resume auto|never|DIR",
                                        "--top-p X",      "--set section.field=value",
                                        "exit codes: 0 ", "micro_batch_size"};
    for (int i = 0; i < 6; i++) EXPECT(expect_exit(EXIT_DONE, parts[i], print_help, NULL), "%s", parts[i]);
    EXPECT(expect_exit(EXIT_DONE, "micro_batch_size", print_help, (void *)(uintptr_t) "train.micro_batch_size"));
    EXPECT(expect_exit(EXIT_DONE, "--temperature X", print_help, (void *)(uintptr_t) "temperature"));
    EXPECT(expect_exit(EXIT_USER, "nothing is known of 'xyzzy'", print_help, (void *)(uintptr_t) "xyzzy"));
}

TEST(cli_version_names_compiler_and_mpi) {
    char text[256], cut[16];
    version_text(text, sizeof text);
    EXPECT(strncmp(text, "train_moe 0.1.0 (commit ", 24) == 0, "%s", text);
    EXPECT(strstr(text, version_commit()) && (strstr(text, ", gcc ") || strstr(text, ", clang ")), "%s", text);
    EXPECT((strstr(text, "CPU only") || strstr(text, "CUDA 1")) && strstr(text, "MPI"), "%s", text);
    EXPECT(strlen(version_text(cut, sizeof cut)) == 15, "%s", cut);
}

TEST(cli_profile) {
    const Args a = parse("--config c --profile 20:3"), none = parse("--config c");
    EXPECT(a.profile && a.profile_first == 20 && a.profile_end == 23);
    EXPECT(!none.profile && none.profile_end == 0);
    static const char *const wrong[] = {"20", "0:3", "3:0", "-1:2", "3:x", "3:4:5", "1:9223372036854775807"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        char line[96];
        snprintf(line, sizeof line, "--config c --profile %s", wrong[i]);
        expect_refused(line, "not FIRST:COUNT");
    }
    expect_refused("eval --config c --profile 1:2", "--profile does not go with");
}
