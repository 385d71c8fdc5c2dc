#include "cli/receipt.h"

#include "base/clock.h"
#include "cli/commit.h"
#include "cli/progress.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

void dn_receipt_head(const struct dn_model *m, const char *device)
{
    const struct dn_hyper *h = &m->hyper;
    char bytes[16];
    fprintf(stderr, "dunlin " DN_VERSION "%s%s\n", device[0] ? "  " : "", device);
    fprintf(stderr, "model    %s  %s, %u layers, %.0f M parameters, context %u\n", m->name, dn_arch_name(h->arch),
            h->n_layers, (double)m->n_params * 1e-6, h->context_tokens);
    fprintf(stderr, "         from %s (%s, %s)\n", m->path, m->type_text, dn_bytes_text(m->file_bytes, bytes));
    if (m->note != NULL)
        fprintf(stderr, "         %s\n", m->note);
}

static void print_weights(const struct dn_node *node)
{
    const struct dn_weights *w = node->pool->weights;
    char bytes[16];
    fprintf(stderr, "weights  %s  %s", dn_weights_format_name(w->format), dn_bytes_text(w->bytes, bytes));
    const char *separator = "  (";
    for (int f = 0; f < DN_W_FORMATS; f++) {
        if (w->format_bytes[f] == 0)
            continue;
        fprintf(stderr, "%s%s %s", separator, dn_weight_format_name((enum dn_weight_format)f),
                dn_bytes_text(w->format_bytes[f], bytes));
        separator = ", ";
    }
    fputs(separator[0] == ',' ? ")\n" : "\n", stderr);
    for (size_t i = 0; i < w->n_notes; i++)
        fprintf(stderr, "         %s\n", w->note[i]);
}

/* The device, and for a GPU where its memory went. */
static void print_device(const struct dn_node *node)
{
    const struct dn_pool *p = node->pool;
    char a[16], b[16], c[16], d[16], e[16], f[16], stale[200];
    fprintf(stderr, "device   %s%s%s\n", p->device_text, p->no_gpu[0] ? "; no GPU: " : "", p->no_gpu);
    if (dn_commit_differs(p->device->ops, stale))
        fprintf(stderr, "         %s\n", stale);
    if (p->device_total_bytes == 0)
        return;
    uint64_t kv = (uint64_t)p->runner->n_slabs * p->runner->layout.slab_bytes;
    fprintf(stderr, "         weights %s, kv %s, activations %s, workspace and graphs %s; %s of %s free\n",
            dn_bytes_text(p->weights->bytes, a), dn_bytes_text(kv, b),
            dn_bytes_text(p->runner->activation_bytes + p->runner->rope_bytes, c), dn_bytes_text(p->workspace_bytes, d),
            dn_bytes_text(p->device_free_bytes, e), dn_bytes_text(p->device_total_bytes, f));
}

static void print_kv(const struct dn_node *node)
{
    const struct dn_pool *p = node->pool;
    const struct dn_kv_layout *l = &p->runner->layout;
    char arena[16], token[16];
    uint64_t bytes = (uint64_t)p->runner->n_slabs * l->slab_bytes;
    fprintf(stderr, "kv       %s  %s by default", dn_bytes_text(bytes, arena), dn_kv_format_name(node->api.kv));
    for (int f = 0; f < DN_KV_FORMATS; f++)
        fprintf(stderr, "%s%s %s/token -> %uk tokens", f ? ", " : ": ", dn_kv_format_name((enum dn_kv_format)f),
                dn_bytes_text(l->format[f].page_bytes / l->page_tokens, token), p->capacity_tokens[f] / 1000);
    uint32_t context = p->conf.context_tokens, full = p->capacity_tokens[node->api.kv] / context;
    fprintf(stderr, "\n         = %u requests of full context (%u), or %u of 1k; at most %u run at once\n", full,
            context, p->capacity_tokens[node->api.kv] / 1024, p->conf.max_sequences);
}

void dn_receipt_tail(const struct dn_receipt *r)
{
    const struct dn_node *node = r->node;
    struct dn_buf policy = {0};
    print_device(node);
    print_weights(node);
    print_kv(node);
    dn_policy_summary(node->policy, &policy);
    bool none = strncmp(dn_buf_str(&policy), "0 files", 7) == 0;
    fprintf(stderr, "policy   %s\n", none ? "none: every request is served as configured" : dn_buf_str(&policy));
    dn_buf_release(&policy);
    fprintf(stderr, "integrity %s\n", node->api.check ? "tag: every page is checked before every step" : "off");
    fprintf(stderr, "http     https://%s:%u  (HTTP/2, HTTP/1.1; %s)\n", r->listen_host, r->port, r->cert_origin);
    if (r->cleartext[0])
        fprintf(stderr, "         http://%s  (cleartext, this machine only)\n", r->cleartext);
    if (node->keys->n > 0)
        fprintf(stderr, "keys     %zu\n", node->keys->n);
    else
        fprintf(stderr,
                "keys     none: anyone on this machine may call; before listening elsewhere: dunlin key add NAME\n");
    fprintf(stderr, "ready in %.1f s\n", (double)(dn_now_ns() - r->start_ns) * 1e-9);
    const char *key = node->keys->n > 0 ? " -H 'authorization: Bearer YOUR_KEY'" : "";
    if (node->chat_template)
        fprintf(stderr,
                "\n  curl -k https://%s:%u/v1/chat/completions -H 'content-type: application/json'%s \\\n"
                "    -d '{\"model\":\"%s\",\"messages\":[{\"role\":\"user\",\"content\":\"Hello\"}]}'\n\n",
                r->listen_host, r->port, key, node->model_name);
    else
        fprintf(stderr,
                "\n  curl -k https://%s:%u/v1/completions -H 'content-type: application/json'%s \\\n"
                "    -d '{\"model\":\"%s\",\"prompt\":\"Once upon a time\"}'\n\n",
                r->listen_host, r->port, key, node->model_name);
}
