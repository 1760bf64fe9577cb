/* Every way to refuse a configuration: the message names the key, what is allowed and what was found, and where. */
#include <stdio.h>
#include <string.h>

#include "data/config.h"
#include "tests/data/config_base.h"
#include "tests/test.h"

/* A change to the base: `find` (its first occurrence) becomes `replace`; without find, `replace` is a --set. */
typedef struct {
    const char *find, *replace, *err, *hint;
} Refusal;

static void expect_refusals(const Refusal *cases, size_t n) {
    static Config c;
    static char text[16384];
    char err[ERR_LEN], hint[ERR_LEN];
    for (size_t i = 0; i < n; i++) {
        const Refusal *x = &cases[i];
        const char *at = x->find ? strstr(CONFIG_BASE, x->find) : NULL;
        REQUIRE(at || !x->find, "the base has no %s", x->find);
        if (at)
            snprintf(text, sizeof text, "%.*s%s%s", (int)(at - CONFIG_BASE), CONFIG_BASE, x->replace,
                     at + strlen(x->find));
        else
            snprintf(text, sizeof text, "%s", CONFIG_BASE);
        int result = config_parse(&c, text, strlen(text), "c.json", &x->replace, at ? 0 : 1, err, hint);
        EXPECT(result == -1, "accepted: %s", x->replace);
        if (result == 0) continue;
        EXPECT(strstr(err, x->err), "%s\n  gives    %s\n  expected %s", x->replace, err, x->err);
        EXPECT(strstr(hint, x->hint), "%s\n  hints    %s\n  expected %s", x->replace, hint, x->hint);
        EXPECT(!strchr(err, '\n') && !strchr(hint, '\n'), "more than one line: %s", err);
    }
}

#define EXPECT_REFUSALS(cases) expect_refusals(cases, sizeof(cases) / sizeof *(cases))

/* Wrong types must not become NaN or 0 (cJSON#806, #999). */
static const Refusal types[] = {
    {"\"micro_batch_size\": 4", "\"micro_batch_size\": \"4\"",
     "c.json:39: train.micro_batch_size must be an integer in [1, 1048576], found the string \"4\"", "without quotes"},
    {"\"lr\": 1e-3", "\"lr\": null", "train.lr must be a number in [0, 1e+09] or a list of [tokens, value], found null",
     ""},
    {"\"num_hidden_layers\": 2", "\"num_hidden_layers\": [12]",
     "model.num_hidden_layers must be an integer in [1, 1024], found a list", ""},
    {"\"norm_topk_prob\": true", "\"norm_topk_prob\": 1",
     "model.norm_topk_prob must be true or false, found the number 1", "true or false"},
    {"\"seed\": 7", "\"seed\": 7, \"device\": 1", "run.device must be one of auto, cpu, cuda, found the number 1", ""},
    {"\"seed\": 7", "\"seed\": 7, \"name\": 1", "run.name must be a string, found the number 1", "quotes"},
    {"\"seed\": 7", "\"seed\": 7, \"threads\": null", "found null", "leave the key out for its default, 0"},
    {"\"seed\": 7", "\"seed\": 7, \"threads\": {}", "found an object", ""},
    {"\"seed\": 7", "\"seed\": true", "run.seed must be an integer in [0, 18446744073709551615], found true", ""},
    {NULL, "run.device=gpu",
     "--set run.device=gpu: run.device must be one of auto, cpu, cuda, found the string \"gpu\"", "auto"},
    {NULL, "parallel.schedule=\"gpipe\"", "must be one of paired, 1f1b, zb1p, dualpipe, dualpipev", ""},
    {NULL, "model.rope_scaling=1", "model.rope_scaling must be null or an object, found the number 1", ""},
    {NULL, "model.rope_parameters=1", "model.rope_parameters must be null or an object, found the number 1", ""},
    {NULL, "data.train=5", "data.train must be \"synthetic\", a file or glob, or a list of {name, path, weight}", ""},
    {NULL, "data.val=5", "data.val must be a file or glob, or a list of {name, path}, found the number 5", ""},
    {NULL, "sample.prompts=\"x\"", "sample.prompts must be a list of strings, found the string \"x\"", ""},
    {NULL, "sample.prompts=[1]", "sample.prompts must be a list of strings, found the number 1", ""},
    {NULL, "memory.recompute=all", "must be \"none\", \"auto\" or a list out of norms, up_projections, swiglu", ""},
    {NULL, "memory.recompute=[\"norm\"]", "found the string \"norm\"", ""},
    {NULL, "parallel.placement=even", "must be one of consecutive, balanced", ""},
    {NULL, "parallel.ep=most", "parallel.ep must be an integer in [1, 65536] or \"auto\", found the string \"most\"",
     ""},
    {NULL, "moe.capacity=best", "moe.capacity must be a number in [1, 1e+06] or \"worst\", found the string \"best\"",
     ""},
    {"\"synthetic\"\n  }", "\"synthetic\"\n  }, \"moe\": 5",
     "c.json:35: section \"moe\" must be an object, found the number 5", "\"moe\": {...}"},
};

/* Numbers that are no numbers of this field (cJSON#14, #87, #151, #891, #1071). */
static const Refusal numbers[] = {
    {"\"steps\": 100", "\"steps\": 100.5",
     "train.steps must be an integer in [1, 1000000000000] or null, found the number 100.5", ""},
    {"\"steps\": 100", "\"steps\": 99999999999999999999", "found the number 99999999999999999999", ""},
    {"\"seed\": 7", "\"seed\": 18446744073709551616",
     "[0, 18446744073709551615], found the number 18446744073709551616", ""},
    {"\"seed\": 7", "\"seed\": -1", "run.seed must be an integer in [0, 18446744073709551615], found the number -1",
     ""},
    {"\"lr\": 1e-3", "\"lr\": 1e999", "train.lr must be a number in [0, 1e+09] or a list", ""},
    {"\"lr\": 1e-3", "\"lr\": NaN", "c.json:41:11: NaN is not a JSON number", "train.lr takes a number in [0, 1e+09]"},
    {"\"lr\": 1e-3", "\"lr\": 1e-3, \"weight_decay\": Infinity", "Infinity is not a JSON number",
     "train.weight_decay takes a number in [0, 100]"},
    {"\"lr\": 1e-3", "\"lr\": 1e-3, \"grad_clip\": -1e999", "train.grad_clip must be a number in [0, 1e+09], found",
     ""},
    {"\"lr\": 1e-3", "\"lr\": 1e-3, \"grad_clip\": 1e-999", "train.grad_clip must be a number in", ""},
    {NULL, "train.lr=nan", "--set train.lr=nan: train.lr must be a number in [0, 1e+09] or a list", ""},
    {NULL, "train.seq_len=0", "train.seq_len must be an integer in [1, 16777216], found the number 0", ""},
    {NULL, "eval.every_steps=-1", "eval.every_steps must be an integer in [0, 1000000000000], found the number -1", ""},
    {NULL, "train.beta2=1", "train.beta2 must be a number in [0, 0.999999], found the number 1", ""},
    {NULL, "model.vocab_size=1", "model.vocab_size must be an integer in [2, 16777216], found the number 1", ""},
    {NULL, "model.moe_layer_freq=2", "model.moe_layer_freq must be 1, found the number 2", ""},
    {NULL, "model.num_nextn_predict_layers=5", "model.num_nextn_predict_layers must be an integer in [0, 4]", ""},
    {NULL, "moe.capacity=0.5", "moe.capacity must be a number in [1, 1e+06] or \"worst\", found the number 0.5", ""},
    {NULL, "model.bos_token_id=-2", "model.bos_token_id must be a token id in [0, 16777216] or null", ""},
    {NULL, "train.global_batch_size=8.5", "train.global_batch_size must be an integer in [1, 16777216] or a list", ""},
};

/* Keys that nobody reads must not pass (unsloth PR#10452). */
static const Refusal keys[] = {
    {"\"lr\": 1e-3", "\"learning_rat\": 1e-3", "c.json:41: unknown key \"learning_rat\" in \"train\"",
     "did you mean train.lr?"},
    {"\"micro_batch_size\"", "\"micro-batch-size\"", "unknown key \"micro-batch-size\" in \"train\"",
     "train.micro_batch_size?"},
    {"\"vocab_size\"", "\"lr\": 1e-3, \"vocab_size\"", "unknown key \"lr\" in \"model\"", "did you mean train.lr?"},
    {"\"num_hidden_layers\"", "\"num_hiden_layers\"", "unknown key \"num_hiden_layers\"", "model.num_hidden_layers?"},
    {"\"lr\": 1e-3", "\"LR\": 1e-3", "unknown key \"LR\"", "did you mean train.lr?"},
    {"\"steps\"", "\"setps\"", "unknown key \"setps\"", "did you mean train.steps?"},
    {"\"steps\": 100", "\"steps\": 100, \"qqqqqq\": 1", "unknown key \"qqqqqq\"",
     "./train_moe help train lists its keys"},
    {"\"version\": 1,", "\"version\": 1, \"lr\": 1,", "c.json:2: unknown section \"lr\"", "did you mean train.lr?"},
    {"\"version\": 1,", "\"version\": 1, \"qqqqqq\": 1,", "unknown section \"qqqqqq\"", "./train_moe help lists all"},
    {"\"version\": 1,", "\"version\": 1, \"model.rope_scaling\": {},", "unknown section \"model.rope_scaling\"", ""},
    {"\"version\": 1,", "", "c.json: \"version\" is missing", "\"version\": 1"},
    {"\"version\": 1,", "\"version\": 2,", "c.json:2: \"version\" must be 1, found the number 2", "version 1"},
    {"    \"kv_lora_rank\": 128,\n", "", "c.json:6: model.kv_lora_rank is missing", "an integer in [1, 1048576]"},
    {"    \"rope_theta\": 10000.0,\n", "", "model.rope_theta is missing", ""},
    {"\"data\": {\n    \"train\": \"synthetic\"\n  },", "",
     "c.json: data.train is missing: there is no section \"data\"", "synthetic"},
    {"\"deepseek_v3\"", "\"llama\"",
     "model.model_type must be \"deepseek_v3\" or \"deepseek_v2\", found the string \"llama\"", "family"},
    {"\"deepseek_v3\"", "\"deepseek_v2\"", "model.scoring_func is missing", "sigmoid, softmax"},
    {"\"deepseek_v3\"", "\"deepseek_v2\", \"scoring_func\": \"sigmoid\"", "model.topk_method is missing", ""},
    {"\"rope_scaling\": null", "\"attention_bias\": true", "model.attention_bias must be false, found true", "no bias"},
    {"\"rope_scaling\": null", "\"tie_word_embeddings\": true", "model.tie_word_embeddings must be false", ""},
    {"\"rope_scaling\": null", "\"partial_rotary_factor\": 0.5", "must be 1 or null, found the number 0.5", ""},
    {"\"rope_scaling\": null", "\"hidden_act\": \"gelu\"",
     "model.hidden_act must be \"silu\", found the string \"gelu\"", ""},
    {"\"lr\": 1e-3", "\"lr\": 1e-3, \"optimizer\": \"sgd\"", "train.optimizer must be \"adamw\"", ""},
    {"\"version\": 1,", "\"version\": 1, \"version\": 1,", "key \"version\" is given twice, first at 2:3", "keep one"},
    {CONFIG_BASE, "[1]", "c.json: must hold an object, found a list", ""},
    {CONFIG_BASE, "{\"model_type\": \"deepseek_v3\", \"hidden_size\": 8}", "this is a Hugging Face config.json",
     "\"model\": \"c.json\""},
};

static const Refusal sets[] = {
    {NULL, "train.lr", "--set train.lr: must be section.field=value", "--set train.lr=3e-4"},
    {NULL, "=5", "--set =5: must be section.field=value", ""},
    {NULL, "train.lr = 5", "--set train.lr = 5: must be section.field=value, without spaces around the =", ""},
    {NULL, "train.steps=1k", "train.steps must be an integer in [1, 1000000000000] or null, found the string \"1k\"",
     "numbers look like 12, -0.5, 3e-4 or 100e9"},
    {NULL, "data.shuffle=True", "data.shuffle must be true or false, found the string \"True\"", "small letters"},
    {NULL, "train=5", "names a section", ""},
    {NULL, "lr=5", "unknown field \"lr\"; write section.field=value", "did you mean train.lr?"},
    {NULL, "train.learning-rate=5", "unknown field \"train.learning-rate\"", "did you mean train.lr?"},
    {NULL, "model.rope_parameters.factor=5", "unknown field \"model.rope_parameters.factor\"",
     "model.rope_scaling.factor?"},
    {NULL, "data.train[].weight=5", "unknown field", ""},
    {NULL, "data.skip=[[1,2]", "--set data.skip=[[1,2]:1:7: the text ends inside the list", "cut off"},
    {NULL, "model=configs", "configs/config.json: cannot open", "or of its folder"},
    {NULL, "model=no/such/file.json", "--set model=no/such/file.json: \"model\": there is no file", "config.json"},
    {"\"rope_scaling\": null", "\"rope_scaling\": 3", "c.json:30: model.rope_scaling must be null or an object", ""},
    {"\"train\": {\n    \"seq_len\": 32,", "\"train\": {", "train.seq_len is missing", ""},
};

static const Refusal lists[] = {
    {NULL, "train.lr=[]", "train.lr is an empty list", ""},
    {NULL, "train.lr=[[0, 1e-3], 5]", "train.lr point 2 must be [tokens, value]", "[[0, 1e-3], [10e9, 1e-4]]"},
    {NULL, "train.lr=[[0, 1e-3], [-1, 1e-3]]", "point 2 must be [tokens, value]", ""},
    {NULL, "train.lr=[[0.5, 1e-3]]", "point 1 must be [tokens, value]", ""},
    {NULL, "train.lr=[[5, 1e-3], [4, 1e-3]]", "train.lr point 2 goes back in tokens", ""},
    {NULL, "train.lr=[[5, 1], [5, 2], [5, 3]]", "train.lr point 3 is the third at one place", ""},
    {NULL, "train.lr=[[0, 1e999]]", "train.lr must be a number in [0, 1e+09]", ""},
    {NULL,
     "train.lr=[[0,1],[1,1],[2,1],[3,1],[4,1],[5,1],[6,1],[7,1],[8,1],[9,1],[10,1],[11,1],[12,1],[13,1],[14,1],[15,1],["
     "16,1]]",
     "train.lr has over 16 points", ""},
    {NULL, "train.global_batch_size=[[0, 8], [100, 10.5]]", "must be an integer in [1, 16777216]", ""},
    {NULL, "data.train=[]", "data.train is an empty list", ""},
    {NULL, "data.train=\"\"", "data.train[].path must not be empty", ""},
    {NULL, "data.train=[\"x\"]", "data.train must hold objects with name and path", "\"weight\": 1"},
    {NULL, "data.train=[{\"name\": \"a\"}]", "data.train[].path is missing", ""},
    {NULL, "data.train=[{\"name\": \"a\", \"path\": \"x\", \"weight\": 0}]",
     "data.train[].weight must be a number in [1e-09, 1e+09]", ""},
    {NULL, "data.train=[{\"name\": \"a\", \"path\": \"x\", \"wieght\": 1}]",
     "unknown key \"wieght\" in \"data.train[]\"", "weight?"},
    {NULL, "data.train=[{\"name\": \"a\", \"path\": \"x\"}, {\"name\": \"a\", \"path\": \"y\"}]",
     "data.train has the name \"a\" twice", ""},
    {NULL, "data.val=[{\"name\": \"a\", \"path\": \"x\", \"weight\": 1}]", "unknown key \"weight\" in \"data.val[]\"",
     ""},
    {NULL, "data.val=[{},{},{},{}]", "data.val[].name is missing", ""},
    {NULL, "eval.choice=5", "eval.choice must be a file, or a list of {name, path}", ""},
    {NULL, "eval.choice=[{\"name\": \"a\", \"path\": \"x\", \"weight\": 1}]",
     "unknown key \"weight\" in \"eval.choice[]\"", ""},
    {NULL, "eval.choice_every_steps=5", "eval.choice_every_steps = 5, but eval.choice is empty", "hellaswag"},
    {NULL, "data.skip=5", "data.skip must be a list of [first, last], found the number 5", ""},
    {NULL, "data.skip=[[5, 5]]", "data.skip range 1 must be [first, last] with 0 <= first < last", "[[1000, 1064]"},
    {NULL, "data.skip=[[1, 5], [4, 8]]", "data.skip range 2 must be [first, last] with 5 <= first < last", ""},
    {NULL, "sample.prompts=[\"\",\"\",\"\",\"\",\"\",\"\",\"\",\"\",\"\"]", "sample.prompts has over 8 prompts", ""},
    {NULL, "model.eos_token_id=[]", "model.eos_token_id is an empty list", ""},
    {NULL, "model.eos_token_id=[1, \"x\"]",
     "model.eos_token_id must be a token id in [0, 16777216], a list of them, or null", ""},
    {NULL, "run.name=0123456789012345678901234567890123456789012345678901234567890123",
     "run.name has 64 bytes, at most 63 are kept", ""},
};

/* YaRN in the form of transformers 4 and 5. */
#define YARN "\"rope_scaling\": {\"type\": \"yarn\", \"original_max_position_embeddings\": 16, "
static const Refusal ropes[] = {
    {"\"rope_scaling\": null", "\"rope_scaling\": {}", "model.rope_scaling.rope_type is missing", "default, yarn"},
    {"\"rope_scaling\": null", "\"rope_scaling\": {\"type\": \"linear\"}",
     "rope_type must be one of default, yarn, found the string \"linear\"", ""},
    {"\"rope_scaling\": null", "\"rope_scaling\": {\"type\": \"yarn\"}", "original_max_position_embeddings is missing",
     "4096"},
    {"\"rope_scaling\": null", YARN "\"factor\": 8}",
     "model.max_position_embeddings = 64 must be rope_scaling.factor x original_max_position_embeddings = 8 x 16 = 128",
     "agree"},
    {"\"rope_scaling\": null", YARN "\"beta_fast\": 1}", "model.rope_scaling.beta_fast = 1 must be above beta_slow = 1",
     ""},
    {"\"rope_scaling\": null", YARN "\"betafast\": 1}", "unknown key \"betafast\" in \"model.rope_scaling\"",
     "beta_fast?"},
    {"\"rope_scaling\": null", YARN "\"rope_type\": \"default\"}",
     "\"rope_type\" and \"type\" are both given and differ", "keep one"},
    {"\"rope_scaling\": null", YARN "\"truncate\": false}", "model.rope_scaling.truncate must be true", ""},
    {"\"rope_scaling\": null", "\"rope_scaling\": {\"type\": \"yarn\", \"original_max_position_embeddings\": 128}",
     "model.max_position_embeddings = 64 must be at least rope_scaling.original_max_position_embeddings = 128", ""},
    {"\"rope_scaling\": null", "\"rope_parameters\": {\"rope_type\": \"default\", \"rope_theta\": 5}",
     "\"rope_theta\" and \"rope_theta\" are both given and differ", "keep one"},
    {"\"rope_scaling\": null", YARN "\"factor\": 4}, \"rope_parameters\": {\"rope_type\": \"default\"}",
     "\"rope_scaling\" and \"rope_parameters\" are both given and differ", "keep one"},
};

static const Refusal rules[] = {
    {NULL, "model.v_head_dim=257", "v_head_dim = 257 must be at most 256", ""},
    {NULL, "model.qk_rope_head_dim=15", "c.json: model.qk_rope_head_dim = 15 must be even", ""},
    {NULL, "model.num_key_value_heads=2", "model.num_key_value_heads = 2 must equal model.num_attention_heads = 4",
     "grouped"},
    {NULL, "model.n_group=3", "model.n_routed_experts = 8 must be a multiple of model.n_group = 3", ""},
    {NULL, "model.topk_group=5", "model.topk_group = 5 must be at most model.n_group = 4", ""},
    {NULL, "model.num_experts_per_tok=5",
     "model.topk_group = 2 groups of 2 experts hold fewer than model.num_experts_per_tok = 5", "raise"},
    {NULL, "model.num_experts_per_tok=9", "model.num_experts_per_tok = 9 must be at most model.n_routed_experts = 8",
     ""},
    {NULL, "model.n_group=8", "leaves one expert a group", "two best"},
    /* A single weight divided by itself is 1 (minimind#858). */
    {NULL, "model.num_experts_per_tok=1", "model.norm_topk_prob = true with model.num_experts_per_tok = 1",
     "norm_topk_prob to false"},
    {NULL, "model.scoring_func=softmax",
     "model.scoring_func = \"softmax\" does not go with model.topk_method = \"noaux_tc\"", "V2"},
    {NULL, "model.topk_method=group_limited_greedy",
     "\"sigmoid\" does not go with model.topk_method = \"group_limited_greedy\"", ""},
    {NULL, "model.topk_method=greedy", "model.n_group = 4 must be 1 with model.topk_method = \"greedy\"",
     "group_limited_greedy"},
    {NULL, "model.first_k_dense_replace=3",
     "model.first_k_dense_replace = 3 must be at most model.num_hidden_layers = 2", "dense"},
    {NULL, "model.bos_token_id=257", "model.bos_token_id = 257 must be below model.vocab_size = 257", ""},
    {NULL, "model.eos_token_id=257", "model.eos_token_id = 257 must be below model.vocab_size = 257", ""},
    {NULL, "data.document_token=257", "data.document_token = 257 must be below model.vocab_size = 257", ""},
    {NULL, "train.seq_len=65", "train.seq_len = 65 must be at most model.max_position_embeddings = 64", ""},
    {NULL, "train.micro_batch_size=3", "train.global_batch_size = 8 must be a multiple of train.micro_batch_size = 3",
     ""},
    {NULL, "train.global_batch_size=[[0, 8], [1000, 10]]", "train.global_batch_size = 10 must be a multiple of", ""},
    {NULL, "train.tokens=255", "train.tokens = 255 is less than one step: global_batch_size x seq_len = 256", ""},
    {NULL, "train.lr_warmup_steps=101", "train.lr_warmup_steps = 101 is more than the run's 100 steps", "warm-up"},
    {"\"steps\": 100", "\"tokens\": 2560, \"lr_warmup_steps\": 11",
     "train.lr_warmup_steps = 11 is more than the run's 10 steps", ""},
    {"\"steps\": 100", "\"steps\": 100, \"tokens\": 25600", "train.steps = 100 and train.tokens = 25600 are both given",
     "one"},
    {"\"steps\": 100,", "", "train.steps or train.tokens is missing", "\"steps\": 1000"},
    {NULL, "train.lr_final=1", "train.lr_final = 1 is above train.lr = 0.001", "null"},
    {"\"lr\": 1e-3", "\"lr\": [[0, 1], [5, 2]], \"lr_final\": 1",
     "train.lr_final = 1, but train.lr is a list of points that ends with 2", "null"},
    {"\"lr\": 1e-3", "\"lr\": [[0, 1], [5, 2]], \"lr_shape\": \"wsd\"", "train.lr_shape = \"wsd\" is for one train.lr",
     "joined by"},
    {NULL, "sample.every_steps=5", "sample.every_steps = 5, but sample.prompts is empty", "prompts"},
    {NULL, "parallel.pp=3", "parallel.pp = 3 must be at most model.num_hidden_layers = 2", ""},
    {NULL, "parallel.ep=3", "parallel.ep = 3 must divide model.n_routed_experts = 8", "auto"},
    {NULL, "run.name=a/b", "run.name = \"a/b\" must not contain a slash", ""},
    {"\"seq_len\": 32,\n    \"global_batch_size\": 8,\n    \"micro_batch_size\": 4",
     "\"seq_len\": 16777216, \"global_batch_size\": 1024, \"micro_batch_size\": 1024",
     "train.seq_len = 16777216 must be at most", ""},
    {"64\n  },\n  \"data\": {\n    \"train\": \"synthetic\"\n  },\n  \"train\": {\n    \"seq_len\": 32,\n    "
     "\"global_batch_size\": 8,\n    \"micro_batch_size\": 4",
     "16777216}, \"data\": {\"train\": \"synthetic\"}, \"train\": {\"seq_len\": 16777216, \"global_batch_size\": 1024, "
     "\"micro_batch_size\": 1024",
     "train.micro_batch_size = 1024 x train.seq_len = 16777216 must be at most 2147483647 tokens", ""},
};

TEST(config_refuses_types) {
    EXPECT_REFUSALS(types);
}

TEST(config_refuses_numbers) {
    EXPECT_REFUSALS(numbers);
}

TEST(config_refuses_keys) {
    EXPECT_REFUSALS(keys);
}

TEST(config_refuses_sets) {
    EXPECT_REFUSALS(sets);
}

TEST(config_refuses_lists) {
    EXPECT_REFUSALS(lists);
}

TEST(config_refuses_rope) {
    EXPECT_REFUSALS(ropes);
}

TEST(config_refuses_rules) {
    EXPECT_REFUSALS(rules);
}

TEST(config_refuses_a_long_prompt) {
    static char set[PROMPT_LEN + 64];
    snprintf(set, sizeof set, "sample.prompts=[\"%0*d\"]", PROMPT_LEN, 0);
    const Refusal cases[] = {{NULL, set, "sample.prompts has a prompt of 512 bytes, at most 511 are kept", ""}};
    EXPECT_REFUSALS(cases);
}

/* FP8 scales cover 128 columns: the rule for widths is said before anything runs. */
TEST(config_fp8_needs_widths_of_128) {
    static const struct {
        const char *set, *err;
    } cases[] = {
        {"model.hidden_size=136", "model.hidden_size = 136 must be a multiple of 128"},
        {"model.q_lora_rank=64", "model.q_lora_rank = 64 must be a multiple of 128"},
        {"model.kv_lora_rank=64", "model.kv_lora_rank = 64 must be a multiple of 128"},
        {"model.v_head_dim=16", "model.num_attention_heads x v_head_dim = 64 must be a multiple of 128"},
        {"model.intermediate_size=200", "model.intermediate_size = 200 must be a multiple of 128"},
        {"model.moe_intermediate_size=200", "model.moe_intermediate_size = 200 must be a multiple of 128"},
    };
    static Config c;
    char err[ERR_LEN], hint[ERR_LEN];
    const char *set[2] = {"precision.compute=fp8", "train.steps=100"};
    EXPECT(config_parse(&c, CONFIG_BASE, strlen(CONFIG_BASE), "c.json", set, 2, err, hint) == 0, "%s", err);
    EXPECT(c.precision.compute == COMPUTE_FP8, "fp8");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        set[1] = cases[i].set;
        int result = config_parse(&c, CONFIG_BASE, strlen(CONFIG_BASE), "c.json", set, 2, err, hint);
        EXPECT(result == -1 && strstr(err, cases[i].err), "%s gives %s", cases[i].set, err);
        EXPECT(config_parse(&c, CONFIG_BASE, strlen(CONFIG_BASE), "c.json", set + 1, 1, err, hint) == 0, "%s", err);
    }
}
