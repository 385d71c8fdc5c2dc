/* Synthetic models: every format loads, computes finite logits, and takes no file. */
#include "engine/runner.h"
#include "engine/synthetic.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char kimi[] =
    "{\"model_type\": \"kimi_k2\", \"num_hidden_layers\": 5, \"hidden_size\": 256, \"intermediate_size\": 384,"
    " \"vocab_size\": 512, \"max_position_embeddings\": 4096, \"num_attention_heads\": 4, \"rms_norm_eps\": 1e-6,"
    " \"kv_lora_rank\": 128, \"q_lora_rank\": 128, \"qk_nope_head_dim\": 64, \"qk_rope_head_dim\": 32,"
    " \"v_head_dim\": 64, \"n_routed_experts\": 32, \"num_experts_per_tok\": 4, \"moe_intermediate_size\": 128,"
    " \"n_shared_experts\": 1, \"first_k_dense_replace\": 1, \"norm_topk_prob\": true, \"routed_scaling_factor\": 2.5,"
    " \"scoring_func\": \"sigmoid\", \"topk_method\": \"noaux_tc\", \"n_group\": 1, \"topk_group\": 1,"
    " \"hidden_act\": \"silu\", \"rope_theta\": 50000.0}";
static const char llama[] =
    "{\"model_type\": \"llama\", \"num_hidden_layers\": 3, \"hidden_size\": 256, \"intermediate_size\": 512,"
    " \"vocab_size\": 512, \"max_position_embeddings\": 4096, \"num_attention_heads\": 4, \"num_key_value_heads\": 2,"
    " \"rms_norm_eps\": 1e-6, \"hidden_act\": \"silu\", \"rope_theta\": 10000.0}";

static char path[] = "/tmp/dunlin-synthetic-XXXXXX";

static void write_config(const char *text)
{
    memcpy(path + strlen(path) - 6, "XXXXXX", 6);
    int fd = mkstemp(path);
    cr_assert(fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text));
    close(fd);
}

/* Three tokens of one sequence; logits of the last. */
static void check_step(const struct dn_model *m)
{
    const struct dn_step_limits limits = {.tokens = 8, .seqs = 2, .rows = 2, .pages = 8, .tags = 1};
    const struct dn_device_conf dc = {.n_threads = 2, .limits = limits, .n_slots = 1, .n_vocab = m->hyper.n_vocab};
    struct dn_err err = {0};
    struct dn_device *d;
    struct dn_weights *w;
    struct dn_runner *r;
    cr_assert_eq(dn_kernels_open_cpu(&dc, &d, &err), 0, "%s", err.text);
    cr_assert_eq(dn_weights_open(d, m, &(struct dn_weights_conf){.format = DN_WEIGHTS_AUTO, .n_threads = 2}, &w, &err),
                 0, "%s", err.text);
    cr_assert_eq(
        dn_runner_open(d, w, &(struct dn_runner_conf){.limits = limits, .context_tokens = 64, .arena_bytes = 4 << 20},
                       &r, &err),
        0, "%s", err.text);
    struct dn_step *s = dn_runner_arrays(r);
    s->kind = DN_STEP_PREFILL;
    s->n_tokens = 3;
    s->n_seqs = s->n_rows = 1;
    s->token_start[1] = s->kv_len[0] = 3;
    s->slot[0] = -1;
    s->page_start[1] = 1;
    for (int i = 0; i < 3; i++) {
        s->token_id[i] = 100 * i + 7;
        s->position[i] = i;
        s->token_seq[i] = 0;
    }
    s->row_token[0] = 2;
    s->sample[0] = (struct dn_sample){.top_p = 1, .repetition = 1, .slot = -1, .target = -1, .n_top = 0};
    cr_assert_eq(dn_runner_step(r, &err), 0, "%s", err.text);
    float logits[512];
    double square = 0;
    dn_runner_logits(r, 0, 1, logits);
    for (int i = 0; i < 512; i++)
        square += (double)logits[i] * (double)logits[i] / 512;
    cr_assert(square > 0.01 && square < 100, "mean square %g", square);
    cr_assert(s->result[0].id >= 0 && s->result[0].logprob < 0);
    dn_runner_close(r);
    dn_weights_close(w);
    d->ops->close(d);
}

Test(synthetic, every_format_computes)
{
    static const struct {
        const char *config, *type;
        uint32_t n_layers;
        enum dn_weight_format format;
    } c[] = {{kimi, "synthetic INT4", 0, DN_W_INT4},
             {kimi, "synthetic F8_E4M3", 3, DN_W_FP8},
             {kimi, "synthetic BF16", 2, DN_W_BF16},
             {llama, "synthetic BF16", 2, DN_W_INT4}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        struct dn_model *m;
        struct dn_err err = {0};
        write_config(c[i].config);
        cr_assert_eq(dn_synthetic_open(path, c[i].n_layers, c[i].format, &m, &err), 0, "%s", err.text);
        unlink(path);
        cr_assert_str_eq(m->type_text, c[i].type);
        cr_assert_eq(m->hyper.n_layers, c[i].n_layers ? c[i].n_layers : 5);
        check_step(m);
        dn_model_close(m);
    }
}

Test(synthetic, refusals_name_what_is_wrong)
{
    struct dn_model *m;
    struct dn_err err = {0};
    write_config(kimi);
    cr_assert_eq(dn_synthetic_open(path, 6, DN_W_INT4, &m, &err), -DN_CONFIG);
    cr_assert_str_eq(err.text, "6 layers, but the model has 5");
    cr_assert_eq(dn_synthetic_open(path, 1, DN_W_INT8, &m, &err), -DN_CONFIG);
    unlink(path);
    cr_assert(dn_synthetic_open(path, 1, DN_W_INT4, &m, &err) < 0);
    write_config("{\"model_type\": \"gpt2\"}");
    cr_assert_eq(dn_synthetic_open(path, 1, DN_W_INT4, &m, &err), -DN_MODEL_FILE);
    unlink(path);
}

/* Systems with more memory promised than there is would end the process while the weights are packed. */
Test(synthetic, weights_that_no_machine_holds_are_refused_at_once)
{
    static const char from[] =
        "{\"model_type\": \"kimi_k2\", \"num_hidden_layers\": 5, \"hidden_size\": 49152, \"intermediate_size\": 384,"
        " \"n_routed_experts\": 1024, \"moe_intermediate_size\": 49152, \"vocab_size\": 512,"
        " \"max_position_embeddings\": 4096, \"num_attention_heads\": 4, \"kv_lora_rank\": 128, \"qk_nope_head_dim\": "
        "64,"
        " \"qk_rope_head_dim\": 32, \"v_head_dim\": 64, \"num_experts_per_tok\": 4, \"n_shared_experts\": 1,"
        " \"first_k_dense_replace\": 1, \"norm_topk_prob\": true, \"routed_scaling_factor\": 2.5, \"n_group\": 1,"
        " \"topk_group\": 1}";
    char text[300];
    const struct dn_step_limits limits = {.tokens = 8, .seqs = 2, .rows = 2, .pages = 8, .tags = 1};
    const struct dn_device_conf dc = {.n_threads = 1, .limits = limits, .n_slots = 1, .n_vocab = 512};
    struct dn_model *m;
    struct dn_device *d;
    struct dn_weights *w;
    struct dn_err err = {0};
    write_config(from);
    cr_assert_eq(dn_synthetic_open(path, 0, DN_W_INT4, &m, &err), 0, "%s", err.text);
    unlink(path);
    cr_assert_eq(dn_kernels_open_cpu(&dc, &d, &err), 0, "%s", err.text);
    cr_assert_eq(dn_weights_open(d, m, &(struct dn_weights_conf){.format = DN_WEIGHTS_AUTO}, &w, &err), -DN_NO_MEMORY);
    snprintf(text, sizeof text, "%s: the weights need ", path);
    cr_expect(strncmp(err.text, text, strlen(text)) == 0, "%s", err.text);
    cr_expect(strstr(err.text, " GiB as int4, and this ") != NULL && strstr(err.text, " GiB free") != NULL, "%s",
              err.text);
    d->ops->close(d);
    dn_model_close(m);
}
