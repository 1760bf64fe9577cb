/* See format.h. */
#include "format.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "data/utf8.h"

/* Divides by 1000 until x prints below `limit`, at most n_units - 1 times. Returns the unit's place. */
static int scale_down(double *x, double limit, int n_units) {
    int unit = 0;
    while (*x >= limit && unit < n_units - 1) {
        *x /= 1000;
        unit++;
    }
    return unit;
}

/* Decimals that leave three digits, seen after rounding: 9.996 is 10.0. */
static int decimals_of_three_digits(double x) {
    return x < 9.995 ? 2 : x < 99.95 ? 1 : 0;
}

Formatted format_grouped(int64_t n) {
    char digits[24];
    Formatted f;
    const int length = snprintf(digits, sizeof digits, "%lld", (long long)n), first = n < 0;
    char *to = f.text;
    for (int i = 0; i < length; i++) {
        if (i > first && (length - i) % 3 == 0) *to++ = ',';
        *to++ = digits[i];
    }
    *to = 0;
    return f;
}

Formatted format_count(double n) {
    static const char *const units[] = {"", "K", "M", "B", "T"};
    Formatted f;
    int unit = scale_down(&n, 999.5, 5);
    snprintf(f.text, sizeof f.text, "%.*f%s", unit == 0 ? 0 : decimals_of_three_digits(n), n, units[unit]);
    return f;
}

Formatted format_rate(double per_second) {
    static const char *const units[] = {"", "k", "M", "G", "T"};
    Formatted f;
    int unit = scale_down(&per_second, 999.5, 5);
    bool has_decimal = per_second < (unit > 0 ? 99.95 : 9.95);
    snprintf(f.text, sizeof f.text, "%.*f%s", has_decimal, per_second, units[unit]);
    return f;
}

Formatted format_file_size(double bytes) {
    static const char *const units[] = {"B", "kB", "MB", "GB", "TB", "PB"};
    Formatted f;
    int unit = scale_down(&bytes, 999.5, 6);
    snprintf(f.text, sizeof f.text, "%.*f %s", unit == 0 ? 0 : decimals_of_three_digits(bytes), bytes, units[unit]);
    return f;
}

Formatted format_duration(double seconds) {
    Formatted f = {"?"};
    if (!(seconds >= 0 && seconds < 1e12)) return f;
    int64_t s = llround(seconds);
    if (s < 60)
        snprintf(f.text, sizeof f.text, "%llds", (long long)s);
    else if (s < 3600)
        snprintf(f.text, sizeof f.text, "%lldm%02llds", (long long)(s / 60), (long long)(s % 60));
    else if (s < 86400)
        snprintf(f.text, sizeof f.text, "%lldh%02lldm", (long long)(s / 3600), (long long)(s / 60 % 60));
    else
        snprintf(f.text, sizeof f.text, "%lldd%02lldh", (long long)(s / 86400), (long long)(s / 3600 % 24));
    return f;
}

Formatted format_step_time(double ms) {
    Formatted f;
    if (ms < 999.5)
        snprintf(f.text, sizeof f.text, "%.*f ms", decimals_of_three_digits(ms), ms);
    else
        snprintf(f.text, sizeof f.text, "%.*f s", ms < 99995 ? 2 : ms < 999950 ? 1 : 0, ms / 1000);
    return f;
}

Formatted format_utc(double unix_seconds) {
    Formatted f;
    time_t seconds = (time_t)unix_seconds;
    struct tm utc;
    gmtime_r(&seconds, &utc);
    strftime(f.text, sizeof f.text, "%Y-%m-%dT%H:%M:%SZ", &utc);
    return f;
}

void format_one_line(char *out, size_t out_len, const char *text) {
    size_t n = strlen(text), used = 0;
    for (size_t i = 0; i < n;) {
        uint32_t ch;
        i += utf8_next(text + i, n - i, &ch);
        if (ch == ' ' || (ch >= '\t' && ch <= '\r')) {
            if (used == 0 || out[used - 1] == ' ') continue;
            ch = ' ';
        } else if (ch < 0x20 || (ch >= 0x7F && ch < 0xA0) || ch == UTF8_INVALID) {
            ch = 0xFFFD;
        }
        char bytes[4];
        size_t length = utf8_put(bytes, ch);
        if (used + length >= out_len) break;
        memcpy(out + used, bytes, length);
        used += length;
    }
    out[used] = 0;
}
