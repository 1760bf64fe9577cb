/* Manifests: what they bring back, and damage behind a right hash. */
#include "model/train/manifest.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/base/rng.h"
#include "tests/test.h"

#include "checkpoint_test.h"

/* Saves step 100: its folder (1,024 bytes), and the text of its manifest as saved_read_manifest gives it. */
static void saved_manifest(char *folder, char **body, size_t *size) {
    saved_step(100);
    snprintf(folder, 1024, "%s", saved_in_run("step_00000100"));
    saved_read_manifest(folder, body, size);
}

/* What the manifest says without its text from `first` up to `end`. */
static CheckpointInfo peek_without(const char *folder, char *body, size_t size, const char *first, const char *end) {
    char err[ERR_LEN], *from = strstr(body, first), *to = from ? strstr(from, end) : NULL;
    CheckpointInfo info;
    REQUIRE(to, "nothing to take away");
    memset(from, ' ', (size_t)(to - from));
    saved_rewrite_manifest(folder, body, size);
    REQUIRE(checkpoint_peek(folder, &info, err) == 0, "%s", err);
    return info;
}

/* What computed it comes back as it was given, or not at all. */
TEST(manifest_device_and_gemms) {
    static const char *const gemms[] = {NULL, "", "a row\n", "one \"row\"\nanother\n"};
    char path[CHECKPOINT_PATH_LEN], err[ERR_LEN] = "";
    int64_t bytes;
    for (int i = 0; i < 4; i++) {
        SavedState s = saved_make(100);
        CheckpointInfo info;
        s.info.device = i ? strdup("sm_90, 132 SMs, cuBLASLt 13.1.0") : NULL;
        s.info.gemms = gemms[i] ? strdup(gemms[i]) : NULL;
        REQUIRE(checkpoint_save(saved_run_dir(), &late_device, s.t, SAVED_TENSORS, &s.info, CHECKPOINT_FILE_BYTES, path,
                                &bytes, err) == 0,
                "%s", err);
        REQUIRE(checkpoint_peek(path, &info, err) == 0, "%s", err);
        EXPECT(i ? info.device && strcmp(info.device, s.info.device) == 0 : !info.device, "case %d: %s", i,
               info.device ? info.device : "none");
        EXPECT(gemms[i] ? info.gemms && strcmp(info.gemms, gemms[i]) == 0 : !info.gemms, "case %d: %s", i,
               info.gemms ? info.gemms : "none");
        checkpoint_info_free(&info);
        saved_free(&s);
    }
}

/* One edit of a good manifest, hashed again, and what the refusal must say. */
TEST(manifest_malformed) {
    static const struct {
        const char *from, *to, *part;
    } edits[] = {
        {"\"format\": 1", "\"format\": 0", "\"format\" 0, there is none"},
        {"\"format\": 1", "\"format\": \"1\"", "\"format\" must be an integer"},
        {"\"step\": 100", "\"step\": -1", "\"step\" must be an integer from 0"},
        {"\"step\": 100", "\"step\": 1.5", "\"step\" must be"},
        {"\"step\": 100", "\"stop\": 100", "\"step\" is missing"},
        {"\"tokens\": ", "\"tokens\": 9", "\"tokens\" must be an integer from 0 to 9223372036854775807"},
        {"\"samples\": ", "\"samples\": -1, \"x\": ", "\"samples\" must be an integer from 0"},
        {"\"best_val\": \"inf\"", "\"best_val\": \"Inf\"", "a number is expected"},
        {"\"best_val\": \"inf\"", "\"best_val\": 1e999", "a number is expected"},
        {"\"best_val\": \"inf\"", "\"best_val\": null", "a number is expected"},
        {"\"size\": 7", "\"size\": 1025", "\"size\" must be an integer from 0 to 1024"},
        {"\"size\": 7", "\"size\": 8", "\"value\" must hold 8 numbers"},
        {"\"n\": 7", "\"n\": 8", "\"n\" must be an integer from 0 to 7"},
        {"\"head\": 5", "\"head\": 7", "\"head\" must be an integer from 0 to 6"},
        {"\"pending\": 1", "\"pending\": 1.5", "\"pending\" must be an integer"},
        {"\"pending_norm\": \"inf\"", "\"pending_norm\": true", "a number is expected"},
        {"\"value\": [", "\"value\": [0, ", "\"value\" must hold 7 numbers"},
        {"\"config\": {", "\"config\": 1, \"x\": {", "\"config\" must be an object"},
        {"\"param_hash\": \"0", "\"param_hash\": \"G", "16 hexadecimal digits"},
        {"\"param_hash\": \"0", "\"param_hash\": \"", "16 hexadecimal digits"},
        {"\"files\": {", "\"files\": {\"../x\": 1, ", "\"../x\" is no name of a file in this folder"},
        {"\"files\": {", "\"files\": {\"/etc/x\": 1, ", "no name of a file"},
        {"\"files\": {", "\"files\": {\"\": 1, ", "no name of a file"},
        {"\"files\": {", "\"files\": {\"..\": 1, ", "no name of a file"},
        {"\"files\": {", "\"files\": {\"x\": -1, ", "the size of x must be a count"},
        {"\"tensors\": {", "\"tensors\": {\"x\": 1, ", "x: must be an object"},
        {"\"tensors\": {", "\"tensors\": {\"x\": {\"dtype\": \"F32\", \"shape\": [1], \"slices\": []}, ",
         "x: its slices end at 0 of 1"},
        {"\"tensors\": {", "\"tensors\": {\"x\": {\"dtype\": \"F33\", \"shape\": [1], \"slices\": []}, ",
         "x: unknown dtype"},
        {"\"tensors\": {", "\"tensors\": {\"x\": {\"dtype\": \"F32\", \"shape\": [1, 1, 1], \"slices\": []}, ",
         "x: more than 2 dimensions"},
        {"\"tensors\": {",
         "\"tensors\": {\"x\": {\"dtype\": \"F32\", \"shape\": [4294967296, 4294967296], \"slices\": []}, ",
         "x: no usable shape"},
        {"\"tensors\": {",
         "\"tensors\": {\"//\": {\"dtype\": \"F32\", \"shape\": [0], \"slices\": []}, "
         "\"//\": {\"dtype\": \"F32\", \"shape\": [0], \"slices\": []}, ",
         "//: given twice"},
        {"\"offset\": 0, \"extent\": 4257", "\"offset\": 1, \"extent\": 4256", "its slices do not cover it once"},
        {"\"offset\": 0, \"extent\": 4257", "\"offset\": 0, \"extent\": 4258", "its slices do not cover it once"},
        {"\"offset\": 0, \"extent\": 4257", "\"offset\": 0, \"extent\": 4256", "its slices end at 4256 of 4257"},
        {"\"offset\": 0, \"extent\": 4257", "\"offset\": 0, \"extent\": 0", "its slices do not cover it once"},
        {"\"config\": {", "\"device\": 1, \"config\": {", "\"device\" must be a string"},
        {"\"config\": {", "\"gemms\": {}, \"config\": {", "\"gemms\" must be a list"},
        {"\"config\": {", "\"gemms\": [\"\", 1], \"config\": {", "\"gemms\" must hold strings"},
        {"\"expert_load\": [", "\"expert_load\": 1, \"x\": [", "must hold lists of numbers"},
        {"\"expert_load\": [", "\"expert_load\": [1, ", "must hold lists of numbers"},
        {"\"expert_load\": [", "\"expert_load\": [[1, 2], ", "must hold lists of 2 numbers"},
        {"\"expert_load\": [\n    [", "\"expert_load\": [[-1, 2, 3], [",
         "must be an integer from 0 to 9007199254740992"},
        {"\"expert_load\": [\n    [", "\"expert_load\": [[9007199254740993, 2, 3], [",
         "must be an integer from 0 to 9"},
        {"\"expert_load\": [\n    [", "\"expert_load\": [[0.5, 2, 3], [",
         "must be an integer from 0 to 9007199254740992"},
        {"\"file\": \"state", "\"file\": \"stale", "is not one of \"files\""},
        {"\"slices\": [{", "\"slices\": [1, {", "a slice must be an object"},
        {"\"slices\": [", "\"slices\": 1, \"x\": [", "\"slices\" must be a list"},
        {"\"dtype\": \"F32\"", "\"dtype\": \"F32\", \"dtype\": \"F32\"", "key \"dtype\" is given twice"},
        {"}", "", "the text ends inside the object"},
    };
    char err[ERR_LEN], folder[1024];
    CheckpointInfo info;
    size_t size;
    char *body;
    saved_manifest(folder, &body, &size);
    for (size_t i = 0; i < sizeof edits / sizeof *edits; i++) {
        char *edited = (char *)malloc(size + 200), *at = strstr(body, edits[i].from);
        REQUIRE(at, "the manifest has no %s", edits[i].from);
        int n = sprintf(edited, "%.*s%s%s", (int)(at - body), body, edits[i].to, at + strlen(edits[i].from));
        saved_rewrite_manifest(folder, edited, (size_t)n);
        err[0] = 0;
        EXPECT(checkpoint_peek(folder, &info, err) == CHECKPOINT_DAMAGED, "accepted: %s", edits[i].to);
        EXPECT(strstr(err, edits[i].part) && strstr(err, "manifest.json"), "%s: %s", edits[i].to, err);
        free(edited);
    }
    saved_rewrite_manifest(folder, body, size);
    EXPECT(checkpoint_peek(folder, &info, err) == 0, "the unedited text: %s", err);
    checkpoint_info_free(&info);
    free(body);
}

/* Checkpoints from before there were loads load, and nothing is known then. */
TEST(manifest_without_loads) {
    char folder[1024], *body;
    size_t size;
    saved_manifest(folder, &body, &size);
    CheckpointInfo info = peek_without(folder, body, size, "\"expert_load\"", "\"config\"");
    EXPECT(info.loads.n_layers == 0 && !loads_are_known(&info.loads, 2, 3), "%d layers", info.loads.n_layers);
    checkpoint_info_free(&info);
    free(body);
}

/* Checkpoints from before RunState had pending values load, and nothing waits then. */
TEST(manifest_without_pending_values) {
    char err[ERR_LEN], folder[1024], *body;
    CheckpointInfo info;
    size_t size;
    saved_manifest(folder, &body, &size);
    REQUIRE(checkpoint_peek(folder, &info, err) == 0, "%s", err);
    const RunState saved = info.state;
    checkpoint_info_free(&info);
    info = peek_without(folder, body, size, ",\n    \"pending\"", "\n  }"); /* the last ones */
    EXPECT(!info.state.pending.is_set && info.state.pending.loss == 0 && info.state.pending.norm == 0);
    info.state.pending = saved.pending;
    EXPECT(saved.pending.is_set && memcmp(&info.state, &saved, sizeof saved) == 0, "the rest of the state differs");
    checkpoint_info_free(&info);
    free(body);
}

/* Damage behind a right hash: whatever is accepted loads or is refused, without touching memory it should not. */
TEST(manifest_random) {
    char err[ERR_LEN], folder[1024];
    size_t size;
    int loaded = 0, refused = 0;
    SavedState s = saved_make(1);
    char *body;
    saved_manifest(folder, &body, &size);
    char *mutant = (char *)malloc(size);
    size_t tensors_at = (size_t)(strstr(body, "\"config\"") - body);
    for (uint64_t trial = 0; trial < 500; trial++) {
        memcpy(mutant, body, size);
        int n_changes = 1 + (int)(rng_bits(1, RNG_TEST, trial, 0) % 3);
        for (int k = 0; k < n_changes; k++) {
            /* Half of the changes in what follows the long lists of numbers. */
            uint64_t at = rng_bits(2, RNG_TEST, trial, (uint64_t)k), how = rng_bits(3, RNG_TEST, trial, (uint64_t)k);
            at = at % 2 ? tensors_at + (at >> 1) % (size - tensors_at) : (at >> 1) % size;
            const char *likely = "0123456789[]{}\",:- ";
            mutant[at] = how % 2 ? likely[(how >> 8) % strlen(likely)] : (char)(mutant[at] ^ (1 << (how >> 8) % 8));
        }
        saved_rewrite_manifest(folder, mutant, size);
        CheckpointInfo info;
        err[0] = 0;
        int result = checkpoint_load(folder, &late_device, s.t, SAVED_TENSORS, CHECKPOINT_ALL, &info, err);
        EXPECT(result == 0 || err[0], "refused without a word");
        *(result == 0 ? &loaded : &refused) += 1;
        checkpoint_info_free(&info);
    }
    EXPECT(refused > 200 && loaded > 0, "%d refused, %d loaded", refused, loaded);
    free(mutant);
    free(body);
    saved_free(&s);
}
