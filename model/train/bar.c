/* See bar.h. */
#include "bar.h"

#include <string.h>
#include <unistd.h>

#include "columns.h"
#include "kernels/base/clock.h"

enum { CELLS = 30, BAR_LEN = 256 };
static const double seconds_between = 0.1;

void bar_init(Bar *bar, FILE *out) {
    *bar = (Bar){.out = out, .is_on = fileno(out) >= 0 && isatty(fileno(out))};
}

void bar_draw(Bar *bar, int64_t done, int64_t total, const char *text) {
    if (!bar->is_on || total <= 0) return;
    double now = clock_s();
    if (bar->is_drawn && now - bar->drawn_at_s < seconds_between) return;
    double share = (double)(done < total ? done : total) / (double)total;
    int full = (int)(share * CELLS);
    char cells[CELLS + 1], line[BAR_LEN];
    memset(cells, ' ', CELLS);
    memset(cells, '=', (size_t)full);
    if (full < CELLS) cells[full] = '>';
    cells[CELLS] = 0;
    snprintf(line, sizeof line, "[%s] %3d%%  %s", cells, (int)(share * 100), text);
    /* A bar that wraps could not be drawn over: the last column stays free. */
    int width = terminal_width(fileno(bar->out));
    if (width > 1 && (int)strlen(line) > width - 1) line[width - 1] = 0;
    fprintf(bar->out, "\r%s\033[K", line);
    fflush(bar->out);
    bar->is_drawn = true;
    bar->drawn_at_s = now;
}

void bar_clear(Bar *bar) {
    if (!bar->is_drawn) return;
    fputs("\r\033[K", bar->out);
    fflush(bar->out);
    bar->is_drawn = false;
}
