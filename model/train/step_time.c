/* See step_time.h. */
#include "step_time.h"

#include <string.h>

bool step_time(StepTime *t, const ModelShape *s, const ModelCount *count, Compute compute, const GpuRates *r) {
    memset(t, 0, sizeof *t);
    if (compute == COMPUTE_FP32) return false;
    OpWork all = op_work_of_head(s);
    for (int b = 0; b < s->n_blocks; b++) {
        const OpWork block = op_work_of_block(s, b);
        op_work_add(&all, &block);
    }
    t->of = op_time(&all, r, compute == COMPUTE_FP8 && r->peak_fp8 > 0);
    const double params = (double)(count->main_total.params + count->mtp_total.params);
    t->update = params * update_bytes(s) / (1e9 * r->hbm);
    return true;
}

double update_bytes(const ModelShape *s) {
    const double moments = s->moment == DTYPE_F32 ? 16 : 8;
    return 3 * 4 + 2 * 4 + moments + 2;
}
