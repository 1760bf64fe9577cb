/* See columns.h. */
#include "columns.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>

static const char separator[] = " | ";

void line_start(Line *line, const char *kind, int64_t step, int64_t steps_total) {
    line->n = 0;
    line->flags[0] = 0;
    char total[24];
    int width = snprintf(total, sizeof total, "%lld", (long long)steps_total);
    snprintf(line->front, sizeof line->front, "%-6s %*lld/%s", kind, width, (long long)step, total);
}

void line_add(Line *line, int priority, const char *fmt, ...) {
    if (line->n == COLUMNS_MAX) return;
    va_list args;
    va_start(args, fmt);
    vsnprintf(line->column[line->n], COLUMN_LEN, fmt, args);
    va_end(args);
    line->priority[line->n++] = priority;
}

void line_flag(Line *line, const char *fmt, ...) {
    char flag[COLUMN_LEN];
    va_list args;
    va_start(args, fmt);
    vsnprintf(flag, sizeof flag, fmt, args);
    va_end(args);
    size_t used = strlen(line->flags);
    snprintf(line->flags + used, sizeof line->flags - used, "  %s", flag);
}

/* Characters on the screen, taking one for each UTF-8 sequence. */
static int characters(const char *text) {
    int n = 0;
    for (; *text; text++) n += ((unsigned char)*text & 0xC0) != 0x80;
    return n;
}

void line_text(const Line *line, int width, char *out) {
    bool is_left_out[COLUMNS_MAX] = {false};
    int needed = characters(line->front) + characters(line->flags);
    for (int i = 0; i < line->n; i++) needed += characters(separator) + characters(line->column[i]);
    while (width > 0 && needed > width) {
        int least = -1;
        for (int i = 0; i < line->n; i++)
            if (!is_left_out[i] && line->priority[i] > 0 && (least < 0 || line->priority[i] >= line->priority[least]))
                least = i;
        if (least < 0) break;
        is_left_out[least] = true;
        needed -= characters(separator) + characters(line->column[least]);
    }
    size_t used = (size_t)snprintf(out, LINE_LEN, "%s", line->front);
    for (int i = 0; i < line->n; i++)
        if (!is_left_out[i]) used += (size_t)snprintf(out + used, LINE_LEN - used, "%s%s", separator, line->column[i]);
    while (used > 0 && out[used - 1] == ' ') out[--used] = 0;
    snprintf(out + used, LINE_LEN - used, "%s", line->flags);
}

_Static_assert(sizeof((Line *)0)->front + COLUMNS_MAX * (COLUMN_LEN + sizeof separator) + COLUMN_LEN < LINE_LEN,
               "the longest line fits LINE_LEN");

int terminal_width(int fd) {
    struct winsize size;
    return fd >= 0 && ioctl(fd, TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
}
