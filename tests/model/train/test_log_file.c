/* log.jsonl: valid JSON whatever the numbers, cut back on a resume, whole lines on a full disk. */
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "data/json.h"
#include "kernels/base/file.h"
#include "model/train/log.h"
#include "tests/test.h"

enum { FILE_MAX = 1 << 24 };

/* A logger whose lines nobody reads. */
static FILE *nowhere(void) {
    static FILE *file;
    if (!file) file = fopen("/dev/null", "w");
    return file;
}

static void open_log(Logger *l, int64_t step) {
    char err[ERR_LEN] = "";
    LogRun run = {.dir = test_tmp_dir(),
                  .step = step,
                  .tokens = 100 * step,
                  .steps_total = 100,
                  .commit = "1a2b3c4",
                  .config_json = "{\n  \"version\": 1,\n  \"run\": {\"name\": \"a  b\"}\n}"};
    log_init(l, 10, false, nowhere(), nowhere());
    REQUIRE(log_open(l, &run, err) == 0, "%s", err);
}

/* A step of a deterministic run: all but the times is a function of its number. */
static void one_step(Logger *l, int64_t step) {
    const int32_t load[] = {3, 1, 2, 2, 5, 0, 1, 2};
    StepReport r = {.step = step,
                    .steps_total = 100,
                    .tokens = 100 * step,
                    .n_losses = 2,
                    .loss = {log(1025) + 1.0 / (double)(step + 3), 2.0 / 3},
                    .balance = 1.0 / 3,
                    .gnorm = 0.1,
                    .lr = 1e-3 * (double)step / 7,
                    .maxvio = 0.5,
                    .maxvio_mean = 0.25,
                    .n_layers = 2,
                    .n_experts = 4,
                    .load = load,
                    .n_expert_ranks = 2,
                    .rank_load = 4.0 / 3,
                    .rank_load_mean = 7.0 / 6,
                    .step_ms = 12.5,
                    .tokens_in_step = 100};
    log_step(l, &r);
}

static char *log_path(void) {
    static char path[512];
    snprintf(path, sizeof path, "%s/log.jsonl", test_tmp_dir());
    return path;
}

static char *read_log(void) {
    static char *text;
    char err[ERR_LEN] = "";
    size_t size;
    REQUIRE(file_read_all(&text, &size, log_path(), FILE_MAX, err) == 0, "%s", err);
    return text;
}

/* Line number i of a text, parsed; the test ends if it is no JSON. */
static cJSON *parse_line(const char *text, int i) {
    for (; i > 0; i--) text = strchr(text, '\n') + 1;
    char err[ERR_LEN] = "", hint[ERR_LEN];
    cJSON *item = json_parse(text, (size_t)(strchr(text, '\n') - text), "log.jsonl", err, hint, NULL);
    REQUIRE(item, "%s: %s", err, text);
    return item;
}

static int n_lines(const char *text) {
    int n = 0;
    for (; *text; text++) n += *text == '\n';
    return n;
}

static double number_of(const cJSON *item, const char *name) {
    const cJSON *member = cJSON_GetObjectItem(item, name);
    return cJSON_IsNumber(member) ? member->valuedouble : -12345;
}

TEST(log_file_first_line_describes_the_run) {
    Logger l;
    open_log(&l, 0);
    log_close(&l);
    char *text = read_log();
    cJSON *run = parse_line(text, 0);
    EXPECT(number_of(run, "version") == 1 && number_of(run, "step") == 0);
    EXPECT(strcmp(cJSON_GetObjectItem(run, "kind")->valuestring, "run") == 0);
    EXPECT(strcmp(cJSON_GetObjectItem(run, "commit")->valuestring, "1a2b3c4") == 0);
    cJSON *section = cJSON_GetObjectItem(cJSON_GetObjectItem(run, "config"), "run");
    EXPECT(section && strcmp(cJSON_GetObjectItem(section, "name")->valuestring, "a  b") == 0);
    EXPECT(cJSON_IsString(cJSON_GetObjectItem(run, "time")));
    EXPECT_EQ(n_lines(text), 1);
    cJSON_Delete(run);
    free(text);
}

/* Every digit of every number comes back; loads are there by layer and expert. */
TEST(log_file_step_record_has_all_digits) {
    Logger l;
    open_log(&l, 0);
    one_step(&l, 10);
    log_close(&l);
    char *text = read_log();
    cJSON *step = parse_line(text, 1);
    EXPECT(number_of(step, "loss") == log(1025) + 1.0 / 13);
    EXPECT(number_of(step, "lr") == 1e-3 * 10.0 / 7);
    EXPECT(number_of(step, "balance") == 1.0 / 3);
    EXPECT(number_of(step, "gnorm") == 0.1);
    EXPECT(number_of(step, "rank_load") == 4.0 / 3 && number_of(step, "rank_load_mean") == 7.0 / 6);
    EXPECT(number_of(step, "tokens") == 1000);
    EXPECT(number_of(step, "tokens_per_s") == 8000);
    EXPECT(cJSON_GetArrayItem(cJSON_GetObjectItem(step, "mtp"), 0)->valuedouble == 2.0 / 3);
    EXPECT(cJSON_IsNull(cJSON_GetObjectItem(step, "skip")));
    cJSON *load = cJSON_GetObjectItem(step, "load");
    EXPECT_EQ(cJSON_GetArraySize(load), 2);
    EXPECT(cJSON_GetArrayItem(cJSON_GetArrayItem(load, 1), 0)->valuedouble == 5);
    EXPECT_EQ(cJSON_GetArraySize(cJSON_GetArrayItem(load, 1)), 4);
    cJSON_Delete(step);
    free(text);
}

/* Least, mean and largest of each layer. */
TEST(log_file_has_router_biases_and_choices) {
    const float bias[] = {0.5f, -1, 2, 0.5f, /**/ 0.25f, 0.25f, 0.25f, 0.25f};
    Logger l;
    open_log(&l, 0);
    StepReport r = {.step = 1, .steps_total = 100, .n_losses = 1, .n_layers = 2, .n_experts = 4, .bias = bias};
    log_step(&l, &r);
    ValReport val = {.step = 1, .steps_total = 100, .n_choices = 1};
    val.choices[0] = (ChoiceResult){"hellaswag", 10042, 0.3125, 0.25, 2.5, 0.25};
    log_val(&l, &val);
    log_close(&l);
    char *text = read_log();
    cJSON *step = parse_line(text, 1), *line = parse_line(text, 2);
    const double expected[] = {-1, 0.5, 2, 0.25, 0.25, 0.25};
    const cJSON *layers = cJSON_GetObjectItem(step, "bias");
    EXPECT_EQ(cJSON_GetArraySize(layers), 2);
    for (int i = 0; i < 6; i++) {
        const cJSON *x = cJSON_GetArrayItem(cJSON_GetArrayItem(layers, i / 3), i % 3);
        EXPECT(x && x->valuedouble == expected[i], "bias %d", i);
    }
    const cJSON *choice = cJSON_GetArrayItem(cJSON_GetObjectItem(line, "choices"), 0);
    EXPECT(number_of(choice, "accuracy") == 0.3125 && number_of(choice, "examples") == 10042);
    cJSON_Delete(step);
    cJSON_Delete(line);
    free(text);
}

/* By layer and name; a tensor that the layer has not is left out, as are scales beyond the first and last there are. */
TEST(log_file_has_fp8_tensors) {
    TileStats stats[2 * OBSERVED_COUNT];
    memset(stats, 0, sizeof stats);
    stats[OBSERVED_COUNT + 1] = (TileStats){.values = 1000, .zeros = 250, .subnormals = 125, .largest = 50};
    stats[OBSERVED_COUNT + 1].amax_bits = 0x40600000; /* 3.5 */
    stats[OBSERVED_COUNT + 1].scales[10] = 7;
    stats[OBSERVED_COUNT + 1].scales[12] = 1;
    const StepReport r = {.step = 20, .steps_total = 100, .n_blocks = 2, .fp8 = stats};
    Logger l;
    open_log(&l, 0);
    log_fp8(&l, &r);
    log_close(&l);
    char *text = read_log();
    cJSON *record = parse_line(text, 1);
    EXPECT_EQ(n_lines(text), 2); /* nothing to warn of */
    const cJSON *layers = cJSON_GetObjectItem(record, "layers"), *layer = cJSON_GetArrayItem(layers, 1);
    const cJSON *tensor = cJSON_GetObjectItem(layer, observed_name(1)), *scales = cJSON_GetObjectItem(tensor, "scales");
    EXPECT(number_of(record, "step") == 20 && cJSON_GetArraySize(layers) == 2);
    EXPECT(cJSON_GetArraySize(cJSON_GetArrayItem(layers, 0)) == 0 && cJSON_GetArraySize(layer) == 1);
    EXPECT(number_of(tensor, "amax") == 3.5 && number_of(tensor, "zero") == 0.25);
    EXPECT(number_of(tensor, "subnormal") == 0.125 && number_of(tensor, "saturated") == 0.05);
    EXPECT_EQ(number_of(tensor, "nan"), 0);
    static const int want[] = {SCALE_EXPONENT_FIRST + 10, 7, 0, 1};
    EXPECT_EQ(cJSON_GetArraySize(scales), 4);
    for (int i = 0; i < 4; i++) EXPECT_EQ(cJSON_GetArrayItem(scales, i)->valuedouble, want[i]);
    cJSON_Delete(record);
    free(text);
}

/* NaN before saturation, the worst tensor by name, the others by number. */
TEST(log_file_warns_of_fp8_tensors) {
    TileStats stats[3 * OBSERVED_COUNT];
    memset(stats, 0, sizeof stats);
    for (int i = 0; i < 3 * OBSERVED_COUNT; i++) stats[i].values = 1000;
    const StepReport r = {.step = 20, .steps_total = 100, .n_blocks = 3, .fp8 = stats};
    const char *const texts[] = {"fp8: layer 2 ckv is saturated, 9.0 % of its values are 448 times their scale",
                                 "fp8: layer 1 xn has 3 NaN of 1000 values; and 1 other tensors"};
    Logger l;
    open_log(&l, 0);
    stats[2 * OBSERVED_COUNT + 2].largest = 90;
    log_fp8(&l, &r);
    stats[OBSERVED_COUNT].nans = 3;
    log_fp8(&l, &r);
    log_close(&l);
    char *text = read_log();
    EXPECT_EQ(n_lines(text), 5);
    for (int i = 0; i < 2; i++) {
        cJSON *warning = parse_line(text, 2 + 2 * i);
        const char *is = cJSON_GetObjectItem(warning, "text")->valuestring;
        EXPECT(strcmp(is, texts[i]) == 0, "%s", is);
        cJSON_Delete(warning);
    }
    free(text);
}

/* NaN, infinities, broken UTF-8, quotes: every line stays JSON. */
TEST(log_file_is_json_whatever_happens) {
    Logger l;
    open_log(&l, 0);
    StepReport r = {.step = 1, .steps_total = 100, .n_losses = 3, .loss = {NAN, INFINITY, -INFINITY}};
    r.gnorm = NAN;
    r.skip = SKIP_LOSS_NOT_FINITE;
    r.has_hash = true;
    r.hash = 0xabc;
    log_step(&l, &r); /* step_ms 0: no speed either */
    ValReport val = {.step = 1, .steps_total = 100, .n_sets = 2};
    val.sets[0] = (ValSet){.name = "a \"b\" \\", .loss = NAN, .comparison = "x\ny"};
    log_val(&l, &val);
    log_sample(&l, 1, "caf\xC3\xA9 \"", "\xFF\xC3\n\033[2J\x01");
    log_warn(&l, 1, "%s", "tab\there");
    SaveReport save = {.step = 1, .name = "step_00000001", .hash = 1, .waited_s = INFINITY, .on_disk_s = 3};
    log_save(&l, &save);
    log_done(&l, true, &val, NAN, NULL);
    log_close(&l);
    char *text = read_log();
    REQUIRE(n_lines(text) == 7, "%d lines: %s", n_lines(text), text);
    for (int i = 0; i < 7; i++) cJSON_Delete(parse_line(text, i));
    cJSON *step = parse_line(text, 1), *sample = parse_line(text, 3);
    EXPECT(cJSON_IsNull(cJSON_GetObjectItem(step, "loss")) && cJSON_IsNull(cJSON_GetObjectItem(step, "gnorm")));
    EXPECT(cJSON_IsNull(cJSON_GetArrayItem(cJSON_GetObjectItem(step, "mtp"), 1)));
    EXPECT(strcmp(cJSON_GetObjectItem(step, "skip")->valuestring, "loss not finite") == 0);
    EXPECT(strcmp(cJSON_GetObjectItem(step, "hash")->valuestring, "0000000000000abc") == 0);
    const char *generated = cJSON_GetObjectItem(sample, "text")->valuestring;
    EXPECT(strcmp(generated, "\xEF\xBF\xBD\xEF\xBF\xBD\n\033[2J\x01") == 0, "'%s'", generated);
    cJSON_Delete(step);
    cJSON_Delete(sample);
    free(text);
}

/* A line without what differs between two runs of the same steps: the times at its end. */
static void copy_without_times(char *out, const char *text) {
    for (; *text; text = strchr(text, '\n') + 1) {
        const char *end = strstr(text, strncmp(text, "{\"kind\":\"step\"", 14) == 0 ? ",\"ms\":" : ",\"time\":");
        if (strncmp(text, "{\"kind\":\"run\"", 13) == 0) continue;
        memcpy(out, text, (size_t)(end - text));
        out += end - text;
        *out++ = '\n';
    }
    *out = 0;
}

/* Killed behind its checkpoint in the middle of a line, resumed: the same records as an uninterrupted run, none twice.
 */
TEST(log_file_resumed_equals_uninterrupted) {
    Logger l;
    open_log(&l, 0);
    for (int step = 1; step <= 30; step++) one_step(&l, step);
    log_close(&l);
    char *whole = read_log();
    unlink(log_path());

    open_log(&l, 0);
    for (int step = 1; step <= 23; step++) one_step(&l, step);
    SaveReport save = {.step = 20, .steps_total = 100, .name = "step_00000020", .on_disk_s = 5};
    log_save(&l, &save); /* in the background, behind the records of later steps: it stays */
    log_close(&l);
    FILE *f = fopen(log_path(), "a");
    fputs("{\"kind\":\"step\",\"step\":24,\"lo", f);
    fclose(f);
    open_log(&l, 20);
    for (int step = 21; step <= 30; step++) one_step(&l, step);
    log_close(&l);
    char *resumed = read_log();

    char *saved = strstr(resumed, "{\"kind\":\"save\"");
    REQUIRE(saved, "the save's record is gone");
    char *behind = strchr(saved, '\n') + 1;
    memmove(saved, behind, strlen(behind) + 1);
    char *a = malloc(strlen(whole) + 1), *b = malloc(strlen(resumed) + 1);
    copy_without_times(a, whole);
    copy_without_times(b, resumed);
    EXPECT(strcmp(a, b) == 0, "\n%s\n---\n%s", a, b);
    EXPECT_EQ(n_lines(a), 30);
    EXPECT_EQ(n_lines(resumed), 32); /* and one record for each process */
    char temporary[600];
    snprintf(temporary, sizeof temporary, "%s.tmp", log_path());
    EXPECT(!path_exists(temporary));
    free(a);
    free(b);
    free(whole);
    free(resumed);
}

/* A resume behind the last record leaves the file as it is, foreign lines included. */
TEST(log_file_cut_back_keeps_what_it_need_not_remove) {
    Logger l;
    open_log(&l, 0);
    for (int step = 1; step <= 5; step++) one_step(&l, step);
    log_close(&l);
    FILE *f = fopen(log_path(), "a");
    fputs("a note by hand\n", f);
    fclose(f);
    char *before = read_log();
    open_log(&l, 5);
    log_close(&l);
    char *after = read_log();
    EXPECT(strncmp(before, after, strlen(before)) == 0, "%s", after);
    EXPECT_EQ(n_lines(after), n_lines(before) + 1);
    free(before);
    free(after);
    open_log(&l, 3); /* here the note goes with the step before it */
    log_close(&l);
    after = read_log();
    EXPECT(!strstr(after, "by hand") && strstr(after, "\"step\":3,\"tokens\"") && !strstr(after, "\"step\":4"), "%s",
           after);
    free(after);
}

/* A new run in an old folder: nothing of the old log is lost. */
TEST(log_file_of_an_earlier_run_is_kept) {
    Logger l;
    for (int run = 0; run < 3; run++) {
        open_log(&l, 0);
        one_step(&l, 1 + run);
        log_close(&l);
    }
    char *text = read_log();
    EXPECT(n_lines(text) == 2 && strstr(text, "\"step\":3"), "%s", text);
    free(text);
    for (int i = 1; i <= 2; i++) {
        char path[600], err[ERR_LEN];
        size_t size;
        snprintf(path, sizeof path, "%s.%d", log_path(), i);
        REQUIRE(file_read_all(&text, &size, path, FILE_MAX, err) == 0, "%s", err);
        EXPECT(n_lines(text) == 2 && strstr(text, i == 1 ? "\"step\":1,\"tok" : "\"step\":2,\"tok"), "%s", text);
        free(text);
    }
}

/* The disk fills up and empties again: one warning, no half line, and the records go on. */
TEST(log_file_survives_a_full_disk) {
    char *heard = NULL;
    size_t heard_size = 0;
    FILE *err_out = open_memstream(&heard, &heard_size);
    Logger l;
    open_log(&l, 0);
    l.err_out = err_out;
    signal(SIGXFSZ, SIG_IGN);
    struct rlimit unlimited;
    getrlimit(RLIMIT_FSIZE, &unlimited);
    one_step(&l, 1);
    struct rlimit full = {.rlim_cur = (rlim_t)l.file.size + 100, .rlim_max = unlimited.rlim_max};
    REQUIRE(setrlimit(RLIMIT_FSIZE, &full) == 0);
    for (int step = 2; step <= 6; step++) one_step(&l, step);
    setrlimit(RLIMIT_FSIZE, &unlimited);
    one_step(&l, 7);
    log_close(&l);
    fclose(err_out);
    char *warning = strstr(heard, "warn ");
    EXPECT(warning && strstr(heard, "log.jsonl: cannot write") && !strstr(warning + 1, "warn "), "%s", heard);
    char *text = read_log();
    EXPECT_EQ(n_lines(text), 3);
    cJSON *last = parse_line(text, 2);
    EXPECT(number_of(last, "step") == 7);
    cJSON_Delete(last);
    free(text);
    free(heard);
}

TEST(log_file_that_cannot_be_opened_says_why) {
    Logger l;
    char err[ERR_LEN] = "";
    LogRun run = {.dir = "/nonexistent/folder", .commit = "", .config_json = "{}"};
    log_init(&l, 1, false, nowhere(), nowhere());
    EXPECT_EQ(log_open(&l, &run, err), -1);
    EXPECT(strstr(err, "/nonexistent/folder/log.jsonl") && strstr(err, "No such file"), "%s", err);
}
