/* See draw.h. */
#include "draw.h"

#include <math.h>
#include <string.h>

/* The shortest step of all ranks: the unit of both drawings. */
static double shortest_step(const PipeSchedule *s, const Timeline *t) {
    double shortest = t->makespan;
    for (int r = 0; r < s->shape.P; r++)
        for (int64_t k = 0; k < s->rank[r].n; k++) shortest = fmin(shortest, t->spans[r].end[k] - t->spans[r].start[k]);
    return shortest > 0 ? shortest : 1;
}

static int digits_of(int n) {
    int digits = 1;
    for (; n >= 10; n /= 10) digits++;
    return digits;
}

/* ---- text -------------------------------------------------------------------------------------------------------- */

static void repeat(FILE *out, char c, int64_t n) {
    for (; n > 0; n--) fputc(c, out);
}

/* One step in `width` columns, the last one blank: its label, cut if need be, then a line to its end. */
static void draw_cell(FILE *out, const PipeStep *step, int64_t width) {
    char label[STEP_TEXT_LEN];
    if (width < 1) return;
    step_text(label, sizeof label, step);
    const int64_t length = (int64_t)strlen(label), room = width - 1;
    fprintf(out, "%.*s", (int)(length < room ? length : room), label);
    repeat(out, '-', room - length);
    fputc(' ', out);
}

void draw_text(FILE *out, const PipeSchedule *s, const Timeline *t) {
    const double columns = (digits_of(s->shape.M - 1) + 2) / shortest_step(s, t);
    for (int r = 0; r < s->shape.P; r++) {
        int64_t at = 0;
        fprintf(out, "rank %-*d ", digits_of(s->shape.P - 1), r);
        for (int64_t k = 0; k < s->rank[r].n; k++) {
            const int64_t start = llround(t->spans[r].start[k] * columns), end = llround(t->spans[r].end[k] * columns);
            repeat(out, '.', start - at - 1);
            if (start > at) fputc(' ', out);
            draw_cell(out, &s->rank[r].step[k], end - start);
            at = end;
        }
        repeat(out, '.', llround(t->makespan * columns) - at);
        fputc('\n', out);
    }
}

/* ---- SVG --------------------------------------------------------------------------------------------------------- */

enum { LEFT = 64, TOP = 58, ROW = 24, ROW_GAP = 4, MARGIN = 12, WIDTH_MAX = 60000, FONT = 11 };

typedef enum { COLOR_FORWARD, COLOR_BACKWARD, COLOR_INPUT, COLOR_WEIGHT, COLOR_COUNT } Color;

static const struct {
    const char *name, *fill[CHUNKS_MAX];
} colors[COLOR_COUNT] = {
    [COLOR_FORWARD] = {"forward", {"#a9cbef", "#6f9fd4"}},
    [COLOR_BACKWARD] = {"backward", {"#b5dcae", "#7db873"}},
    [COLOR_INPUT] = {"input-backward", {"#f6dc93", "#dfb545"}},
    [COLOR_WEIGHT] = {"weight-backward", {"#d9c8ee", "#b296d6"}},
};

static Color color_of_backward(StepKind kind) {
    return kind == STEP_BACKWARD_INPUT ? COLOR_INPUT : kind == STEP_BACKWARD_WEIGHT ? COLOR_WEIGHT : COLOR_BACKWARD;
}

static void put_escaped(FILE *out, const char *text) {
    for (; *text; text++) {
        if (*text == '&')
            fputs("&amp;", out);
        else if (*text == '<')
            fputs("&lt;", out);
        else
            fputc(*text, out);
    }
}

static void put_text(FILE *out, double x, double y, const char *style, const char *text) {
    fprintf(out, "<text x=\"%.6g\" y=\"%.6g\"%s>", x, y, style);
    put_escaped(out, text);
    fputs("</text>\n", out);
}

static void put_box(FILE *out, double x, double y, double width, double height, const char *fill) {
    fprintf(out, "<rect x=\"%.6g\" y=\"%.6g\" width=\"%.6g\" height=\"%.6g\" fill=\"%s\"/>", x, y, width, height, fill);
}

static void put_legend(FILE *out, const PipeSchedule *s) {
    double x = LEFT;
    for (int i = 0; i < COLOR_COUNT; i++) {
        for (int chunk = 0; chunk < s->shape.n_chunks; chunk++, x += 14)
            put_box(out, x, 32, 12, 12, colors[i].fill[chunk]);
        put_text(out, x + 4, 42, "", colors[i].name);
        x += 8 + 7.0 * (double)strlen(colors[i].name);
    }
    if (s->shape.n_chunks > 1) put_text(out, x, 42, "", "(darker: the rank's second stage)");
}

/* One step at x, y: its boxes with a tooltip, and its label where it fits. */
static void put_step(FILE *out, const PipeStep *step, double x, double y, double width, double start, double end) {
    char label[STEP_TEXT_LEN];
    const double half = ROW / 2.0;
    step_text(label, sizeof label, step);
    fputs("<g>", out);
    if (step->kind == STEP_PAIR) {
        put_box(out, x, y, width, half, colors[COLOR_FORWARD].fill[step->forward.chunk]);
        put_box(out, x, y + half, width, half, colors[COLOR_BACKWARD].fill[step->backward.chunk]);
    } else if (step->kind == STEP_FORWARD) {
        put_box(out, x, y, width, ROW, colors[COLOR_FORWARD].fill[step->forward.chunk]);
    } else {
        put_box(out, x, y, width, ROW, colors[color_of_backward(step->kind)].fill[step->backward.chunk]);
    }
    fputs("<title>", out);
    put_escaped(out, label);
    fprintf(out, " from %g to %g</title></g>\n", start, end);
    if ((double)strlen(label) * FONT * 0.6 <= width + 1)
        put_text(out, x + width / 2, y + half + 4, " text-anchor=\"middle\"", label);
}

void draw_svg(FILE *out, const PipeSchedule *s, const Timeline *t, const char *title) {
    const int P = s->shape.P;
    double unit = ((digits_of(s->shape.M - 1) + 1) * FONT * 0.6 + 3) / shortest_step(s, t);
    if (unit * t->makespan > WIDTH_MAX) unit = WIDTH_MAX / t->makespan;
    const double width = fmax(LEFT + unit * t->makespan + MARGIN, 620);
    const int height = TOP + P * (ROW + ROW_GAP) + MARGIN;
    fprintf(out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%.0f\" height=\"%d\" viewBox=\"0 0 %.0f %d\" "
            "font-family=\"ui-monospace,Menlo,Consolas,monospace\" font-size=\"%d\" fill=\"#222\">\n",
            width, height, width, height, FONT);
    put_box(out, 0, 0, width, height, "#ffffff");
    put_text(out, LEFT, 20, " font-size=\"13\"", title);
    put_legend(out, s);
    for (int r = 0; r < P; r++) {
        char name[32];
        const double y = TOP + r * (ROW + ROW_GAP);
        snprintf(name, sizeof name, "rank %d", r);
        put_text(out, MARGIN, y + ROW / 2.0 + 4, "", name);
        put_box(out, LEFT, y, unit * t->makespan, ROW, "#f1f1f1"); /* idle, where no step lies over it */
        for (int64_t k = 0; k < s->rank[r].n; k++) {
            const double start = t->spans[r].start[k], end = t->spans[r].end[k];
            put_step(out, &s->rank[r].step[k], LEFT + unit * start, y, unit * (end - start) - 0.5, start, end);
        }
    }
    fputs("</svg>\n", out);
}
