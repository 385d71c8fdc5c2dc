#include "http/h2_track.h"

#include "base/buf.h"

#include <stdlib.h>
#include <string.h>

enum { DATA = 0, HEADERS = 1, RST_STREAM = 3, CONTINUATION = 9 };
enum { END_STREAM = 1, END_HEADERS = 4 };
#define PREFACE_BYTES 24

void dn_h2_track_init(struct dn_h2_track *t, uint64_t now_ns)
{
    *t = (struct dn_h2_track){.since_ns = now_ns};
}

void dn_h2_track_release(struct dn_h2_track *t)
{
    free(t->body);
    *t = (struct dn_h2_track){0};
}

static struct dn_h2_body *find(struct dn_h2_track *t, uint32_t id)
{
    for (uint32_t i = 0; i < t->n_bodies; i++)
        if (t->body[i].stream_id == id)
            return &t->body[i];
    return NULL;
}

static void drop(struct dn_h2_track *t, uint32_t id)
{
    struct dn_h2_body *b = find(t, id);
    if (!b)
        return;
    t->n_body_bytes -= b->n_bytes;
    *b = t->body[--t->n_bodies];
}

static bool add(struct dn_h2_track *t, uint32_t id, uint64_t now_ns)
{
    if (id == 0 || find(t, id))
        return true;
    if (t->n_bodies == DN_H2_BODIES_MAX)
        return false;
    if (t->n_bodies == t->cap) {
        t->cap = t->cap ? t->cap * 2 : 4;
        t->body = dn_realloc(t->body, t->cap, sizeof *t->body);
    }
    t->body[t->n_bodies++] = (struct dn_h2_body){.stream_id = id, .since_ns = now_ns};
    return true;
}

static uint32_t frame_bytes(const uint8_t *head)
{
    return (uint32_t)head[0] << 16 | (uint32_t)head[1] << 8 | head[2];
}

static uint32_t frame_stream(const uint8_t *head)
{
    return ((uint32_t)head[5] << 24 | (uint32_t)head[6] << 16 | (uint32_t)head[7] << 8 | head[8]) & 0x7fffffff;
}

/* A complete frame header. Bodies are counted when their frame is announced: h2o waits for whole frames as well. */
static bool on_frame(struct dn_h2_track *t, uint32_t block_bytes_max, uint64_t now_ns)
{
    uint32_t n = frame_bytes(t->head), id = frame_stream(t->head);
    uint8_t type = t->head[3], flags = t->head[4];
    t->n_left = n;
    switch (type) {
    case DATA: {
        struct dn_h2_body *b = find(t, id);
        if (b) {
            b->n_bytes += n;
            t->n_body_bytes += n;
        }
        if (flags & END_STREAM)
            drop(t, id);
        return true;
    }
    case HEADERS:
        t->n_block_bytes = 0;
        t->block_ends_stream = flags & END_STREAM;
        t->block_stream_id = id;
        break;
    case CONTINUATION:
        break;
    case RST_STREAM:
        drop(t, id);
        return true;
    default:
        return true;
    }
    t->n_block_bytes += n;
    if (t->n_block_bytes > block_bytes_max)
        return false;
    if (flags & END_HEADERS) {
        uint32_t stream_id = t->block_stream_id;
        t->block_stream_id = 0;
        if (t->block_ends_stream)
            drop(t, stream_id); /* trailers end a body */
        else
            return add(t, stream_id, now_ns);
    }
    return true;
}

bool dn_h2_track_input(struct dn_h2_track *t, const void *data, size_t n, uint32_t block_bytes_max, uint64_t now_ns)
{
    const uint8_t *at = data;
    while (n > 0) {
        size_t take;
        if (t->n_preface < PREFACE_BYTES) {
            take = PREFACE_BYTES - t->n_preface < n ? PREFACE_BYTES - t->n_preface : n;
            t->n_preface += (uint32_t)take;
        } else if (t->n_left) {
            take = t->n_left < n ? t->n_left : n;
            t->n_left -= (uint32_t)take;
        } else {
            take = sizeof t->head - t->n_head < n ? sizeof t->head - t->n_head : n;
            memcpy(t->head + t->n_head, at, take);
            t->n_head += (uint32_t)take;
            if (t->since_ns == 0)
                t->since_ns = now_ns;
            if (t->n_head == sizeof t->head) {
                t->n_head = 0;
                if (!on_frame(t, block_bytes_max, now_ns))
                    return false;
            }
        }
        at += take;
        n -= take;
        if (dn_h2_track_at_boundary(t))
            t->since_ns = 0;
    }
    return true;
}

void dn_h2_track_output(struct dn_h2_track *t, const void *data, size_t n)
{
    const uint8_t *at = data;
    while (t->n_bodies && n >= 9) {
        size_t frame = 9 + (size_t)frame_bytes(at);
        if (at[3] == RST_STREAM)
            drop(t, frame_stream(at));
        if (frame > n)
            return;
        at += frame;
        n -= frame;
    }
}

bool dn_h2_track_at_boundary(const struct dn_h2_track *t)
{
    return t->n_preface == PREFACE_BYTES && t->n_head == 0 && t->n_left == 0 && t->block_stream_id == 0;
}

uint64_t dn_h2_track_stuck_since(const struct dn_h2_track *t)
{
    return t->n_left && t->head[3] == DATA ? 0 : t->since_ns;
}
