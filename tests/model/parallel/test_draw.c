/* Drawings: the text as it is, the SVG by its elements. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/parallel/draw.h"
#include "model/parallel/overlap.h"
#include "tests/test.h"

typedef struct {
    PipeSchedule s;
    Timeline t;
    char *text;
    size_t size;
} Drawing;

static Drawing drawn(ScheduleKind kind, int P, int M, double comm, const char *svg_title) {
    Drawing d;
    ScheduleShape shape;
    char err[ERR_LEN];
    const StepTimes times = overlap_step_times(comm, 4);
    memset(&d, 0, sizeof d);
    REQUIRE(schedule_shape(&shape, kind, P, M, err, NULL) == 0, "%s", err);
    d.s = schedule_make(shape);
    REQUIRE(schedule_simulate(&d.t, &d.s, &times, NULL, err) == 0, "%s", err);
    FILE *out = open_memstream(&d.text, &d.size);
    REQUIRE(out != NULL);
    if (svg_title)
        draw_svg(out, &d.s, &d.t, svg_title);
    else
        draw_text(out, &d.s, &d.t);
    fclose(out);
    return d;
}

static void release(Drawing *d) {
    free(d->text);
    timeline_free(&d->t, d->s.shape.P);
    schedule_free(&d->s);
}

TEST(draw_text_by_hand) {
    static const struct {
        ScheduleKind kind;
        int P, M;
        const char *text;
    } cases[] = {
        {SCHEDULE_1F1B, 2, 2,
         "rank 0 F0 F1 ..... B0--- .. B1--- \n"
         "rank 1 .. F0 B0--- F1 B1--- ......\n"},
        {SCHEDULE_ZB1P, 2, 3,
         "rank 0 F0 F1 .. I0 W0 F2 I1 W1 I2 W2 \n"
         "rank 1 .. F0 I0 F1 I1 W0 F2 I2 W1 W2 \n"},
        {SCHEDULE_PAIRED, 1, 11,
         "rank 0 F0- F1&B0------ F2&B1------ F3&B2------ F4&B3------ F5&B4------ F6&B5------ F7&B6------ "
         "F8&B7------ F9&B8------ F10&B9----- B10---- \n"},
        {SCHEDULE_DUALPIPE, 2, 4,
         "rank 0 F0 f2 F1 b2--- f3&B0--- b3--- I1 W1 \n"
         "rank 1 f2 F0 f3 B0--- F1&b2--- B1--- i3 w3 \n"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Drawing d = drawn(cases[i].kind, cases[i].P, cases[i].M, 0, NULL);
        EXPECT(strcmp(d.text, cases[i].text) == 0, "\n%sexpected\n%s", d.text, cases[i].text);
        release(&d);
    }
}

static int count(const char *text, const char *part) {
    int n = 0;
    for (const char *at = text; (at = strstr(at, part)); at += strlen(part)) n++;
    return n;
}

/* Every line of a drawing has the same length: the time axis is one. */
TEST(draw_text_lines_end_together) {
    Drawing d = drawn(SCHEDULE_DUALPIPE, 8, 20, 1, NULL);
    const size_t length = strcspn(d.text, "\n");
    int n = 0;
    for (const char *line = d.text; *line; line += strcspn(line, "\n") + 1, n++) EXPECT_EQ(strcspn(line, "\n"), length);
    EXPECT_EQ(n, 8);
    release(&d);
}

TEST(draw_svg_has_every_step) {
    Drawing d = drawn(SCHEDULE_DUALPIPE, 4, 10, 1, "a <title> & more");
    int n_steps = 0, n_pairs = 0;
    for (int r = 0; r < 4; r++)
        for (int64_t k = 0; k < d.s.rank[r].n; k++, n_steps++) n_pairs += d.s.rank[r].step[k].kind == STEP_PAIR;
    EXPECT(strncmp(d.text, "<svg xmlns=\"http://www.w3.org/2000/svg\"", 39) == 0);
    EXPECT(d.size > 7 && strcmp(d.text + d.size - 7, "</svg>\n") == 0);
    EXPECT_EQ(count(d.text, "<g>"), n_steps);
    EXPECT_EQ(count(d.text, "</g>"), n_steps);
    EXPECT_EQ(count(d.text, "<title>"), n_steps);
    EXPECT_EQ(count(d.text, "<text"), count(d.text, "</text>"));
    /* background, eight keys of the legend, four rows, one box a step and a second one for a pair */
    EXPECT_EQ(count(d.text, "<rect"), 1 + 8 + 4 + n_steps + n_pairs);
    EXPECT_EQ(count(d.text, "a &lt;title> &amp; more"), 1);
    EXPECT_EQ(count(d.text, "F3&amp;b6 from"), 4); /* the two meet on every rank */
    EXPECT_EQ(count(d.text, "width=\"-"), 0);
    EXPECT_EQ(count(d.text, "nan"), 0);
    release(&d);
}

/* A long one stays within bounds, without the labels that do not fit. */
TEST(draw_svg_of_many_steps) {
    Drawing d = drawn(SCHEDULE_1F1B, 2, 4000, 0, "long");
    double width = 0;
    REQUIRE(sscanf(strstr(d.text, "width="), "width=\"%lf\"", &width) == 1);
    EXPECT(width > 1000 && width < 61000, "width %g", width);
    EXPECT_EQ(count(d.text, "<title>"), 2 * 8000);
    EXPECT(count(d.text, "<text") < 100, "%d texts", count(d.text, "<text"));
    release(&d);
}
