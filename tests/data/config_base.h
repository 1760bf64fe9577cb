/* A valid configuration as text, one key a line, for tests that change one thing in it. */
#ifndef TRAIN_MOE_TESTS_CONFIG_BASE_H
#define TRAIN_MOE_TESTS_CONFIG_BASE_H

#define CONFIG_BASE                                                                                                    \
    "{\n"                                                                                                              \
    "  \"version\": 1,\n"                                                                                              \
    "  \"run\": {\n"                                                                                                   \
    "    \"seed\": 7\n"                                                                                                \
    "  },\n"                                                                                                           \
    "  \"model\": {\n"                                                                                                 \
    "    \"model_type\": \"deepseek_v3\",\n"                                                                           \
    "    \"vocab_size\": 257,\n"                                                                                       \
    "    \"hidden_size\": 128,\n"                                                                                      \
    "    \"num_hidden_layers\": 2,\n"                                                                                  \
    "    \"num_attention_heads\": 4,\n"                                                                                \
    "    \"num_key_value_heads\": 4,\n"                                                                                \
    "    \"q_lora_rank\": null,\n"                                                                                     \
    "    \"kv_lora_rank\": 128,\n"                                                                                     \
    "    \"qk_nope_head_dim\": 32,\n"                                                                                  \
    "    \"qk_rope_head_dim\": 16,\n"                                                                                  \
    "    \"v_head_dim\": 32,\n"                                                                                        \
    "    \"first_k_dense_replace\": 1,\n"                                                                              \
    "    \"intermediate_size\": 256,\n"                                                                                \
    "    \"n_routed_experts\": 8,\n"                                                                                   \
    "    \"num_experts_per_tok\": 2,\n"                                                                                \
    "    \"n_shared_experts\": 1,\n"                                                                                   \
    "    \"moe_intermediate_size\": 128,\n"                                                                            \
    "    \"n_group\": 4,\n"                                                                                            \
    "    \"topk_group\": 2,\n"                                                                                         \
    "    \"norm_topk_prob\": true,\n"                                                                                  \
    "    \"routed_scaling_factor\": 2.5,\n"                                                                            \
    "    \"rms_norm_eps\": 1e-6,\n"                                                                                    \
    "    \"rope_theta\": 10000.0,\n"                                                                                   \
    "    \"rope_scaling\": null,\n"                                                                                    \
    "    \"max_position_embeddings\": 64\n"                                                                            \
    "  },\n"                                                                                                           \
    "  \"data\": {\n"                                                                                                  \
    "    \"train\": \"synthetic\"\n"                                                                                   \
    "  },\n"                                                                                                           \
    "  \"train\": {\n"                                                                                                 \
    "    \"seq_len\": 32,\n"                                                                                           \
    "    \"global_batch_size\": 8,\n"                                                                                  \
    "    \"micro_batch_size\": 4,\n"                                                                                   \
    "    \"steps\": 100,\n"                                                                                            \
    "    \"lr\": 1e-3\n"                                                                                               \
    "  }\n"                                                                                                            \
    "}\n"

#endif
