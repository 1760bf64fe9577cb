/* Errors: five names, four behaviours. Floor 0.
 *
 *   CHECK(cond, fmt, ...)   our bug. Always on. Prints rank, host, file:line and values, ends the job (exit 1, core).
 *   DIE(hint, fmt, ...)     the user's mistake. "error: ..." and "hint: ..." on stderr, exit 2. What all ranks find is
 *                           printed once.
 *   FAIL(hint, fmt, ...)    the run cannot go on (disk, device, loss): the same two lines, exit 1.
 *   return -1               survivable: the caller passes `char err[ERR_LEN]`, filled by err_set().
 *
 * Only the main thread may call CHECK, DIE or FAIL across ranks; a worker thread fills its err text, and the main
 * thread raises it at the next step. */
#ifndef TRAIN_MOE_CHECK_H
#define TRAIN_MOE_CHECK_H

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { EXIT_DONE = 0, EXIT_FAILED = 1, EXIT_USER = 2, EXIT_STOPPED = 3 };
enum { ERR_LEN = 768 };

#if defined(__GNUC__)
#define PRINTF_LIKE(fmt, args) __attribute__((format(printf, fmt, args)))
#else
#define PRINTF_LIKE(fmt, args)
#endif

__attribute__((noreturn, cold)) void check_failed(const char *file, int line, const char *cond, const char *fmt, ...)
    PRINTF_LIKE(4, 5);
__attribute__((noreturn, cold)) void fatal_with_hint(int exit_code, const char *hint, const char *fmt, ...)
    PRINTF_LIKE(3, 4);

#define CHECK(cond, ...)                                                                                               \
    do {                                                                                                               \
        if (!(cond)) check_failed(__FILE__, __LINE__, #cond, __VA_ARGS__);                                             \
    } while (0)
/* hint may be NULL. */
#define DIE(hint, ...) fatal_with_hint(EXIT_USER, hint, __VA_ARGS__)
#define FAIL(hint, ...) fatal_with_hint(EXIT_FAILED, hint, __VA_ARGS__)

/* Writes a formatted message into err (ERR_LEN bytes, may be NULL) and returns -1, so that a survivable failure reads
 * `return err_set(err, "...")`. */
int err_set(char *err, const char *fmt, ...) PRINTF_LIKE(2, 3);

/* Control characters become '?': a message that quotes a file stays one line and does nothing to a terminal. Done by
 * err_set and the fatal paths. */
void make_one_line(char *text);

/* How a fatal path ends the whole job: `abort_job(code)` is called after the message is printed and must not return.
 * `rank` and `n_ranks` go into CHECK's message. Called once, by the communication layer. */
void check_set_job(int rank, int n_ranks, void (*abort_job)(int exit_code));

/* Where the run stands, for failures that come from below and end the process: `about(arg, ...)` writes "in step 12 of
 * 900; last checkpoint runs/x/step_00000010". NULL: nothing to say. */
void check_set_about(void (*about)(void *arg, char *text, size_t text_len), void *arg);
/* Its text into buf, "" where there is none; returned. */
const char *check_about(char *buf, size_t buf_len);

#ifdef __cplusplus
}
#endif
#endif
