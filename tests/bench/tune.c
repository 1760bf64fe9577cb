/* Times the algorithms of cuBLASLt for every GEMM of a configuration, and writes the fastest into the table that is
 * compiled in: `make tune CONFIG=...` on a GPU, then `make`.
 *
 *     tune TABLE CONFIG [section.field=value]...
 *
 * The model is laid out as for a run and walked through with ops that compute nothing, which lists the shapes:
 * training, evaluation and generation. Rows of other shapes, GPUs and library versions stay in the table. */
#ifdef HAVE_CUDA
#include <stdio.h>
#include <string.h>

#include "kernels/base/check.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/gemm_table.h"
#include "model/model.h"
#include "model/train/device.h"
#include "tune_gemm.h"

int main(int argc, char **argv) {
    char err[ERR_LEN], hint[ERR_LEN], text[DEVICE_TEXT_LEN];
    Config c;
    Device d;
    Model m;
    GemmRows rows;
    if (argc < 3) DIE("tune kernels/cuda/gemm_rows.inc configs/moonlight_half.json", "no table or no configuration");
    if (gemm_rows_read(&rows, argv[1], err) != 0) DIE(NULL, "%s: %s", argv[1], err);
    if (config_load(&c, argv[2], (const char *const *)argv + 3, argc - 3, err, hint) != 0)
        DIE(hint[0] ? hint : NULL, "%s", err);
    c.run.device = DEVICE_CUDA;
    device_open(&d, &c, text);
    Comm *comm = comm_self(&d);
    memset(&m, 0, sizeof m);
    if (model_init(&m, &c, &d, comm, err) != 0) DIE("lower train.micro_batch_size", "%s", err);
    model_rehearse(&m, device_rehearsal(&d));
    model_free(&m);
    printf("%s: %s; %s\n", argv[2], text, device_identity(&d, text));
    tune_gemms(&rows);
    if (gemm_rows_write(&rows, argv[1], err) != 0) FAIL(NULL, "%s", err);
    printf("%s: %d rows; make builds them in\n", argv[1], rows.n);
    gemm_rows_free(&rows);
    comm->free(comm);
    device_close(&d);
    return EXIT_DONE;
}
#else
#include <stdio.h>
int main(void) {
    printf("tune: this build has no CUDA\n");
    return 2;
}
#endif
