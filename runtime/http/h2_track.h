/* Which request bodies of an HTTP/2 connection are incomplete, since when and how large: h2o buffers them and tells
 * nobody.
 *
 * It reads frame headers only (no HPACK), on the way in and out. The connection's body budget, the header timer, the
 * body timers and the limit on a header block rest on it. Plain state machine without I/O; one per connection, on its
 * loop.
 */
#ifndef DN_HTTP_H2_TRACK_H
#define DN_HTTP_H2_TRACK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DN_H2_BODIES_MAX 128 /* h2o refuses streams above 100; a connection with more open bodies is cut */

struct dn_h2_body {
    uint32_t stream_id;
    uint64_t since_ns; /* when its HEADERS were complete */
    uint64_t n_bytes;  /* DATA payload so far */
};

struct dn_h2_track {
    uint32_t n_preface; /* bytes of the preface seen */
    uint8_t head[9];    /* frame header being collected */
    uint32_t n_head;
    uint32_t n_left;          /* payload bytes of the current frame still to come */
    uint32_t block_stream_id; /* header block without END_HEADERS, 0 if none */
    uint32_t n_block_bytes;
    bool block_ends_stream;
    uint64_t since_ns; /* when the incomplete frame, block or preface began; 0 at a boundary */
    struct dn_h2_body *body;
    uint32_t n_bodies, cap;
    uint64_t n_body_bytes; /* of all incomplete bodies together */
};

void dn_h2_track_init(struct dn_h2_track *t, uint64_t now_ns); /* expects the client's preface first */
void dn_h2_track_release(struct dn_h2_track *t);
/* Client bytes. false: more than DN_H2_BODIES_MAX bodies, or a header block above block_bytes_max. */
bool dn_h2_track_input(struct dn_h2_track *t, const void *data, size_t n, uint32_t block_bytes_max, uint64_t now_ns);
/* Server bytes, whole frames: a stream that the server resets has no body any more. */
void dn_h2_track_output(struct dn_h2_track *t, const void *data, size_t n);
/* When the client began something that it has not finished (preface, frame header, header block), 0 if it has not. DATA
 * has its own clock, `since_ns` of its body. */
uint64_t dn_h2_track_stuck_since(const struct dn_h2_track *t);
bool dn_h2_track_at_boundary(const struct dn_h2_track *t); /* between two frames and outside a header block */

#endif
