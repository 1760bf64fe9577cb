/* See part.h. */
#include "part.h"

#include "kernels/base/check.h"
#include "lr.h"
#include "model/parallel/pipeline.h"

ScheduleKind part_schedule(const Config *c) {
    const int kind = schedule_find(c->parallel.schedule);
    CHECK(kind >= 0, "parallel.schedule %s", c->parallel.schedule);
    return (ScheduleKind)kind;
}

bool part_is_pipelined(const Config *c, const Mesh *mesh) {
    const ScheduleKind kind = part_schedule(c);
    if (mesh->n_pp > 1) return true;
    return kind == SCHEDULE_DUALPIPEV || (kind == SCHEDULE_PAIRED && mesh->n_ep > 1);
}

int64_t part_batch_unit(const Config *c, int64_t n_data) {
    return c->parallel.pp > 1 ? n_data * schedule_multiple(part_schedule(c), c->parallel.pp) : n_data;
}

/* What does not go together: DIE. */
static RankPart make(const Config *c, const Mesh *mesh, int64_t logits_bytes, const ScheduleShape *shape) {
    const ModelShape s = shape_make(c, mesh, logits_bytes);
    RankPart part;
    char err[ERR_LEN];
    if (pipeline_part(&part, shape, mesh->pp, &s, err) != 0)
        DIE("lower parallel.pp, or choose a schedule with fewer stages", "parallel.schedule %s: %s",
            c->parallel.schedule, err);
    return part;
}

RankPart part_make(const Config *c, const Mesh *mesh, int64_t logits_bytes) {
    const Schedule *batch = &c->train.global_batch_size;
    char err[ERR_LEN], hint[ERR_LEN];
    ScheduleShape shape, largest;
    for (int i = 0; i < batch->n; i++) {
        const int64_t M = (int64_t)batch->value[i] / (c->train.micro_batch_size * mesh->n_data);
        if (schedule_shape(&shape, part_schedule(c), mesh->n_pp, M, err, hint) != 0)
            DIE(hint[0] ? hint : "train_moe plan shows what a schedule takes", "%s", err);
        if (i == 0 || shape.M > largest.M) largest = shape;
    }
    return make(c, mesh, logits_bytes, &largest);
}

RankPart part_make_forward(const Config *c, const Mesh *mesh, int64_t logits_bytes) {
    char err[ERR_LEN], hint[ERR_LEN];
    ScheduleShape shape;
    if (schedule_shape(&shape, part_schedule(c), mesh->n_pp, 1, err, hint) != 0) DIE(hint[0] ? hint : NULL, "%s", err);
    return make(c, mesh, logits_bytes, &shape);
}
