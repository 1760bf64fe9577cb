/* See run.h: opening and closing. */
#include "run.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#include "hf.h"
#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "kernels/base/file.h"
#include "kernels/comm/check_streams.h"
#include "kernels/comm/watch.h"
#include "model/memory.h"
#include "part.h"
#include "peak.h"
#include "ranks.h"
#include "stop.h"
#include "zscore.h"

/* ---- model ------------------------------------------------------------------------------------------------------- */

static bool goes_forward_alone(const Args *args) {
    return args->command == COMMAND_EVAL || args->command == COMMAND_GENERATE;
}

/* Before anything else the ranks compare what they were told to do. */
static void check_ranks(const Run *r, const Launch *launch) {
    char version[256];
    const char *alone = r->args->overfit ? "--overfit" : r->args->dump_logits ? "--dump-logits" : NULL;
    if (launch->world > 1 && alone)
        DIE("start it without mpirun", "%s in %d processes: it is for one", alone, launch->world);
    ranks_check_config(&r->config, version_text(version, sizeof version));
}

/* Then nothing depends on the schedule, nor on the batch: on one process the model is whole, on more a micro-batch goes
 * through as many stages as the configuration says. */
static void set_forward_alone(Config *c, int world) {
    snprintf(c->parallel.schedule, sizeof c->parallel.schedule, "1f1b");
    if (world == 1) c->parallel.pp = c->parallel.ep = 1;
}

/* Does the batch divide? Of a plan, that of one rank. */
static void check_batch(const Run *r, int64_t n_data) {
    char err[ERR_LEN], hint[ERR_LEN];
    const Config *c = &r->config;
    if (batch_check(c, n_data > 0 && !goes_forward_alone(r->args) ? part_batch_unit(c, n_data) : 1, err, hint) != 0)
        DIE(hint[0] ? hint : NULL, "%s", err);
}

/* Refuses what cannot fit before anything is allocated. */
static void check_memory(Run *r) {
    char err[ERR_LEN], hint[ERR_LEN];
    const int64_t generate_len = r->model.generate_len;
    const RankPart *part = r->model.part;
    model_plan(&r->model, &r->config, &r->device, r->comm);
    if (memory_check(&r->model, err, hint) != 0) DIE(hint, "%s", err);
    model_free(&r->model);
    r->model.generate_len = generate_len;
    r->model.part = part;
}

/* For a failure that ends the process wherever it stands. */
static void run_about(void *arg, char *text, size_t text_len) {
    const Run *r = (const Run *)arg;
    if (r->trainer.length.steps == 0) return; /* not training yet */
    snprintf(text, text_len, "in step %lld of %lld; %s%s", (long long)r->trainer.state.step + 1,
             (long long)r->trainer.length.steps, r->last_checkpoint[0] ? "last checkpoint " : "no checkpoint yet",
             r->last_checkpoint);
}

void run_open_model(Run *r, const Args *args, const Launch *launch, int64_t generate_len, bool allocate) {
    char err[ERR_LEN], hint[ERR_LEN];
    memset(r, 0, sizeof *r);
    r->args = args;
    r->lock_fd = -1;
    r->saved_step = -1;
    r->document_token = -1;
    r->started_s = clock_s();
    check_set_about(run_about, r);
    if (config_load(&r->config, args->config, args->sets, args->n_sets, err, hint) != 0)
        DIE(hint[0] ? hint : NULL, "%s", err);
    if (allocate) check_ranks(r, launch);
    if (goes_forward_alone(args)) set_forward_alone(&r->config, launch->world);
    if (args->overfit) r->config.parallel.pp = 1;                         /* one process has the whole model */
    check_batch(r, allocate ? launch->world / r->config.parallel.pp : 1); /* if it divides: ranks_open */
    if (allocate)
        device_open(&r->device, &r->config, r->device_text);
    else
        device_for_plan(&r->device, &r->config, args->gpu != NULL);
    r->comm = allocate ? ranks_open(&r->device, &r->config, launch) : comm_self(&r->device);
    r->model.generate_len = generate_len;
    if (args->check_streams) r->comm = check_streams(&r->device, r->comm);
    if (!allocate) {
        model_plan(&r->model, &r->config, &r->device, r->comm);
        return;
    }
    if (part_is_pipelined(&r->config, &r->comm->mesh)) {
        r->part = (goes_forward_alone(args) ? part_make_forward : part_make)(&r->config, &r->comm->mesh,
                                                                             r->device.logits_bytes);
        r->model.part = &r->part;
    }
    check_memory(r);
    if (model_init(&r->model, &r->config, &r->device, r->comm, err) != 0)
        DIE("lower train.micro_batch_size, or see what takes the memory: train_moe plan --config ...", "%s", err);
    r->tensors = params_state(&r->model.params, &r->n_tensors);
    if (r->model.part && goes_forward_alone(args))
        r->trainer.pipeline = pipeline_open(&r->model, part_schedule(&r->config));
}

void run_close(Run *r) {
    watch_stop();
    check_set_about(NULL, NULL);
    saver_close(&r->saver);
    trainer_free(&r->trainer);
    log_close(&r->log);
    eval_close(&r->val);
    choice_close(&r->choice);
    run_forget_samples(r);
    loader_close(r->loader);
    tokenizer_free(r->tokenizer);
    free(r->tensors);
    if (r->model.device) model_free(&r->model); /* of a plan too: its lists */
    if (r->comm) r->comm->free(r->comm);
    device_close(&r->device);
    if (r->lock_fd >= 0) close(r->lock_fd);
}

/* ---- weights ----------------------------------------------------------------------------------------------------- */

/* A folder that holds a checkpoint, or a run folder whose newest is meant. */
static void checkpoint_in(const char *folder, char *path) {
    char err[ERR_LEN], note[ERR_LEN], manifest[PATH_LEN + 32];
    snprintf(manifest, sizeof manifest, "%s/manifest.json", folder);
    if (path_exists(manifest)) {
        snprintf(path, CHECKPOINT_PATH_LEN, "%s", folder);
        return;
    }
    const char *expected = "a checkpoint is a folder step_... with a manifest.json, or a run's folder with such in it; "
                           "a Hugging Face folder holds model.safetensors or its index";
    if (!path_exists(folder)) DIE(expected, "%s: no such folder", folder);
    int found = checkpoint_find(folder, -1, path, note, err);
    if (found < 0) DIE(expected, "%s", err);
    if (found > 0) DIE(expected, "%s: no checkpoint in it", folder);
}

static void place_experts(Run *r, const char *path) {
    char err[ERR_LEN];
    CheckpointInfo info;
    if (r->model.shape.R == 1 || checkpoint_peek(path, &info, err) != 0)
        return; /* nothing to place; loading says why */
    run_place_experts(r, &info.loads);
    checkpoint_info_free(&info);
}

static void load(Run *r, const char *path, CheckpointPart part, CheckpointInfo *info) {
    char err[ERR_LEN];
    place_experts(r, path);
    if (checkpoint_load(path, &r->device, r->tensors, r->n_tensors, part, info, err) != 0)
        DIE("the checkpoint has to fit the configuration's model", "%s", err);
    model_cast(&r->model);
}

void run_find_weights(const Args *args, const Config *c, char *path) {
    char err[ERR_LEN], note[ERR_LEN] = "";
    const char *which = args->checkpoint;
    char *end;
    const long long step = strtoll(which, &end, 10);
    const bool is_step = *which && !*end;
    if (!is_step && strcmp(which, "latest") != 0) {
        checkpoint_in(which, path);
    } else {
        int found = checkpoint_find(c->run.dir, is_step ? step : -1, path, note, err);
        if (found < 0) DIE(NULL, "%s", err);
        if (found > 0) DIE("train first, or name another with --checkpoint", "no checkpoint in %s", c->run.dir);
    }
    job_spread(path, CHECKPOINT_PATH_LEN); /* a run may be saving there */
    if (job_rank() > 0) return;
    if (note[0]) fprintf(stderr, "%s\n", note);
    fprintf(stderr, "weights: %s\n", path);
}

void run_load_weights(Run *r) {
    char path[CHECKPOINT_PATH_LEN];
    run_find_weights(r->args, &r->config, path);
    CheckpointInfo info;
    load(r, path, CHECKPOINT_WEIGHTS, &info);
    device_resume(&r->device, info.device, info.gemms, r->device_note);
    r->trainer.state = info.state;
    checkpoint_info_free(&info);
}

/* The architecture alone: data, seed and lengths are the new run's. */
int run_compare_model(const char *config_json, const char *path, const Config *now, char *err) {
    char reason[ERR_LEN], hint[ERR_LEN], changed[ERR_LEN];
    Config saved;
    if (config_parse(&saved, config_json, strlen(config_json), path, NULL, 0, reason, hint) != 0)
        return err_set(err, "%s: its configuration is not understood: %s", path, reason);
    const ModelConfig model = saved.model;
    saved = *now;
    saved.model = model;
    return config_compare(&saved, now, changed, sizeof changed, err);
}

/* ---- data -------------------------------------------------------------------------------------------------------- */

void run_open_choice(Run *r) {
    char err[ERR_LEN], hint[ERR_LEN];
    if (choice_open(&r->choice, &r->config, err, hint) != 0) DIE(hint[0] ? hint : NULL, "%s", err);
    for (int i = 0; i < r->choice.n; i++)
        if (r->choice.n_cut[i] > 0)
            log_warn(&r->log, r->trainer.state.step,
                     "%s: %lld of %lld contexts lose their beginning to train.seq_len = %lld", r->choice.name[i],
                     (long long)r->choice.n_cut[i], (long long)r->choice.file[i].n_examples,
                     (long long)r->config.train.seq_len);
}

static void open_data(Run *r) {
    char err[ERR_LEN], hint[ERR_LEN];
    LoaderSpec spec;
    if (loader_spec_train(&spec, &r->config, r->comm->mesh.n_data, err, hint) != 0 ||
        loader_open(&r->loader, &spec, err, hint) != 0 ||
        eval_open(&r->val, &r->config, r->comm->mesh.n_data, err, hint) != 0)
        DIE(hint[0] ? hint : NULL, "%s", err);
    ranks_check_data(loader_identity(r->loader));
    if (r->config.eval.choice_every_steps > 0) run_open_choice(r);
    r->document_token = loader_document_token(r->loader);
    for (int i = 0; i < r->val.n; i++) {
        const char *shared = loader_shared_shard(r->loader, r->val.loader[i]);
        if (shared)
            DIE("name files that are not trained on", "data.val %s and data.train both hold %s", r->val.name[i],
                shared);
    }
}

/* The tokenizer for samples: data.tokenizer, or what the JSON beside the shards names. Without one there are no
 * samples. */
static void open_tokenizer(Run *r, const Sidecar *sidecar) {
    char err[ERR_LEN], path[PATH_LEN] = "";
    const char *asked = r->config.data.tokenizer;
    if (asked[0])
        snprintf(path, sizeof path, "%s", asked);
    else if (sidecar && sidecar->found && sidecar->tokenizer[0] &&
             sidecar_tokenizer_path(path, sizeof path, sidecar, err) != 0)
        DIE(NULL, "%s", err);
    if (!path[0]) return;
    if (tokenizer_load(&r->tokenizer, path, err) != 0) DIE(NULL, "%s", err);
    if (r->document_token < 0) r->document_token = tokenizer_document_token(r->tokenizer);
    if (tokenizer_vocab_size(r->tokenizer) > r->config.model.vocab_size)
        DIE("model.vocab_size must not be smaller than the tokenizer's vocabulary",
            "%s: %d ids, but model.vocab_size is %lld", path, tokenizer_vocab_size(r->tokenizer),
            (long long)r->config.model.vocab_size);
}

/* ---- the state of the run ---------------------------------------------------------------------------------------- */

static void lock_folder(Run *r) {
    char err[ERR_LEN], path[PATH_LEN + 8];
    const int64_t bytes = ranks_checkpoint_bytes(&r->model.params);
    if (checkpoint_can_write(r->config.run.dir, bytes, err) != 0)
        DIE("choose another run.dir, or make room", "%s", err);
    snprintf(path, sizeof path, "%s/lock", r->config.run.dir);
    r->lock_fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (r->lock_fd < 0) DIE("choose another run.dir", "%s: cannot open: %s", path, strerror(errno));
    if (flock(r->lock_fd, LOCK_EX | LOCK_NB) == 0) return;
    if (errno != EWOULDBLOCK)
        DIE("the file system has to know flock: set another run.dir", "%s: cannot lock: %s", path, strerror(errno));
    DIE("wait for it, stop it, or set another run.dir", "%s: another run is working in this folder", r->config.run.dir);
}

/* What may differ between the saved configuration and this one. */
static void compare(Run *r, const char *path, const CheckpointInfo *info) {
    char err[ERR_LEN], hint[ERR_LEN], changed[2 * ERR_LEN] = "";
    Config saved;
    if (config_parse(&saved, info->config_json, strlen(info->config_json), path, NULL, 0, err, hint) != 0)
        DIE("--init-from starts a new run with its weights", "%s: its configuration is not understood: %s", path, err);
    if (config_compare(&saved, &r->config, changed, sizeof changed, err) != 0)
        DIE("set it back, or start a new run: another run.dir with --init-from", "%s was trained otherwise: %s", path,
            err);
    if (info->data_identity != loader_identity(r->loader))
        DIE("a new run on other data: another run.dir with --init-from",
            "%s: the data is not what this run was trained on (names, sizes, contents or weights differ)", path);
    if (saved.parallel.placement == PLACEMENT_BALANCED && r->model.shape.R > 1) r->moves_experts = true;
    if (changed[0]) snprintf(r->resume_note, sizeof r->resume_note, "; changed: %s", changed);
}

/* train.z_window may have changed: the newest values that fit, oldest first. */
static void fit_window(ZWindow *w, int size) {
    const ZWindow saved = *w;
    if (saved.size == size) return;
    zscore_init(w, size);
    for (int i = 0; i < saved.n; i++) zscore_push(w, saved.value[(saved.head + i) % saved.size]);
}

/* A checkpoint of before there were loads has none. */
static void restore_loads(Run *r, const ExpertLoads *saved) {
    ExpertLoads *l = &r->trainer.loads;
    if (!loads_are_known(saved, l->n_layers, l->n_experts)) return;
    loads_free(l);
    *l = loads_copy(saved);
}

/* Rank 0 does it; all others have read what they want before (ranks_agree_on_checkpoint, or a path they were given). */
static void set_aside_after(Run *r, int64_t step) {
    char err[ERR_LEN], note[ERR_LEN];
    if (r->comm->mesh.rank > 0) return;
    if (checkpoint_set_aside_after(r->config.run.dir, step, note, err) != 0) DIE(NULL, "%s", err);
    if (note[0]) log_warn(&r->log, step < 0 ? 0 : step, "%s", note);
}

static void resume_from(Run *r, const char *path) {
    char err[ERR_LEN];
    CheckpointInfo info;
    if (checkpoint_peek(path, &info, err) != 0) DIE(NULL, "%s", err);
    compare(r, path, &info);
    device_resume(&r->device, info.device, info.gemms, r->device_note);
    checkpoint_info_free(&info);
    load(r, path, ranks_part(&r->model.shape), &info);
    r->trainer.state = info.state;
    restore_loads(r, &info.loads);
    checkpoint_info_free(&info);
    fit_window(&r->trainer.state.loss_z, r->config.train.z_window);
    fit_window(&r->trainer.state.norm_z, r->config.train.z_window);
    trainer_restore(&r->trainer);
    snprintf(r->last_checkpoint, sizeof r->last_checkpoint, "%s", path);
    r->saved_step = r->trainer.state.step;
    if (r->trainer.state.step >= r->trainer.length.steps)
        DIE("to go on: raise train.steps or train.tokens; to start anew: --resume never, or another run.dir",
            "%s is finished: step %lld of %lld", r->config.run.dir, (long long)r->trainer.state.step,
            (long long)r->trainer.length.steps);
    set_aside_after(r, r->trainer.state.step);
}

static void start_fresh(Run *r) {
    char path[CHECKPOINT_PATH_LEN];
    r->is_fresh = true;
    model_init_weights(&r->model);
    if (r->args->init_from && hf_is_folder(r->args->init_from)) {
        if (r->comm->mesh.n_ep > 1 || r->comm->mesh.n_pp > 1)
            DIE("train_moe import-hf DIR --out RUN makes a folder that --init-from RUN takes on any number of ranks",
                "--init-from %s: a Hugging Face folder is read by ranks that hold the whole model", r->args->init_from);
        run_init_from_hf(r, r->args->init_from);
    } else if (r->args->init_from) {
        checkpoint_in(r->args->init_from, path);
        load(r, path, CHECKPOINT_WEIGHTS, NULL);
    }
    trainer_restore(&r->trainer);
    set_aside_after(r, -1);
}

/* Weights without data or moments, from import-hf: not the middle of a run, but where one starts. */
static bool start_import(Run *r, const char *path) {
    char err[ERR_LEN];
    CheckpointInfo info;
    if (checkpoint_peek(path, &info, err) != 0) return false;
    const bool is_import = info.state.step == 0 && info.data_identity == 0;
    if (is_import && run_compare_model(info.config_json, path, &r->config, err) != 0)
        DIE("set it back, or start a new run: another run.dir with --init-from", "%s is another model: %s", path, err);
    checkpoint_info_free(&info);
    if (!is_import) return false;
    r->is_fresh = true;
    model_init_weights(&r->model);
    load(r, path, CHECKPOINT_WEIGHTS, NULL);
    trainer_restore(&r->trainer);
    snprintf(r->last_checkpoint, sizeof r->last_checkpoint, "%s", path);
    r->saved_step = 0;
    return true;
}

/* auto: the newest whole checkpoint, older ones where newer ones are damaged. Returns false if there is none. */
static bool resume_newest(Run *r) {
    char err[ERR_LEN], note[ERR_LEN], path[CHECKPOINT_PATH_LEN];
    int found = checkpoint_find(r->config.run.dir, -1, path, note, err);
    if (found < 0) DIE("--resume never starts anew and leaves them aside", "%s", err);
    if (found > 0) {
        ranks_agree_on_checkpoint(path, -1);
        return false;
    }
    if (start_import(r, path)) return true;
    CheckpointInfo info;
    found = checkpoint_load_newest(r->config.run.dir, &r->device, r->tensors, r->n_tensors, ranks_part(&r->model.shape),
                                   &info, path, note, err);
    if (found != 0) {
        /* It may just not fit this configuration: comparing says so in the user's words. */
        if (checkpoint_peek(path, &info, note) == 0) {
            compare(r, path, &info);
            DIE("set it back, or start a new run: another run.dir with --init-from", "%s", err);
        }
        DIE("--resume never starts anew and leaves them aside", "%s", err);
    }
    ranks_agree_on_checkpoint(path, info.state.step);
    checkpoint_info_free(&info);
    if (note[0]) log_warn(&r->log, 0, "%s", note);
    resume_from(r, path);
    return true;
}

static void open_state(Run *r) {
    char err[ERR_LEN];
    if (trainer_init(&r->trainer, &r->config, &r->model, r->loader, err) != 0) DIE(NULL, "%s", err);
    run_place_experts(r, &r->trainer.loads);
    const char *resume = r->args->resume;
    const bool is_auto = strcmp(resume, "auto") == 0, is_never = strcmp(resume, "never") == 0;
    if (!is_auto && !is_never) {
        char path[CHECKPOINT_PATH_LEN];
        if (r->args->init_from)
            DIE("--resume goes on with a run, --init-from starts a new one",
                "--resume %s and --init-from exclude each other", resume);
        checkpoint_in(resume, path);
        if (!start_import(r, path)) resume_from(r, path);
    } else if (is_never || !resume_newest(r)) {
        start_fresh(r);
    }
    char note[sizeof r->resume_note];
    snprintf(note, sizeof note, "%s", r->resume_note);
    if (r->is_fresh && r->last_checkpoint[0])
        snprintf(r->resume_note, sizeof r->resume_note, "weights of %s, fresh start", r->last_checkpoint);
    else if (r->is_fresh)
        snprintf(r->resume_note, sizeof r->resume_note, "%s",
                 r->args->init_from ? "weights from --init-from, fresh start"
                 : is_auto          ? "auto: nothing there, fresh start"
                                    : "never: fresh start");
    else
        snprintf(r->resume_note, sizeof r->resume_note, "%s: %s, %s%.600s", is_auto ? "auto" : "asked",
                 r->last_checkpoint,
                 r->device_note[0]  ? r->device_note
                 : r->moves_experts ? "equal up to rounding from here, as experts are placed anew"
                                    : "bit for bit from here",
                 note);
}

FILE *run_out(FILE *f) {
    FILE *nowhere = job_rank() > 0 ? fopen("/dev/null", "w") : NULL;
    return nowhere ? nowhere : f;
}

void run_open_training(Run *r) {
    char err[ERR_LEN];
    log_init(&r->log, r->config.log.every_steps, r->args->quiet || r->comm->mesh.rank > 0, run_out(stdout),
             run_out(stderr));
    log_set_rate(&r->log, (LogRate){shape_flops_per_token(&r->model.shape), device_is_gpu(&r->device),
                                    peak_bf16_flops(device_gpu_name())});
    open_data(r);
    open_tokenizer(r, loader_sidecar(r->loader));
    if (r->comm->mesh.rank == 0) lock_folder(r);
    ranks_check_folder(r->config.run.dir);
    open_state(r);
    const Ops *rehearsal = device_rehearsal(&r->device);
    if (rehearsal) model_rehearse(&r->model, rehearsal);
    watch_start(r->config.run.dir, r->config.run.hang_timeout_s); /* from here on, what takes long is a hang */
    const RunState *s = &r->trainer.state;
    if (r->args->profile && !device_is_gpu(&r->device))
        DIE("on a CPU: perf record ./train_moe ...", "--profile is for a GPU, and this run computes on a CPU");
    if (r->args->profile && r->args->profile_first <= s->step)
        DIE("name later steps, or another run.dir", "--profile %s: step %lld is done already", r->args->profile,
            (long long)s->step);
    char *json = config_to_json(&r->config);
    LogRun run = {r->config.run.dir, s->step, s->tokens, r->trainer.length.steps, version_commit(), json};
    if (r->comm->mesh.rank == 0 && log_open(&r->log, &run, err) != 0) DIE("choose another run.dir", "%s", err);
    free(json);
    saver_open(&r->saver, &r->config, &r->model, &r->log.file, r->saver_note);
    r->saved_at_s = clock_s();
}
