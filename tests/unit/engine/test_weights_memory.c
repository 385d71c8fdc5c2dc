/* Loading takes the packed weights' memory and a chunk a thread: there is never a second copy, neither of the file's
 * pages nor of decoded values. Sampled while a checkpoint of 112 MB is loaded in each format. */
#include "engine/weights.h"
#include "unit/engine/tiny_checkpoint.h"

#include <pthread.h>
#include <stdatomic.h>

enum { DIM = 1024, FF = 4096, LAYERS = 3, VOCAB = 8192, THREADS = 2, PATTERN = 1 << 20 };

struct out {
    struct dn_buf header, names;
    uint64_t bytes;
};

static void add(struct out *o, const char *name, unsigned n_out, unsigned n_in)
{
    uint64_t begin = o->bytes;
    o->bytes += 2 * (uint64_t)(n_out ? n_out : 1) * n_in;
    dn_buf_printf(&o->header, "%s\"%s\":{\"dtype\":\"BF16\",\"shape\":[", o->header.len ? "," : "{", name);
    if (n_out)
        dn_buf_printf(&o->header, "%u,", n_out);
    dn_buf_printf(&o->header, "%u],\"data_offsets\":[%llu,%llu]}", n_in, (unsigned long long)begin,
                  (unsigned long long)o->bytes);
}

/* Every tensor has the same values over and over; the file is written from a megabyte. */
static void write_checkpoint(const char *folder)
{
    static const struct {
        const char *name;
        unsigned n_out, n_in;
    } t[] = {{"input_layernorm", 0, DIM},    {"post_attention_layernorm", 0, DIM},
             {"self_attn.q_proj", DIM, DIM}, {"self_attn.k_proj", DIM, DIM},
             {"self_attn.v_proj", DIM, DIM}, {"self_attn.o_proj", DIM, DIM},
             {"mlp.gate_proj", FF, DIM},     {"mlp.up_proj", FF, DIM},
             {"mlp.down_proj", DIM, FF}};
    struct out o = {0};
    char name[96];
    add(&o, "model.embed_tokens.weight", VOCAB, DIM);
    add(&o, "model.norm.weight", 0, DIM);
    for (unsigned l = 0; l < LAYERS; l++) {
        for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
            snprintf(name, sizeof name, "model.layers.%u.%s.weight", l, t[i].name);
            add(&o, name, t[i].n_out, t[i].n_in);
        }
    }
    dn_buf_putc(&o.header, '}');
    uint64_t n_header = o.header.len;
    static uint16_t pattern[PATTERN / 2];
    for (size_t i = 0; i < PATTERN / 2; i++)
        pattern[i] = (uint16_t)(0x3c00 + i * 7 % 251);
    char path[128];
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    FILE *f = fopen(path, "wb");
    cr_assert_not_null(f);
    fwrite(&n_header, 8, 1, f);
    fwrite(o.header.data, 1, o.header.len, f);
    for (uint64_t left = o.bytes; left > 0;) {
        size_t n = left < PATTERN ? (size_t)left : PATTERN;
        cr_assert_eq(fwrite(pattern, 1, n, f), n);
        left -= n;
    }
    fclose(f);
    dn_buf_clear(&o.header);
    dn_buf_printf(&o.header,
                  "{\"model_type\":\"llama\",\"vocab_size\":%d,\"hidden_size\":%d,\"intermediate_size\":%d,"
                  "\"num_hidden_layers\":%d,\"num_attention_heads\":8,\"num_key_value_heads\":8,"
                  "\"max_position_embeddings\":512,\"tie_word_embeddings\":true}",
                  VOCAB, DIM, FF, LAYERS);
    tiny_file(folder, "config.json", &o.header);
    dn_buf_release(&o.header);
}

struct peak {
    uint64_t anonymous, resident; /* bytes */
};

static uint64_t status_bytes(const char *text, const char *key)
{
    const char *at = strstr(text, key);
    return at ? strtoull(at + strlen(key), NULL, 10) * 1024 : 0;
}

static struct peak now(void)
{
    char text[4096];
    FILE *f = fopen("/proc/self/status", "r");
    cr_assert_not_null(f);
    size_t n = fread(text, 1, sizeof text - 1, f);
    text[n] = '\0';
    fclose(f);
    return (struct peak){status_bytes(text, "\nRssAnon:"), status_bytes(text, "\nVmRSS:")};
}

static atomic_bool stop;

static void *watch(void *arg)
{
    struct peak *p = arg;
    while (!atomic_load(&stop)) {
        struct peak s = now();
        p->anonymous = s.anonymous > p->anonymous ? s.anonymous : p->anonymous;
        p->resident = s.resident > p->resident ? s.resident : p->resident;
        usleep(300);
    }
    return NULL;
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { SANITIZED = 1 };
#else
enum { SANITIZED = 0 };
#endif

/* A test each, and so a process each: what malloc() keeps of an earlier load would hide the next one's. */
static void check(int format)
{
    if (SANITIZED) {
        printf("SKIPPED: a sanitizer's own memory hides what loading takes\n");
        return;
    }
    char folder[] = "/tmp/dn_memory_XXXXXX";
    cr_assert_not_null(mkdtemp(folder));
    write_checkpoint(folder);
    struct dn_model *m;
    struct dn_device *d;
    struct dn_weights *w = NULL;
    struct dn_err err = {0};
    struct peak peak = {0};
    pthread_t watcher;
    const struct dn_device_conf dc = {
        .n_threads = 1, .limits = {.tokens = 1, .seqs = 1, .rows = 1, .pages = 1}, .n_slots = 1, .n_vocab = VOCAB};
    cr_assert_eq(dn_model_open(folder, &m, &err), 0, "%s", err.text);
    cr_assert_eq(dn_kernels_open_cpu(&dc, &d, &err), 0, "%s", err.text);
    struct peak before = now();
    atomic_store(&stop, false);
    cr_assert_eq(pthread_create(&watcher, NULL, watch, &peak), 0);
    struct dn_weights_conf conf = {.format = format, .n_threads = THREADS};
    cr_assert_eq(dn_weights_open(d, m, &conf, &w, &err), 0, "%s", err.text);
    struct peak after = now();
    atomic_store(&stop, true);
    pthread_join(watcher, NULL);
    /* A thread has a chunk as f32, the backend's packing another, and malloc() keeps what one of them was; beside that
     * stacks, lists of work, and pages of the files that are at work. */
    uint64_t anonymous = w->bytes + THREADS * 3 * ((uint64_t)128 * FF * 4) + (6 << 20);
    uint64_t resident = anonymous + (10 << 20);
    printf("%s: %.1f MB packed of %.1f; at most %.1f anonymous, %.1f resident\n", dn_weights_format_name(format),
           (double)w->bytes * 1e-6, (double)m->file_bytes * 1e-6, (double)(peak.anonymous - before.anonymous) * 1e-6,
           (double)(peak.resident - before.resident) * 1e-6);
    cr_expect_gt(m->file_bytes, 100000000u);
    cr_expect_geq(after.anonymous - before.anonymous, w->bytes, "the weights are in memory");
    cr_expect_lt(peak.anonymous - before.anonymous, anonymous);
    cr_expect_lt(peak.resident - before.resident, resident);
    dn_weights_close(w);
    d->ops->close(d);
    dn_model_close(m);
    tiny_remove(folder);
}

Test(weights_memory, auto_copies_nothing)
{
    check(DN_WEIGHTS_AUTO);
}

Test(weights_memory, bf16_copies_nothing)
{
    check(DN_W_BF16);
}

Test(weights_memory, fp8_copies_nothing)
{
    check(DN_W_FP8);
}

Test(weights_memory, int8_copies_nothing)
{
    check(DN_W_INT8);
}

Test(weights_memory, int4_copies_nothing)
{
    check(DN_W_INT4);
}
