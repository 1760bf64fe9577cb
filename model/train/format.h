/* Numbers as people read them, in few columns. Floor 5.
 * Each returns a small struct by value, to be used inside the call that prints it: printf("%s", format_count(n).text).
 */
#ifndef TRAIN_MOE_FORMAT_H
#define TRAIN_MOE_FORMAT_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    char text[32];
} Formatted;

/* Every digit, in groups of three: "15,960,108,544". */
Formatted format_grouped(int64_t n);
/* A count, in three digits: "512", "20.5K", "922K", "4.20B", "14.8T". */
Formatted format_count(double n);
/* A speed: "0.4", "950", "4.0k", "30.0k", "240k", "1.2M". */
Formatted format_rate(double per_second);
/* A span of time: "43s", "3m43s", "4h05m", "4d14h"; "?" if not finite or negative. */
Formatted format_duration(double seconds);
/* The time of a step: "5.21 ms", "52.1 ms", "508 ms", "17.48 s", "174.8 s". */
Formatted format_step_time(double ms);
/* Decimal, as disks are sold: "980 B", "33.1 MB", "128 GB". */
Formatted format_file_size(double bytes);
/* Now, or any second since 1970: "2026-11-30T22:10:05Z". */
Formatted format_utc(double unix_seconds);

/* Text from anywhere (a model's sample) for one line of a terminal: valid UTF-8, runs of white space become one blank,
 * other control characters and invalid bytes U+FFFD. out gets at most out_len - 1 bytes and never half a character. */
void format_one_line(char *out, size_t out_len, const char *text);

#endif
