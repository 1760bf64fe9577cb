/* The engine that needs no libFuzzer:
 *
 *     run [--seed N] [--seconds S] [--runs N] [--corpus DIR] [--input FILE] [NAME...]
 *
 * Each target runs in a child process. Inputs that reach code which none before has reached join the corpus of the
 * child; a run is a function of the seed and the number of inputs alone. The parent watches: a child that ends, or
 * stays at one input for too long, has found something. The input is then reduced, trying it without pieces in children
 * of their own, and written to build/fuzz/NAME-SEED.bin. --input FILE runs the targets on that file alone. --corpus DIR
 * runs nothing and writes the seeds into DIR/NAME, for libFuzzer. Exit 1 if something was found. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels/base/clock.h"
#include "kernels/base/file.h"
#include "tests/fuzz/fuzz.h"

enum { CORPUS_MAX = 4096, CODE_BYTES_MAX = 1 << 24 };

/* ---- the sanitizers ---------------------------------------------------------------------------------------------- */

size_t __sanitizer_get_current_allocated_bytes(void);
int __lsan_do_recoverable_leak_check(void);
const char *__asan_default_options(void);
void __sanitizer_cov_trace_pc(void);

/* One allocation may be as large as a reader's largest table: 2^22 tokens of 24 bytes. */
const char *__asan_default_options(void) {
    return "max_allocation_size_mb=256:hard_rss_limit_mb=1024:allocator_may_return_null=0:detect_stack_use_after_"
           "return=1";
}

/* ---- what parent and child share --------------------------------------------------------------------------------- */

typedef struct {
    double started; /* of the current input, seconds */
    uint64_t n_runs, n_places;
    size_t n_corpus, size;
    bool has_ended;
    uint8_t data[FUZZ_BYTES_MAX];
} Shared;

static Shared *shared;

/* ---- coverage ---------------------------------------------------------------------------------------------------- */

/* A place of the code is a return address, counted from where the program lies. */

extern const char __executable_start;
static uint8_t reached[CODE_BYTES_MAX];

__attribute__((no_sanitize("address", "undefined"))) void __sanitizer_cov_trace_pc(void) {
    const uintptr_t place = (uintptr_t)__builtin_return_address(0) - (uintptr_t)&__executable_start;
    if (place >= CODE_BYTES_MAX || reached[place]) return;
    reached[place] = 1;
    if (shared) shared->n_places++;
}

/* ---- the corpus -------------------------------------------------------------------------------------------------- */

typedef struct {
    uint8_t *data;
    size_t size;
} Input;

static struct {
    Input inputs[CORPUS_MAX];
    size_t n, n_seeds;
} corpus;

/* A full corpus forgets one of those that are no seeds. */
static void corpus_add(const void *data, size_t size) {
    size_t at = corpus.n < CORPUS_MAX ? corpus.n++ : corpus.n_seeds + shared->n_runs % (CORPUS_MAX - corpus.n_seeds);
    Input *input = &corpus.inputs[at];
    free(input->data);
    input->data = (uint8_t *)malloc(size + 1);
    CHECK(input->data, "no memory for an input");
    memcpy(input->data, data, size);
    input->size = size;
}

void fuzz_seed(const void *data, size_t size) {
    CHECK(size <= FUZZ_BYTES_MAX, "a seed of %zu bytes", size);
    corpus_add(data, size);
    corpus.n_seeds = corpus.n;
}

static void corpus_free(void) {
    for (size_t i = 0; i < corpus.n; i++) free(corpus.inputs[i].data);
    memset(&corpus, 0, sizeof corpus);
}

/* ---- one input --------------------------------------------------------------------------------------------------- */

/* Runs shared->data from memory of just its size. Memory that is held after it, twice, is a leak. */
static void run_input(const FuzzTarget *t) {
    shared->started = clock_s();
    uint8_t *data = (uint8_t *)malloc(shared->size ? shared->size : 1);
    CHECK(data, "no memory for an input");
    memcpy(data, shared->data, shared->size);
    size_t before = __sanitizer_get_current_allocated_bytes(), leaked = 0;
    for (int attempt = 0; attempt < 2 && (attempt == 0 || leaked > 0); attempt++) {
        t->run(data, shared->size);
        const size_t after = __sanitizer_get_current_allocated_bytes();
        leaked = after > before ? after - before : 0;
        before = after;
    }
    free(data);
    if (leaked > 0 && __lsan_do_recoverable_leak_check()) CHECK(false, "%zu bytes leak", leaked);
    shared->n_runs++;
}

/* ---- the child --------------------------------------------------------------------------------------------------- */

typedef struct {
    uint64_t seed, n_runs;
    double seconds;
} Options;

static void run_child(const FuzzTarget *t, const Options *o) {
    FuzzRandom r = {o->seed};
    const double end = clock_s() + o->seconds;
    for (size_t i = 0; i < corpus.n_seeds; i++) {
        shared->size = corpus.inputs[i].size;
        memcpy(shared->data, corpus.inputs[i].data, shared->size);
        run_input(t);
    }
    while (shared->n_runs < o->n_runs && clock_s() < end) {
        /* A seed, one of the latest, or any: most of the corpus is refused early, and what is valid goes deeper. */
        const size_t recent = corpus.n > 32 ? corpus.n - 32 : 0;
        const uint64_t from_where = fuzz_below(&r, 3);
        const size_t pick = from_where == 0   ? fuzz_below(&r, corpus.n_seeds)
                            : from_where == 1 ? recent + fuzz_below(&r, corpus.n - recent)
                                              : fuzz_below(&r, corpus.n);
        const Input *from = &corpus.inputs[pick], *other = &corpus.inputs[fuzz_below(&r, corpus.n)];
        memcpy(shared->data, from->data, from->size);
        shared->size = fuzz_mutate(shared->data, from->size, other->data, other->size, &r);
        const uint64_t places = shared->n_places;
        run_input(t);
        if (shared->n_places > places) corpus_add(shared->data, shared->size);
        shared->n_corpus = corpus.n;
    }
    shared->has_ended = true;
    corpus_free();
    exit(EXIT_DONE);
}

/* ---- the parent -------------------------------------------------------------------------------------------------- */

/* Waits for the child. Returns false and what happened in `what` if it found something. */
static bool watch(pid_t pid, char *what, size_t what_len) {
    int status = 0;
    while (waitpid(pid, &status, WNOHANG) == 0) {
        usleep(20000);
        if (shared->started == 0 || clock_s() - shared->started < FUZZ_INPUT_TIMEOUT_S) continue;
        kill(pid, SIGKILL);
        waitpid(pid, &status, 0);
        snprintf(what, what_len, "takes more than %d s", FUZZ_INPUT_TIMEOUT_S);
        return false;
    }
    if (shared->has_ended && WIFEXITED(status) && WEXITSTATUS(status) == EXIT_DONE) return true;
    if (WIFSIGNALED(status))
        snprintf(what, what_len, "ends by signal %d", WTERMSIG(status));
    else
        snprintf(what, what_len, "ends with exit code %d", WEXITSTATUS(status));
    return false;
}

static void start_child(FILE *output) {
    dup2(fileno(output), STDOUT_FILENO);
    dup2(fileno(output), STDERR_FILENO);
    shared->started = 0;
    shared->n_runs = shared->n_places = 0;
    shared->has_ended = false;
}

/* Does the target fail on these bytes? In a child; its output goes to `output`. */
static bool fails_on(const FuzzTarget *t, const void *data, size_t size, FILE *output) {
    char what[64];
    memcpy(shared->data, data, size);
    shared->size = size;
    shared->has_ended = false;
    fflush(stdout);
    rewind(output);
    CHECK(ftruncate(fileno(output), 0) == 0, "cannot empty a file");
    const pid_t pid = fork();
    CHECK(pid >= 0, "cannot fork");
    if (pid == 0) {
        start_child(output);
        run_input(t);
        shared->has_ended = true;
        exit(EXIT_DONE);
    }
    return !watch(pid, what, sizeof what);
}

/* Leaves out pieces, from halves down to single bytes, as long as the rest still fails. */
static size_t reduce(const FuzzTarget *t, uint8_t *data, size_t size, FILE *output) {
    static uint8_t shorter[FUZZ_BYTES_MAX];
    const double end = clock_s() + 60;
    for (size_t piece = size / 2; piece > 0; piece /= 2) {
        for (size_t at = 0; at + piece <= size && clock_s() < end;) {
            memcpy(shorter, data, at);
            memcpy(shorter + at, data + at + piece, size - at - piece);
            if (fails_on(t, shorter, size - piece, output)) {
                size -= piece;
                memcpy(data, shorter, size);
            } else {
                at += piece;
            }
        }
    }
    return size;
}

static void print_file(FILE *f) {
    char line[1024];
    rewind(f);
    for (int i = 0; i < 40 && fgets(line, sizeof line, f); i++)
        printf("      %s%s", line, strchr(line, '\n') ? "" : "\n");
}

static void report(const FuzzTarget *t, const Options *o, const char *what, FILE *output) {
    static uint8_t data[FUZZ_BYTES_MAX];
    char path[256], err[ERR_LEN];
    size_t size = shared->size;
    memcpy(data, shared->data, size);
    printf("FAIL  %s: input %llu of seed %llu, %zu bytes, %s\n", t->name, (unsigned long long)shared->n_runs,
           (unsigned long long)o->seed, size, what);
    print_file(output);
    size = reduce(t, data, size, output);
    snprintf(path, sizeof path, "build/fuzz/%s-%llu.bin", t->name, (unsigned long long)o->seed);
    if (dir_make("build/fuzz", err) != 0 || file_write_durable(path, data, size, err) != 0) printf("      %s\n", err);
    printf("      reduced to %zu bytes: build/fuzz/run --input %s %s\n", size, path, t->name);
}

static bool run_target(const FuzzTarget *t, const Options *o) {
    char what[64] = "";
    FILE *output = tmpfile();
    CHECK(output, "no temporary file");
    const double start = clock_s();
    fflush(stdout);
    const pid_t pid = fork();
    CHECK(pid >= 0, "cannot fork");
    if (pid == 0) {
        start_child(output);
        t->seeds();
        run_child(t, o);
    }
    const bool is_good = watch(pid, what, sizeof what);
    if (is_good)
        printf("ok    %-12s %10llu inputs %8llu places %6zu kept %8.1f s\n", t->name,
               (unsigned long long)shared->n_runs, (unsigned long long)shared->n_places, shared->n_corpus,
               clock_s() - start);
    else
        report(t, o, what, output);
    fclose(output);
    return is_good;
}

static void write_corpus(const FuzzTarget *t, const char *dir) {
    char path[512], err[ERR_LEN];
    t->seeds();
    snprintf(path, sizeof path, "%s/%s", dir, t->name);
    CHECK(dir_make(path, err) == 0, "%s", err);
    for (size_t i = 0; i < corpus.n; i++) {
        snprintf(path, sizeof path, "%s/%s/seed_%zu", dir, t->name, i);
        CHECK(file_write_durable(path, corpus.inputs[i].data, corpus.inputs[i].size, err) == 0, "%s", err);
    }
    corpus_free();
}

static bool run_file(const FuzzTarget *t, const char *path) {
    char *data, err[ERR_LEN];
    size_t size;
    if (file_read_all(&data, &size, path, FUZZ_BYTES_MAX, err) != 0) DIE(NULL, "%s", err);
    FILE *output = tmpfile();
    CHECK(output, "no temporary file");
    const bool fails = fails_on(t, data, size, output);
    printf("%s  %s: %s\n", fails ? "FAIL" : "ok  ", t->name, path);
    if (fails) print_file(output);
    fclose(output);
    free(data);
    return !fails;
}

/* ---- the command line -------------------------------------------------------------------------------------------- */

static const char usage[] = "run [--seed N] [--seconds S] [--runs N] [--corpus DIR] [--input FILE] [NAME...]";

static bool is_chosen(const FuzzTarget *t, char **names, int n) {
    for (int i = 0; i < n; i++)
        if (strcmp(names[i], t->name) == 0) return true;
    return n == 0;
}

int main(int argc, char **argv) {
    Options o = {.seed = 1, .n_runs = UINT64_MAX, .seconds = 60};
    const char *corpus_dir = NULL, *input = NULL;
    int at = 1;
    for (; at < argc && strncmp(argv[at], "--", 2) == 0; at += 2) {
        const char *name = argv[at], *value = at + 1 < argc ? argv[at + 1] : NULL;
        if (!value) DIE(usage, "%s needs a value", name);
        if (strcmp(name, "--seed") == 0)
            o.seed = strtoull(value, NULL, 10);
        else if (strcmp(name, "--seconds") == 0)
            o.seconds = strtod(value, NULL);
        else if (strcmp(name, "--runs") == 0)
            o.n_runs = strtoull(value, NULL, 10);
        else if (strcmp(name, "--corpus") == 0)
            corpus_dir = value;
        else if (strcmp(name, "--input") == 0)
            input = value;
        else
            DIE(usage, "unknown option %s", name);
    }
    for (int i = at; i < argc; i++)
        if (!fuzz_find(argv[i])) DIE(usage, "there is no target %s", argv[i]);
    shared = (Shared *)mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED, "no shared memory");
    fuzz_folder(); /* of this process, so that it goes when this process does */
    if (!corpus_dir && !input) printf("fuzz: seed %llu\n", (unsigned long long)o.seed);
    bool is_good = true;
    for (const FuzzTarget *t = fuzz_targets; t->name; t++) {
        if (!is_chosen(t, argv + at, argc - at)) continue;
        if (corpus_dir)
            write_corpus(t, corpus_dir);
        else
            is_good &= input ? run_file(t, input) : run_target(t, &o);
    }
    return is_good ? EXIT_DONE : EXIT_FAILED;
}
