/* What a run prints and what log.jsonl holds. */
#define _GNU_SOURCE /* pseudo terminals */
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "data/json.h"
#include "kernels/base/file.h"
#include "model/train/format.h"
#include "model/train/log.h"
#include "tests/test.h"

/* -------------------------------------------------------------------------------------------------------- formats */

#define EXPECT_TEXT(actual, expected)                                                                                  \
    do {                                                                                                               \
        const char *is = (actual);                                                                                     \
        EXPECT(strcmp(is, (expected)) == 0, "'%s' instead of '%s'", is, (expected));                                   \
    } while (0)

TEST(log_formats_counts) {
    const struct {
        double n;
        const char *text;
    } cases[] = {{0, "0"},          {7, "7"},           {999, "999"},     {999.7, "1.00K"}, {1000, "1.00K"},
                 {20480, "20.5K"},  {9996, "10.0K"},    {102400, "102K"}, {921600, "922K"}, {999600, "1.00M"},
                 {4.19e9, "4.19B"}, {14.8e12, "14.8T"}, {6e15, "6000T"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) EXPECT_TEXT(format_count(cases[i].n).text, cases[i].text);
}

TEST(log_formats_all_digits) {
    const struct {
        int64_t n;
        const char *text;
    } cases[] = {{0, "0"},
                 {999, "999"},
                 {1000, "1,000"},
                 {-123, "-123"},
                 {-1234, "-1,234"},
                 {15960108544, "15,960,108,544"},
                 {INT64_MIN, "-9,223,372,036,854,775,808"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        EXPECT_TEXT(format_grouped(cases[i].n).text, cases[i].text);
}

TEST(log_formats_times_speeds_and_sizes) {
    EXPECT_TEXT(format_duration(0.4).text, "0s");
    EXPECT_TEXT(format_duration(59.4).text, "59s");
    EXPECT_TEXT(format_duration(59.6).text, "1m00s");
    EXPECT_TEXT(format_duration(223).text, "3m43s");
    EXPECT_TEXT(format_duration(3599.7).text, "1h00m");
    EXPECT_TEXT(format_duration(4 * 3600 + 5 * 60).text, "4h05m");
    EXPECT_TEXT(format_duration(86400).text, "1d00h");
    EXPECT_TEXT(format_duration(4 * 86400 + 14 * 3600 + 3599).text, "4d14h");
    EXPECT_TEXT(format_duration(-1).text, "?");
    EXPECT_TEXT(format_duration(NAN).text, "?");
    EXPECT_TEXT(format_duration(INFINITY).text, "?");
    EXPECT_TEXT(format_step_time(5.214).text, "5.21 ms");
    EXPECT_TEXT(format_step_time(52.14).text, "52.1 ms");
    EXPECT_TEXT(format_step_time(508.2).text, "508 ms");
    EXPECT_TEXT(format_step_time(999.7).text, "1.00 s");
    EXPECT_TEXT(format_step_time(17480).text, "17.48 s");
    EXPECT_TEXT(format_step_time(174800).text, "174.8 s");
    EXPECT_TEXT(format_rate(0.42).text, "0.4");
    EXPECT_TEXT(format_rate(950).text, "950");
    EXPECT_TEXT(format_rate(999.7).text, "1.0k");
    EXPECT_TEXT(format_rate(4030).text, "4.0k");
    EXPECT_TEXT(format_rate(30000).text, "30.0k");
    EXPECT_TEXT(format_rate(239900).text, "240k");
    EXPECT_TEXT(format_rate(999970).text, "1.0M");
    EXPECT_TEXT(format_file_size(980).text, "980 B");
    EXPECT_TEXT(format_file_size(33.1e6).text, "33.1 MB");
    EXPECT_TEXT(format_file_size(128e9).text, "128 GB");
    EXPECT_TEXT(format_utc(1796076605).text, "2026-11-30T22:10:05Z");
}

/* A sample may hold anything: line ends, escape sequences of a terminal, bytes that are no UTF-8. */
TEST(log_makes_samples_harmless) {
    char out[64];
    format_one_line(out, sizeof out, "  It is\n\n a\ttruth ");
    EXPECT_TEXT(out, "It is a truth ");
    format_one_line(out, sizeof out,
                    "a\033[2Jb\xC2\x9B"
                    "c\x7F");
    EXPECT_TEXT(out, "a\xEF\xBF\xBD[2Jb\xEF\xBF\xBD"
                     "c\xEF\xBF\xBD");
    format_one_line(out, sizeof out, "\xC3\xA9\xC3");
    EXPECT_TEXT(out, "\xC3\xA9\xEF\xBF\xBD");
    format_one_line(out, 4, "ab\xC3\xA9"); /* no room for the last character: none of its bytes */
    EXPECT_TEXT(out, "ab");
}

/* -------------------------------------------------------------------------------------------------------- MaxVio */

TEST(log_maxvio_of_loads) {
    const int32_t load[] = {2, 2, 2, 2, /**/ 8, 0, 0, 0, /**/ 3, 1, 2, 2, /**/ 0, 0, 0, 0};
    EXPECT(maxvio(load, 4) == 0);
    EXPECT(maxvio(load + 4, 4) == 3);
    EXPECT_NEAR(maxvio(load + 8, 4), 0.5, 1e-15);
    EXPECT(maxvio(load + 12, 4) == 0);
    const int32_t large[] = {INT32_MAX, INT32_MAX, INT32_MAX, 0};
    EXPECT_NEAR(maxvio(large, 4), 1.0 / 3, 1e-15);
    double worst, mean;
    maxvio_of_layers(load, 4, 4, &worst, &mean);
    EXPECT(worst == 3);
    EXPECT_NEAR(mean, 3.5 / 4, 1e-15);
    maxvio_of_layers(NULL, 0, 4, &worst, &mean);
    EXPECT(worst == 0 && mean == 0);
}

/* -------------------------------------------------------------------------------------------------------- speed */

/* Right from the first interval of a process, whatever the step number; and only the last 20 count. */
TEST(log_speed_over_the_last_intervals) {
    Speed s = {0};
    EXPECT(speed_rate(&s) == 0);
    EXPECT_EQ(speed_close(&s).steps, 0);
    speed_add(&s, 2, 1000);
    EXPECT_NEAR(speed_rate(&s), 500, 1e-9);
    speed_add(&s, 1, 2000);
    SpeedInterval interval = speed_close(&s);
    EXPECT(interval.steps == 2 && interval.tokens == 3000 && interval.seconds == 3);
    EXPECT_NEAR(speed_rate(&s), 1000, 1e-9);
    for (int i = 0; i < 20; i++) {
        speed_add(&s, 1, 50);
        speed_close(&s);
    }
    EXPECT_NEAR(speed_rate(&s), 50, 1e-9);
}

/* -------------------------------------------------------------------------------------------------------- columns */

TEST(log_columns_are_left_out_by_priority) {
    Line line;
    char text[LINE_LEN];
    line_start(&line, "step", 10, 450);
    line_add(&line, 2, "aaaa");
    line_add(&line, 0, "bbbb");
    line_add(&line, 1, "cccc");
    line_add(&line, 2, "dddd  ");
    line_flag(&line, "skip (%s)", "x");
    line_flag(&line, "spike %.1f", 4.14);
    line_text(&line, 0, text);
    EXPECT_TEXT(text, "step    10/450 | aaaa | bbbb | cccc | dddd  skip (x)  spike 4.1");
    int whole = 14 + 7 + 7 + 7 + 9 + 21;
    line_text(&line, whole, text);
    EXPECT(strstr(text, "dddd"), "%s", text);
    line_text(&line, whole - 1, text); /* the rightmost of the largest priority */
    EXPECT_TEXT(text, "step    10/450 | aaaa | bbbb | cccc  skip (x)  spike 4.1");
    line_text(&line, whole - 10, text);
    EXPECT_TEXT(text, "step    10/450 | bbbb | cccc  skip (x)  spike 4.1");
    line_text(&line, 5, text); /* what has to stay stays */
    EXPECT_TEXT(text, "step    10/450 | bbbb  skip (x)  spike 4.1");
}

/* Everything at its longest: cut, not written past the end (run under the sanitizer). */
TEST(log_columns_hold_any_length) {
    static char huge[2 * LINE_LEN];
    memset(huge, 'x', sizeof huge - 1);
    Line line;
    char text[LINE_LEN];
    line_start(&line, huge, INT64_MAX, INT64_MAX);
    for (int i = 0; i < COLUMNS_MAX + 5; i++) line_add(&line, i, "%s", huge);
    for (int i = 0; i < 5; i++) line_flag(&line, "%s", huge);
    line_text(&line, 0, text);
    EXPECT(strlen(text) > (size_t)COLUMNS_MAX * (COLUMN_LEN - 1), "%zu", strlen(text));
    line_text(&line, 80, text);
    EXPECT(strlen(text) < 96 + 2 * COLUMN_LEN + 8, "%zu", strlen(text));
}

/* -------------------------------------------------------------------------------------------------------- lines */

/* A logger into memory: not a terminal. */
typedef struct {
    Logger l;
    char *out, *err;
    size_t out_size, err_size;
    FILE *out_file, *err_file;
} Heard;

static void heard_init(Heard *h, int64_t every_steps, bool is_quiet) {
    memset(h, 0, sizeof *h);
    h->out_file = open_memstream(&h->out, &h->out_size);
    h->err_file = open_memstream(&h->err, &h->err_size);
    log_init(&h->l, every_steps, is_quiet, h->out_file, h->err_file);
}

static void heard_free(Heard *h) {
    log_close(&h->l);
    fclose(h->out_file);
    fclose(h->err_file);
    free(h->out);
    free(h->err);
}

/* A step of the quick start. */
static StepReport step_report(int64_t step) {
    StepReport r = {.step = step,
                    .steps_total = 450,
                    .tokens = 2048 * step,
                    .tokens_total = 2048 * 450,
                    .n_losses = 2,
                    .loss = {6.112 + 1.0 / (double)(step + 2), 6.3021},
                    .balance = 1.02,
                    .gnorm = 1.92,
                    .lr = 1e-3,
                    .maxvio = 0.31,
                    .maxvio_mean = 0.2,
                    .n_layers = 1,
                    .n_experts = 4,
                    .step_ms = 508,
                    .tokens_in_step = 2048};
    return r;
}

/* The text behind the UTC time, which is checked by its form. */
static const char *behind_time(const char *line) {
    const char *form = "0000-00-00T00:00:00Z ";
    for (; *form; form++, line++) {
        bool fits = *form == '0' ? *line >= '0' && *line <= '9' : *line == *form;
        if (!fits) return "(no time in front)";
    }
    return line;
}

TEST(log_step_line_has_every_column) {
    Heard h;
    heard_init(&h, 10, false);
    StepReport r = step_report(10);
    r.loss[0] = 6.112;
    log_step(&h.l, &r);
    EXPECT_TEXT(behind_time(h.out), "step    10/450 | 20.5K | loss 6.1120 | mtp 6.3021 | gnorm  1.92 | lr 1.00e-03 | "
                                    "maxvio 0.31 |  508 ms |  4.0k tok/s | eta 3m44s\n");
    EXPECT_TEXT(h.err ? h.err : "", "");
    heard_free(&h);
}

/* A dense model without MTP: no columns of experts and MTP. A loss that is not finite prints as such, with its flag. */
TEST(log_step_line_of_a_skipped_dense_step) {
    Heard h;
    heard_init(&h, 10, false);
    StepReport r = step_report(13);
    r.n_losses = 1;
    r.n_layers = 0;
    r.loss[0] = NAN;
    r.gnorm = INFINITY;
    r.skip = SKIP_LOSS_NOT_FINITE;
    log_step(&h.l, &r);
    EXPECT_TEXT(behind_time(h.out),
                "step    13/450 | 26.6K | loss    nan | gnorm   inf | lr 1.00e-03 |  508 ms |  4.0k "
                "tok/s | eta 3m42s  skip (loss not finite)\n");
    heard_free(&h);
}

/* Steps between two lines are not lost: time and speed are means, the worst spike is told, and a skip prints at once.
 */
TEST(log_step_line_tells_about_the_steps_since_the_last) {
    Heard h;
    heard_init(&h, 10, false);
    for (int step = 11; step <= 20; step++) {
        StepReport r = step_report(step);
        r.step_ms = step == 15 ? 1000 : 500;
        r.loss_z = step == 14 ? 4.14 : 0.5;
        r.norm_z = step == 16 ? 4.01 : 0;
        log_step(&h.l, &r);
    }
    EXPECT(strstr(h.out, "step    20/450"), "%s", h.out);
    EXPECT(strstr(h.out, "|  550 ms |  3.7k tok/s |"), "%s", h.out);
    EXPECT(strstr(h.out, "spike 4.1\n"), "%s", h.out);
    EXPECT(strchr(h.out, '\n') == h.out + h.out_size - 1, "one line only: %s", h.out);
    for (int step = 21; step <= 30; step++) {
        StepReport r = step_report(step);
        r.norm_z = step == 23 ? 9 : 0;
        log_step(&h.l, &r);
    }
    EXPECT(strstr(h.out, "spike gnorm 9.0\n"), "%s", h.out);
    heard_free(&h);
}

/* Waiting for data is told as a share of the time since the last line, and only where it is one to care about. */
TEST(log_step_line_tells_of_waiting_for_data) {
    Heard h;
    heard_init(&h, 10, false);
    for (int step = 11; step <= 30; step++) {
        StepReport r = step_report(step);
        r.step_ms = 500;
        r.data_wait_ms = step == 15 ? 610 : step == 25 ? 200 : 1;
        log_step(&h.l, &r);
        if (step == 20) EXPECT(strstr(h.out, "  data 12 %\n"), "%s", h.out);
    }
    EXPECT(strstr(h.out, "step    30/450") && strstr(strstr(h.out, "step    30/450"), "data") == NULL, "%s", h.out);
    heard_free(&h);
}

/* On a GPU: model FLOPs, and their share of the peak where it is known and can be a share. */
TEST(log_step_line_of_a_gpu) {
    static const struct {
        LogRate rate;
        const char *part;
    } cases[] = {
        {{17.17e9, true, 989.5e12}, "|  508 ms |  4.0k tok/s/gpu |  69 TF  7.0% | eta"},
        {{129.4e9, true, 989.5e12}, "tok/s/gpu | 522 TF 52.7% | eta"},
        {{1e9, true, 989.5e12}, "tok/s/gpu | 4.0 TF  0.4% | eta"},
        {{17.17e9, true, 0}, "tok/s/gpu |  69 TF | eta"},
        {{17.17e9, true, 60e12}, "tok/s/gpu |  69 TF | eta"}, /* above 100 % */
        {{17.17e9, false, 0}, "|  4.0k tok/s | eta"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Heard h;
        heard_init(&h, 10, false);
        log_set_rate(&h.l, cases[i].rate);
        StepReport r = step_report(10);
        log_step(&h.l, &r);
        EXPECT(strstr(h.out, cases[i].part), "%s", h.out);
        heard_free(&h);
    }
}

/* Flags stand behind the next line, once, and only for what matters. */
TEST(log_step_line_of_a_gpu_in_trouble) {
    Heard h;
    heard_init(&h, 10, false);
    for (int step = 11; step <= 30; step++) {
        StepReport r = step_report(step);
        r.has_gpu = step % 5 == 0;
        r.gpu = (GpuHealth){61, 1980, 690, step == 15 ? 0x44 : 0x4, 7, step >= 15 ? 2 : 0, 0.1};
        log_step(&h.l, &r);
    }
    const char *second = strchr(h.out, '\n') + 1;
    EXPECT(strstr(h.out, "s  throttle  ecc 2\n") == second - strlen("s  throttle  ecc 2\n"), "%s", h.out);
    EXPECT(!strstr(second, "throttle") && !strstr(second, "ecc"), "%s", second);
    heard_free(&h);
}

static cJSON *last_record(const char *dir, const char *err) {
    char path[600], hint[ERR_LEN], why[ERR_LEN] = "", *text;
    size_t size;
    snprintf(path, sizeof path, "%s/log.jsonl", dir);
    REQUIRE(file_read_all(&text, &size, path, 1 << 20, why) == 0, "%s", why);
    char *end = strrchr(text, '\n');
    REQUIRE(end, "no whole line");
    *end = 0;
    char *start = strrchr(text, '\n') ? strrchr(text, '\n') + 1 : text;
    cJSON *record = json_parse(start, strlen(start), path, why, hint, NULL);
    REQUIRE(record, "%s: %s", err, why);
    free(text);
    return record;
}

static double number_at(const cJSON *object, const char *name) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);
    return cJSON_IsNumber(item) ? item->valuedouble : NAN;
}

/* The rate goes by tokens trained on over the time of the step alone. */
TEST(log_records_speed_and_gpu) {
    Heard h;
    char err[ERR_LEN] = "";
    heard_init(&h, 10, true);
    const LogRun run = {test_tmp_dir(), 0, 0, 450, "abc", "{}"};
    REQUIRE(log_open(&h.l, &run, err) == 0, "%s", err);
    StepReport r = step_report(1);
    r.step_ms = 500;
    log_step(&h.l, &r);
    cJSON *record = last_record(test_tmp_dir(), "no rate");
    EXPECT_NEAR(number_at(record, "tokens_per_s"), 4096, 1e-9);
    EXPECT(!cJSON_GetObjectItem(record, "tflops") && !cJSON_GetObjectItem(record, "mfu") &&
           !cJSON_GetObjectItem(record, "gpu"));
    cJSON_Delete(record);

    log_set_rate(&h.l, (LogRate){1e9, true, 10e12});
    r.step = 2;
    r.has_gpu = true;
    r.gpu = (GpuHealth){61, NAN, 690.5, 0x24, 3, 0, 0.25};
    log_step(&h.l, &r);
    record = last_record(test_tmp_dir(), "with a rate");
    EXPECT_NEAR(number_at(record, "tflops"), 4.096, 1e-9);
    EXPECT_NEAR(number_at(record, "mfu"), 0.4096, 1e-9);
    const cJSON *gpu = cJSON_GetObjectItem(record, "gpu"), *throttle = cJSON_GetObjectItem(gpu, "throttle");
    EXPECT(number_at(gpu, "temperature_c") == 61 && number_at(gpu, "power_w") == 690.5 &&
           number_at(gpu, "ecc_uncorrected") == 3 && number_at(gpu, "read_ms") == 0.25);
    EXPECT(cJSON_IsNull(cJSON_GetObjectItem(gpu, "sm_clock_mhz")), "not known is null");
    EXPECT(cJSON_GetArraySize(throttle) == 2 &&
           strcmp(cJSON_GetArrayItem(throttle, 1)->valuestring, "sw_thermal_slowdown") == 0);
    cJSON_Delete(record);

    log_set_rate(&h.l, (LogRate){1e9, true, 1e12}); /* four times the peak: the peak is wrong */
    r.step = 3;
    log_step(&h.l, &r);
    record = last_record(test_tmp_dir(), "above the peak");
    EXPECT(!cJSON_GetObjectItem(record, "mfu") && cJSON_GetObjectItem(record, "tflops"));
    cJSON_Delete(record);
    heard_free(&h);
}

TEST(log_prints_the_first_and_the_last_step) {
    Heard h;
    heard_init(&h, 100, false);
    for (int step = 1; step <= 3; step++) {
        StepReport r = step_report(step);
        r.steps_total = 3;
        r.tokens_total = 3 * 2048;
        log_step(&h.l, &r);
    }
    EXPECT(strstr(h.out, "step   1/3 |") && !strstr(h.out, "step   2/3 |"), "%s", h.out);
    EXPECT(strstr(h.out, "step   3/3 |") && strstr(h.out, "eta 0s\n"), "%s", h.out);
    heard_free(&h);
}

static ValReport val_report(void) {
    ValReport r = {.step = 50, .steps_total = 450, .tokens = 102400, .n_sets = 1, .tokens_evaluated = 65536};
    r.sets[0] = (ValSet){.name = "austen", .loss = 5.012, .bytes_per_token = 2.77};
    r.seconds = 2.5;
    return r;
}

TEST(log_val_lines) {
    Heard h;
    heard_init(&h, 10, false);
    ValReport r = val_report();
    r.sets[0].comparison = "bigram 2.48, 3-gram 1.91";
    r.is_best = true;
    log_val(&h.l, &r);
    EXPECT_TEXT(behind_time(h.out),
                "val     50/450 |  102K | austen 5.0120 = 1.809 nats/byte (bigram 2.48, 3-gram 1.91) "
                "| 65.5K tokens | 2.50 s | best\n");
    size_t seen = h.out_size;
    r.n_sets = 2;
    r.sets[1] = (ValSet){.name = "code", .loss = 1.221};
    r.is_best = false;
    log_val(&h.l, &r);
    EXPECT_TEXT(behind_time(h.out + seen),
                "val     50/450 |  102K | austen 5.0120 bpb 2.610 | code 1.2210 | 65.5K tokens | 2.50 s\n");
    seen = h.out_size;
    r.n_choices = 1;
    r.choices[0] = (ChoiceResult){"hellaswag", 10000, 0.36, 0.33, 2.5, 0.25};
    log_val(&h.l, &r);
    EXPECT_TEXT(behind_time(h.out + seen), "val     50/450 |  102K | austen 5.0120 bpb 2.610 | code 1.2210 | "
                                           "hellaswag 0.360 | 65.5K tokens | 2.50 s\n");
    seen = h.out_size;
    r.in_full = true;
    r.n_sets = 1;
    log_val(&h.l, &r);
    EXPECT_TEXT(behind_time(h.out + seen),
                "val     50/450 |  102K | austen 5.0120 = 1.809 nats/byte (bigram 2.48, 3-gram 1.91) | bpb 2.610 | "
                "perplexity 150.20 | hellaswag 0.360 +- 0.005 of 10000 (chance 0.250, by sum 0.330) | 65.5K tokens | "
                "2.50 s\n");
    seen = h.out_size;
    r.n_sets = 0;
    r.in_full = false;
    log_val(&h.l, &r);
    EXPECT_TEXT(behind_time(h.out + seen), "val     50/450 |  102K | hellaswag 0.360 | 2.50 s\n");
    heard_free(&h);
}

TEST(log_other_lines) {
    Heard h;
    heard_init(&h, 10, false);
    log_banner(&h.l, "model", "tiny: %d layers", 4);
    log_banner(&h.l, "", "second line");
    EXPECT_TEXT(h.out, "model      tiny: 4 layers\n           second line\n");
    size_t seen = h.out_size;
    StepReport step = step_report(450);
    log_step(&h.l, &step);
    SaveReport save = {.step = 450, .steps_total = 450, .tokens = 921600, .name = "step_00000450", .bytes = 33100000};
    save.hash = 0x9f31c07e5a21d4b8;
    save.waited_s = 0.93;
    save.on_disk_s = -1;
    seen = h.out_size;
    log_save(&h.l, &save);
    EXPECT_TEXT(behind_time(h.out + seen),
                "save   450/450 |  922K | step_00000450, 33.1 MB, hash 9f31c07e5a21d4b8 | run "
                "waited 0.9 s\n");
    seen = h.out_size;
    log_sample(&h.l, 450, "It is a truth", ", it did\nnot\033[0m");
    EXPECT_TEXT(behind_time(h.out + seen), "sample 450/450 | It is a truth, it did not\xEF\xBF\xBD[0m\n");
    seen = h.out_size;
    ValReport val = val_report();
    val.step = 450;
    val.tokens = 921600;
    log_done(&h.l, true, &val, 232, "try: ./train_moe generate");
    EXPECT_TEXT(behind_time(h.out + seen),
                "done   450/450 |  922K | val 5.0120 = 1.809 nats/byte | 3m52s | try: ./train_moe generate\n");
    seen = h.out_size;
    log_done(&h.l, false, NULL, 232, NULL);
    EXPECT_TEXT(behind_time(h.out + seen), "stop   450/450 |  922K | 3m52s\n");
    log_warn(&h.l, 17, "loss not %s", "finite");
    EXPECT_TEXT(behind_time(h.err), "warn    17/450 | loss not finite\n");
    heard_free(&h);
}

TEST(log_quiet_prints_warnings_and_the_end) {
    Heard h;
    heard_init(&h, 1, true);
    StepReport step = step_report(1);
    ValReport val = val_report();
    SaveReport save = {.name = "step_00000001", .on_disk_s = -1};
    log_title(&h.l, "train_moe");
    log_banner(&h.l, "model", "tiny");
    log_step(&h.l, &step);
    log_val(&h.l, &val);
    log_save(&h.l, &save);
    log_sample(&h.l, 1, "a", "b");
    fflush(h.out_file);
    EXPECT_EQ(h.out_size, 0);
    log_warn(&h.l, 1, "w");
    log_done(&h.l, true, NULL, 1, NULL);
    EXPECT(h.err_size > 0 && strstr(h.out, "done "));
    heard_free(&h);
}

/* -------------------------------------------------------------------------------------------------------- terminal */

/* What a terminal of 80 columns gets. */
static size_t read_terminal(int master, char *text, size_t size) {
    size_t used = 0;
    ssize_t n;
    fcntl(master, F_SETFL, O_NONBLOCK);
    while (used < size - 1 && (n = read(master, text + used, size - 1 - used)) > 0) used += (size_t)n;
    text[used] = 0;
    return used;
}

TEST(log_on_a_terminal_fits_its_width_and_draws_a_bar) {
    int master = posix_openpt(O_RDWR | O_NOCTTY);
    REQUIRE(master >= 0 && grantpt(master) == 0 && unlockpt(master) == 0);
    int slave = open(ptsname(master), O_RDWR | O_NOCTTY);
    struct winsize size = {.ws_col = 80, .ws_row = 24};
    REQUIRE(slave >= 0 && ioctl(slave, TIOCSWINSZ, &size) == 0);
    FILE *terminal = fdopen(slave, "w");
    static char text[1 << 16];
    Logger l;
    log_init(&l, 10, false, terminal, terminal);
    StepReport r = step_report(9);
    log_step(&l, &r);
    read_terminal(master, text, sizeof text);
    EXPECT_TEXT(text, "\r[>                             ]   2%  9/450  eta 3m44s\033[K");
    r = step_report(10);
    r.loss[0] = 6.112;
    log_step(&l, &r);
    read_terminal(master, text, sizeof text);
    /* The bar goes, the line comes without its least important columns and without a time, the bar comes back. */
    EXPECT_TEXT(text, "\r\033[Kstep    10/450 | 20.5K | loss 6.1120 | gnorm  1.92 |  4.0k tok/s | eta 3m44s\r\n"
                      "\r[>                             ]   2%  10/450  eta 3m44s\033[K");
    log_warn(&l, 10, "careful");
    read_terminal(master, text, sizeof text);
    EXPECT_TEXT(text, "\r\033[Kwarn    10/450 | careful\r\n");
    log_progress(&l, "val austen", 16, 32);
    read_terminal(master, text, sizeof text);
    EXPECT_TEXT(text, "\r[===============>              ]  50%  val austen 16/32\033[K");
    log_close(&l);
    log_init(&l, 10, true, terminal, terminal);
    log_progress(&l, "val austen", 16, 32);
    log_step(&l, &r);
    read_terminal(master, text, sizeof text);
    EXPECT_TEXT(text, "\r\033[K"); /* quiet: nothing but the end of the bar before */
    fclose(terminal);
    close(master);
}
